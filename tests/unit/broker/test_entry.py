"""Who is let in, and as whose."""

from typing import Any

import pytest

from fusion_dask.broker.entry import admit, provider_of
from fusion_dask.errors import ClusterError, VersionMismatch
from fusion_dask.security.versions import versions


def member(**changes: object) -> dict[str, Any]:
    whole = {
        "name": "box-0",
        "provider": "box",
        "device": "GPU-1",
        "kind": "cuda",
        "backup": False,
        "probes": True,
        "versions": versions(),
        "pid": 1,
    }
    return {**whole, **changes}


def test_a_worker_that_fits_is_let_in() -> None:
    hello = admit(member(backup=True))
    assert (hello.name, hello.provider, hello.kind, hello.backup) == ("box-0", "box", "cuda", True)


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a b", "a/b", "x" * 101])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="cannot be used"):
        admit(member(name=name))


def test_other_versions_are_refused_with_the_line_that_fixes_it() -> None:
    other = {**versions(), "dask": "2000.1.0", "torch": "1.0.0"}
    with pytest.raises(VersionMismatch, match=r'pip install "dask==\S+" "torch==\d+\.\d+\.\*"'):
        admit(member(versions=other))
    with pytest.raises(VersionMismatch):
        admit(member(versions=None))
    with pytest.raises(ClusterError, match="unknown kind"):
        admit(member(kind="tpu"))


class Connection:
    def __init__(self, certificate: dict[str, Any] | None) -> None:
        self.extra_info = {} if certificate is None else {"peercert": certificate}


@pytest.mark.parametrize(
    ("role", "provider"), [("provider", "box"), ("user", None), ("broker", None), (None, None)]
)
def test_a_provider_is_who_its_certificate_names(role: str | None, provider: str | None) -> None:
    subject = ((("organizationalUnitName", role),), (("commonName", "box"),))
    certificate = None if role is None else {"subject": subject}
    assert provider_of(Connection(certificate)) == provider
