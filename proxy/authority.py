"""The installation's certificate authority and the leaves that it signs. The only file that knows mitmproxy.

Only ``mitmproxy.certs`` is used, and imported when the first tunnel opens (1.1 s, 22 MB). The authority is made in
a temporary folder under a lock and then renamed into place, so that it is there whole or not at all; its key has
mode 0600 from creation on. A leaf costs about 14 ms of RSA: off the event loop, one per name, kept.
"""

import asyncio
import fcntl
import ipaddress
import os
import shutil
import ssl
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import TwiceshyError

if TYPE_CHECKING:
    from mitmproxy.certs import CertStore

NAME = "twiceshy"
KEY_SIZE = 2048
#: Leaves (and their TLS contexts) that are kept; a name beyond that pushes the oldest out.
LEAVES = 1000

CERTIFICATE = "ca.pem"
BUNDLE = "bundle.pem"
#: Where systems keep their roots, for OpenSSL builds whose own default is empty.
_ROOTS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


def ensure(folder: Path) -> Path:
    """Make the authority in *folder*/ca if it is not there. Blocking. Returns that folder.

    It then holds ``ca.pem`` (the certificate alone), ``bundle.pem`` (the system's roots and it), and the key.
    """
    place = folder / "ca"
    if (place / CERTIFICATE).exists() and (place / BUNDLE).exists():
        return place
    with (folder / "ca.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / CERTIFICATE).exists():
            _create(folder, place)
        if not (place / BUNDLE).exists():
            _write(place / BUNDLE, _system_roots() + (place / CERTIFICATE).read_text("ascii"))
    return place


def rotate(folder: Path) -> Path:
    """Put a new authority in the old one's place. Agents that run trust the old one until they end. Blocking."""
    with (folder / "ca.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(folder / "ca", ignore_errors=True)
    return ensure(folder)


def _create(folder: Path, place: Path) -> None:
    from mitmproxy.certs import CertStore

    fresh = Path(tempfile.mkdtemp(prefix="ca-", dir=folder))  # mode 0700
    old = os.umask(0o077)
    try:
        CertStore.create_store(fresh, NAME, KEY_SIZE, organization=NAME, cn=f"{NAME} on {os.uname().nodename}"[:64])
        shutil.copyfile(fresh / f"{NAME}-ca-cert.pem", fresh / CERTIFICATE)
        for extra in fresh.glob("*.p12"):
            extra.unlink()
        (fresh / CERTIFICATE).chmod(0o644)
        shutil.rmtree(place, ignore_errors=True)
        fresh.rename(place)
    finally:
        os.umask(old)
        shutil.rmtree(fresh, ignore_errors=True)
    # Agents may run as another user: they read the certificates, never the key.
    place.chmod(0o711)


def _system_roots() -> str:
    found = ssl.get_default_verify_paths().cafile
    for path in (found, *_ROOTS):
        if path and Path(path).is_file():
            return Path(path).read_text("ascii", "ignore") + "\n"
    import certifi

    return certifi.contents() + "\n"


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text, "ascii")
    fresh.chmod(0o644)
    fresh.rename(path)


class Authority:
    """TLS contexts for the names that clients ask for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store: CertStore | None = None
        self._contexts: OrderedDict[str, ssl.SSLContext] = OrderedDict()
        self._lock = asyncio.Lock()

    async def context(self, host: str) -> ssl.SSLContext:
        """The server-side context that presents *host*'s leaf. Raises TwiceshyError when it cannot be made."""
        known = self._contexts.get(host)
        if known is not None:
            self._contexts.move_to_end(host)
            return known
        async with self._lock:
            if host not in self._contexts:
                loop = asyncio.get_running_loop()
                self._contexts[host] = await loop.run_in_executor(None, self._make, host)
                while len(self._contexts) > LEAVES:
                    self._contexts.popitem(last=False)
            return self._contexts[host]

    def _make(self, host: str) -> ssl.SSLContext:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from mitmproxy.certs import CertStore

        if self._store is None:
            place = ensure(self._folder)
            self._store = CertStore.from_store(place, NAME, KEY_SIZE)
        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
            common = host
        except ValueError:
            try:
                common = host.encode("idna").decode("ascii") if not host.isascii() else host
                name = x509.DNSName(common)
            except (UnicodeError, ValueError) as error:
                raise TwiceshyError(f"{host!r} cannot stand in a certificate: {error}") from error
        entry = self._store.get_cert(common, [name], NAME)
        key = entry.privatekey.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Offering h2 would be answered by clients that prefer it, and there is no HTTP/2 behind this door.
        context.set_alpn_protocols(["http/1.1"])
        _load(context, entry.cert.to_pem() + key)
        return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """``load_cert_chain`` reads files only: a file that has no name and never reaches a disk."""
    fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
