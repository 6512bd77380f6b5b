"""The authority: what its certificates say, and that nobody else reads its keys."""

import datetime as dt
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from fusion_dask.errors import SecurityError
from fusion_dask.security.authority import Authority, fingerprint_of, make_key_and_csr
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
    for pem, message in [
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
