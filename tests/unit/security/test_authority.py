"""The authority: what its certificates say, and that nobody else reads its keys."""

import base64
import datetime as dt
import multiprocessing
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from fusion_dask.errors import SecurityError
from fusion_dask.security.authority import (
    RENEW_DAYS,
    Authority,
    fingerprint_of,
    make_key_and_csr,
)
from fusion_dask.security.roles import Role


def test_an_authority_is_made_once(tmp_path: Path) -> None:
    first = Authority.open(tmp_path / "authority")
    again = Authority.open(tmp_path / "authority")
    assert first.fingerprint == again.fingerprint == fingerprint_of(first.certificate_pem)
    assert Authority.open(tmp_path / "other").fingerprint != first.fingerprint
    assert (tmp_path / "authority").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "authority" / "ca.key").stat().st_mode & 0o777 == 0o600


def test_a_certificate_says_what_the_authority_says_not_what_the_request_claims(
    tmp_path: Path,
) -> None:
    authority = Authority.open(tmp_path)
    key = ec.generate_private_key(ec.SECP256R1())
    claimed = x509.Name([x509.NameAttribute(x509.oid.NameOID.ORGANIZATIONAL_UNIT_NAME, "broker")])
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(claimed)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = request.public_bytes(serialization.Encoding.PEM)
    issued = authority.sign(pem, role=Role.PROVIDER, name="box", days=1.0)
    certificate = x509.load_pem_x509_certificate(issued.certificate_pem)
    assert certificate.subject.rfc4514_string() == "CN=box,OU=provider"
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert constraints.ca is False
    assert f"{certificate.serial_number:x}" == issued.serial
    left = certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
    assert dt.timedelta(hours=23) < left <= dt.timedelta(days=1)


def test_requests_that_are_none_are_refused(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path)
    _, good = make_key_and_csr("box")
    rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    other = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(rsa_key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    der = x509.load_pem_x509_csr(good).public_bytes(serialization.Encoding.DER)
    # The signature is the last part.
    text = base64.encodebytes(der[:-1] + bytes([der[-1] ^ 1]))
    forged = b"-----BEGIN CERTIFICATE REQUEST-----\n%b-----END CERTIFICATE REQUEST-----\n" % text
    for pem, message in [
        (forged, "not signed with its own key"),
        (b"", "cannot be read"),
        (good[:100], "cannot be read"),
        (other, "not on P-256"),
    ]:
        with pytest.raises(SecurityError, match=message):
            authority.sign(pem, role=Role.USER, name="x", days=1.0)


def test_the_servers_certificate_is_kept_until_its_hosts_change(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "authority")
    certificate, key = authority.server_files(tmp_path, ["127.0.0.1", "localhost"])
    first = certificate.read_bytes()
    authority.server_files(tmp_path, ["localhost", "127.0.0.1"])
    assert certificate.read_bytes() == first
    authority.server_files(tmp_path, ["localhost", "gpu.example"])
    assert certificate.read_bytes() != first
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_damaged_authority_is_not_replaced_silently(tmp_path: Path) -> None:
    Authority.open(tmp_path)
    (tmp_path / "ca.key").write_text("damaged")
    with pytest.raises(SecurityError, match="backup"):
        Authority.open(tmp_path)


def test_a_key_of_another_authority_is_refused(tmp_path: Path) -> None:
    Authority.open(tmp_path / "a")
    Authority.open(tmp_path / "b")
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(SecurityError, match="is not the key of"):
        Authority.open(tmp_path / "a")


def test_the_servers_certificate_is_made_anew_near_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.open(tmp_path / "authority")
    for days, is_kept in ((RENEW_DAYS - 1, False), (RENEW_DAYS + 1, True)):
        folder = tmp_path / f"{days}"
        monkeypatch.setattr("fusion_dask.security.authority.SERVER_DAYS", days)
        certificate, key = authority.server_files(folder, ["127.0.0.1"])
        before = certificate.read_bytes(), key.read_bytes()
        monkeypatch.setattr("fusion_dask.security.authority.SERVER_DAYS", 365.0)
        authority.server_files(folder, ["127.0.0.1"])
        assert (before == (certificate.read_bytes(), key.read_bytes())) is is_kept


def test_the_servers_certificate_is_made_anew_for_another_authority(tmp_path: Path) -> None:
    first, second = (Authority.open(tmp_path / name) for name in "ab")
    certificate, _ = first.server_files(tmp_path, ["127.0.0.1"])
    before = certificate.read_bytes()
    second.server_files(tmp_path, ["127.0.0.1"])
    assert certificate.read_bytes() != before


def test_processes_that_start_at_once_make_one_authority(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    racers = [context.Process(target=_open, args=(tmp_path, results)) for _ in range(6)]
    for racer in racers:
        racer.start()
    fingerprints = {results.get(timeout=60) for _ in racers}
    for racer in racers:
        racer.join(30)
    assert fingerprints == {Authority.open(tmp_path).fingerprint}


def _open(folder: Path, results: "multiprocessing.Queue[str]") -> None:
    try:
        results.put(Authority.open(folder).fingerprint)
    except SecurityError as error:
        results.put(str(error))
