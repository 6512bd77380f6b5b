"""The pool's certificate authority: `fusion up` makes one, and every member's certificate is from it.

Covers: keys on P-256, certificates of X.509 version 3 through `cryptography`. Not covered: who may have
one (`tokens.py`, `gateway.py`).

Invariant: subject and use of a certificate are the authority's words, never those of the request;
private keys are files that only their owner reads, and those of members never leave their machine.
"""

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fusion_dask.errors import SecurityError
from fusion_dask.security.files import locked, make_private_folder, write_private
from fusion_dask.security.roles import Role

__all__ = ["Authority", "Issued", "fingerprint_of", "make_key_and_csr"]

AUTHORITY_DAYS: Final = 3650.0
SERVER_DAYS: Final = 365.0
#: A server's certificate is made anew this long before its end.
RENEW_DAYS: Final = 30.0
#: Clocks of members may be this much behind.
BACKDATE: Final = dt.timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A new certificate.

    Attributes:
        certificate_pem: PEM.
        serial: Lower-case hexadecimal, as `roles.serial_of` reads it.
        expires: Unix time in seconds.
    """

    certificate_pem: bytes
    serial: str
    expires: float


class Authority:
    """A key that signs, and its own certificate.

    Args:
        key: The private key.
        certificate: The self-signed certificate.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def open(cls, folder: Path) -> "Authority":
        """The authority kept in a folder; made on first use.

        Raises:
            SecurityError: What is there cannot be read.
        """
        key_path, certificate_path = folder / "ca.key", folder / "ca.pem"
        make_private_folder(folder)
        with locked(folder / "ca.lock"):
            if not certificate_path.exists():
                key = ec.generate_private_key(ec.SECP256R1())
                # The certificate last: a folder without one was never used.
                write_private(key_path, _key_pem(key))
                write_private(certificate_path, _pem(_self_signed(key)))
        try:
            loaded = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        except (OSError, ValueError) as error:
            raise SecurityError(
                f"the authority in {folder} cannot be read ({error}); put its backup back, or remove "
                "the folder and let every provider join again"
            ) from None
        if (
            not isinstance(loaded, ec.EllipticCurvePrivateKey)
            or loaded.public_key() != certificate.public_key()
        ):
            raise SecurityError(
                f"{key_path} is not the key of {certificate_path}; put the backup of both back"
            )
        return cls(loaded, certificate)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate's DER form, hexadecimal."""
        return self._certificate.fingerprint(hashes.SHA256()).hex()

    @property
    def certificate_pem(self) -> bytes:
        """The authority's certificate."""
        return _pem(self._certificate)

    def sign(self, csr_pem: bytes, *, role: Role, name: str, days: float) -> Issued:
        """A certificate for the key of a request.

        Args:
            csr_pem: The request; only its key is used.
            role: What the holder will be.
            name: The holder's name.
            days: How long it is valid.

        Raises:
            SecurityError: The request is malformed, its signature wrong, or its key not P-256.
        """
        try:
            request = x509.load_pem_x509_csr(csr_pem)
        except ValueError as error:
            raise SecurityError(f"the certificate request cannot be read: {error}") from None
        key = request.public_key()
        if not request.is_signature_valid:
            raise SecurityError("the certificate request is not signed with its own key")
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
            raise SecurityError("the certificate request is for a key that is not on P-256")
        use = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role is not Role.USER:
            # A worker serves its neighbours.
            use.append(ExtendedKeyUsageOID.SERVER_AUTH)
        return self._issue(key, role=role, name=name, days=days, use=use, hosts=())

    def server_files(self, folder: Path, hosts: Sequence[str]) -> tuple[Path, Path]:
        """Certificate and key of the broker's servers, valid for `hosts`.

        They are made anew when the hosts have changed or the end is near.

        Args:
            folder: Where `server.pem` and `server.key` are kept.
            hosts: Names and IP addresses by which members reach the broker.
        """
        certificate_path, key_path = folder / "server.pem", folder / "server.key"
        wanted = _alternative_names(hosts)
        if not (key_path.exists() and self._still_fits(certificate_path, wanted)):
            key = ec.generate_private_key(ec.SECP256R1())
            issued = self._issue(
                key.public_key(),
                role=Role.BROKER,
                name="broker",
                days=SERVER_DAYS,
                use=[ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
                hosts=hosts,
            )
            make_private_folder(folder)
            certificate_path.unlink(missing_ok=True)
            write_private(key_path, _key_pem(key))
            write_private(certificate_path, issued.certificate_pem)
        return certificate_path, key_path

    def _still_fits(self, path: Path, wanted: x509.SubjectAlternativeName) -> bool:
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            certificate.verify_directly_issued_by(self._certificate)
        except (OSError, ValueError, x509.ExtensionNotFound, TypeError):
            return False
        left = certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
        return found.value == wanted and left > dt.timedelta(days=RENEW_DAYS)

    def _issue(
        self,
        key: ec.EllipticCurvePublicKey,
        *,
        role: Role,
        name: str,
        days: float,
        use: Sequence[x509.ObjectIdentifier],
        hosts: Sequence[str],
    ) -> Issued:
        now = dt.datetime.now(dt.UTC)
        expires = now + dt.timedelta(days=days)
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role.value),
                x509.NameAttribute(NameOID.COMMON_NAME, name[:64]),
            ]
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATE)
            .not_valid_after(expires)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(list(use)), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if hosts:
            builder = builder.add_extension(_alternative_names(hosts), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(
            certificate_pem=_pem(certificate),
            serial=f"{certificate.serial_number:x}",
            expires=expires.timestamp(),
        )


def make_key_and_csr(name: str) -> tuple[bytes, bytes]:
    """A new private key and a request for it, both PEM.

    Args:
        name: For the log of the one who signs; not what the certificate will say.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    signed = request.sign(key, hashes.SHA256())
    return _key_pem(key), signed.public_bytes(serialization.Encoding.PEM)


def fingerprint_of(certificate_pem: bytes) -> str:
    """SHA-256 of a certificate's DER form, hexadecimal.

    Raises:
        SecurityError: It is no certificate.
    """
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except ValueError as error:
        raise SecurityError(f"that is no certificate: {error}") from None
    return certificate.fingerprint(hashes.SHA256()).hex()


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    # Two pools must not be taken for each other by their issuer's name.
    name = x509.Name(
        [
            x509.NameAttribute(
                NameOID.COMMON_NAME, f"Fusion pool {x509.random_serial_number():x}"[:40]
            )
        ]
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + dt.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _alternative_names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = []
    for host in sorted(set(hosts)):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
