"""Every backend passes every contract."""

import uuid
from pathlib import Path

import pytest

from fusion_storage.store import Store, open_store
from unit.storage.contracts import CheckpointContract, RunContract, StoreContract


class TestMemory(StoreContract, CheckpointContract, RunContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"memory://{uuid.uuid4().hex}/below")


class TestLocal(StoreContract, CheckpointContract, RunContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(tmp_path / "store")
