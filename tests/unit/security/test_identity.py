"""Memberships: kept for their owner alone, found by address, usable as an environment."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_dask.errors import SecurityError
from fusion_dask.security.identity import (
    Identity,
    find,
    host_and_port,
    load,
    pool_folder,
    pools,
    save,
)
from fusion_dask.security.roles import Role


def keep(home: Path, host: str, *, expires_s: float = 60.0) -> Identity:
    identity = Identity(
        folder=pool_folder(home, host, 8788, Role.PROVIDER),
        role=Role.PROVIDER,
        name="box",
        host=host,
        gateway_port=8788,
        scheduler=f"tls://{host}:8786",
        prefect_url=f"https://{host}:4200/api",
        store="s3://fusion/store",
        own_store=True,
        secrets={"AWS_SECRET_ACCESS_KEY": "hush"},
        expires=time.time() + expires_s,
    )
    save(identity, key_pem=b"key", certificate_pem=b"certificate", ca_pem=b"ca")
    return identity


def test_a_membership_is_read_back_and_belongs_to_its_owner(tmp_path: Path) -> None:
    identity = keep(tmp_path, "192.0.2.7")
    assert load(identity.folder) == identity
    assert "hush" not in repr(identity)
    assert identity.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in identity.folder.iterdir()} == {0o600}


def test_only_memberships_that_are_valid_are_found(tmp_path: Path) -> None:
    keep(tmp_path, "192.0.2.7")
    keep(tmp_path, "192.0.2.8", expires_s=-1.0)
    assert [identity.host for identity in pools(tmp_path)] == ["192.0.2.7"]
    assert find(tmp_path, "192.0.2.7", Role.PROVIDER) is not None
    assert find(tmp_path, "192.0.2.7", Role.USER) is None
    assert find(tmp_path, "192.0.2.7:1", Role.PROVIDER) is None
    assert find(tmp_path, "192.0.2.8", Role.PROVIDER) is None


def test_the_environment_names_files_and_services(tmp_path: Path) -> None:
    variables = keep(tmp_path, "192.0.2.7").as_environment()
    assert variables["FUSION_CLUSTER"] == "tls://192.0.2.7:8786"
    assert variables["AWS_SECRET_ACCESS_KEY"] == "hush"
    assert Path(variables["DASK_DISTRIBUTED__COMM__TLS__WORKER__KEY"]).read_bytes() == b"key"
    assert Path(variables["AWS_CA_BUNDLE"]).read_bytes() == b"ca"


def test_what_a_shell_knows_of_other_stores_is_not_mixed_with_the_pools(tmp_path: Path) -> None:
    shell = {"AWS_SESSION_TOKEN": "other", "AWS_ENDPOINT_URL_S3": "https://other"}
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_ENDPOINT_URL": "https://192.0.2.7:8333"}
    identity = replace(keep(tmp_path, "192.0.2.7"), secrets=keys)
    merged = {**shell, **identity.as_environment()}
    assert merged["AWS_SESSION_TOKEN"] == ""
    assert merged["AWS_ENDPOINT_URL_S3"] == "https://192.0.2.7:8333"
    # What the pool itself hands on is what counts.
    own = replace(identity, secrets={**keys, **shell}).as_environment()
    assert {name: own[name] for name in shell} == shell
    unnamed = replace(identity, secrets={}).as_environment()
    assert not set(shell) & set(unnamed), "whoever brings his own credentials keeps them"


@pytest.mark.parametrize(
    "text",
    ["", ":8788", "a:b", "a:0", "a:65536", "[::1", "a" * 64, "a." * 130, "https://a", "a b", "x@y"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(SecurityError, match="not an address"):
        host_and_port(text)


def test_a_membership_that_was_replaced_in_part_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = keep(tmp_path, "192.0.2.7")

    def stops(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("fusion_dask.security.identity.write_private", stops)
    with pytest.raises(OSError, match="No space"):
        keep(tmp_path, "192.0.2.7")
    assert pools(tmp_path) == []
    with pytest.raises(SecurityError, match="join again"):
        load(identity.folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pool.json", "{"),
        ("pool.json", '{"role": "provider"}'),
        ("pool.json", None),
        ("cert.pem", None),
    ],
)
def test_a_damaged_membership_says_what_to_do_and_concerns_no_other(
    tmp_path: Path, name: str, content: str | None
) -> None:
    identity = keep(tmp_path, "192.0.2.7")
    other = keep(tmp_path, "192.0.2.8")
    path = identity.folder / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(SecurityError, match=r"is damaged.*join again"):
        load(identity.folder)
    assert find(tmp_path, "192.0.2.8", Role.PROVIDER) == other
