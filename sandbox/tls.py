"""Certificates for a sandbox that speaks TLS, signed by a CA of its own. Needs ``cryptography``, when it is used.

``ensure(FOLDER)`` makes ``ca.pem`` (to be trusted by who calls the sandbox) and ``server.pem`` with ``server.key``.
``Issuer`` makes others too: such that have run out, or name somebody else.
"""

import datetime as dt
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

#: What the sandbox is called where it is called by a name.
NAMES = ("localhost", "127.0.0.1", "::1", "sandbox.test")
CA, CERTIFICATE, KEY = "ca.pem", "server.pem", "server.key"
_DAY = dt.timedelta(days=1)


class Issuer:
    """A CA in memory. Its key is nowhere else."""

    def __init__(self, name: str = "sandbox CA") -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = name
        self._certificate = self._sign(name, self._key, (), ca=True)

    @property
    def pem(self) -> bytes:
        """The CA's certificate."""
        from cryptography.hazmat.primitives import serialization

        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, names: Sequence[str] = NAMES, *, days: int = 30) -> tuple[bytes, bytes]:
        """A certificate for *names* and its key, both PEM. It began two days ago; with *days* < 0 it has run out."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(names[0], key, names, days=days)
        return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def _sign(
        self,
        name: str,
        key: "ec.EllipticCurvePrivateKey",
        names: Sequence[str],
        *,
        ca: bool = False,
        days: int = 30,
    ) -> "x509.Certificate":
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * _DAY)
            .not_valid_after(now + days * _DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(_usage(ca=ca), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(each) for each in names]), False)
        return builder.sign(self._key, hashes.SHA256())


def ensure(folder: Path) -> Path:
    """Make CA and certificate in *folder* if they are not there; *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CA).exists():
        issuer = Issuer()
        certificate, key = issuer.issue()
        for name, data in ((KEY, key), (CERTIFICATE, certificate), (CA, issuer.pem)):
            fd, fresh = tempfile.mkstemp(dir=folder)  # mode 0600
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            Path(fresh).replace(folder / name)
    return folder


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What a server needs to present *certificate*."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _name(text: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, ca: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=ca, crl_sign=ca, encipher_only=False, decipher_only=False,
    )  # fmt: skip
