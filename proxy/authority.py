"""The installation's certificate authority and the leaves that it signs. The only file that knows mitmproxy.

Only ``mitmproxy.certs`` is used, and imported when the first tunnel opens (1.1 s, 22 MB). The authority is made in
a temporary folder under a lock and then renamed into place, so that it is there whole or not at all; its key has
mode 0600 from creation on. A leaf costs about 14 ms of RSA: off the event loop, one per name, kept.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import ipaddress
import os
import shutil
import ssl
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import TwiceshyError

if TYPE_CHECKING:
    from cryptography import x509
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
    if _is_ready(place):
        return place
    with _locked(folder):
        if not (place / CERTIFICATE).exists():
            _create(folder, place)
        if not _is_ready(place):
            _write(place / BUNDLE, _system_roots(place) + (place / CERTIFICATE).read_text("ascii"))
    return place


def rotate(folder: Path) -> Path:
    """Put a new authority in the old one's place. Blocking. For when no sidecar of *folder* runs: agents that run
    trust the old one until they end.
    """
    with _locked(folder):
        _create(folder, folder / "ca")
    return ensure(folder)


def certificate(folder: Path) -> tuple[Path, str]:
    """Where the certificate is, and its SHA-256 fingerprint as other programs print it."""
    path = ensure(folder) / CERTIFICATE
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(path.read_text("ascii"))).hexdigest().upper()
    return path, ":".join(digest[at : at + 2] for at in range(0, len(digest), 2))


def _is_ready(place: Path) -> bool:
    """It is there, and its bundle is not older than the system's roots."""
    try:
        made = (place / BUNDLE).stat().st_mtime
        roots = _roots_file(place)
        return (place / CERTIFICATE).exists() and (roots is None or roots.stat().st_mtime <= made)
    except OSError:
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with os.fdopen(os.open(folder / "ca.lock", os.O_RDWR | os.O_CREAT, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _create(folder: Path, place: Path) -> None:
    from mitmproxy.certs import CertStore

    for left in folder.glob("ca-*"):  # by one that was killed here
        shutil.rmtree(left, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix="ca-", dir=folder))  # mode 0700
    old = os.umask(0o077)
    try:
        CertStore.create_store(fresh, NAME, KEY_SIZE, organization=NAME, cn=f"{NAME} on {os.uname().nodename}"[:64])
        shutil.copyfile(fresh / f"{NAME}-ca-cert.pem", fresh / CERTIFICATE)
        for extra in fresh.glob("*.p12"):
            extra.unlink()
        (fresh / CERTIFICATE).chmod(0o644)
        # Agents may run as another user: they read the certificates, never the key. Done last: the key is 0600.
        fresh.chmod(0o711)
        if place.exists():
            place.rename(fresh.with_name(f"{fresh.name}-old"))
        fresh.rename(place)
    finally:
        os.umask(old)
        for left in folder.glob(f"{fresh.name}*"):
            shutil.rmtree(left, ignore_errors=True)


def _roots_file(place: Path) -> Path | None:
    """What the user trusts: SSL_CERT_FILE, else the system's. Not a bundle of ours, which an agent's child inherits."""
    for path in (ssl.get_default_verify_paths().cafile, *_ROOTS):
        if path and Path(path).is_file() and Path(path).resolve() != (place / BUNDLE).resolve():
            return Path(path)
    return None


def _system_roots(place: Path) -> str:
    found = _roots_file(place)
    if found is not None:
        return found.read_text("ascii", "ignore") + "\n"
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
        self._made_by: tuple[int, int] | None = None
        self._contexts: OrderedDict[tuple[str, str], ssl.SSLContext] = OrderedDict()
        self._lock = asyncio.Lock()

    async def context(self, host: str, name: str = "") -> ssl.SSLContext:
        """The server-side context whose leaf is for *host*, and for *name* if that is another one.

        Raises TwiceshyError, OSError or ValueError when it cannot be made.
        """
        key = (host, "" if name == host else name)
        known = self._known(key)
        if known is not None:
            return known
        async with self._lock:
            known = self._known(key)
            if known is None:
                loop = asyncio.get_running_loop()
                known = self._contexts[key] = await loop.run_in_executor(None, self._make, key)
                while len(self._contexts) > LEAVES:
                    self._contexts.popitem(last=False)
            return known

    def _known(self, key: tuple[str, str]) -> ssl.SSLContext | None:
        if self._made_by is not None and self._made_by != _stamp(self._folder):
            # Agents that start now trust the new one: leaves of the old would be of no use.
            self._store, self._made_by = None, None
            self._contexts.clear()
        known = self._contexts.get(key)
        if known is not None:
            self._contexts.move_to_end(key)
        return known

    def _make(self, key: tuple[str, str]) -> ssl.SSLContext:
        from cryptography.hazmat.primitives import serialization
        from mitmproxy.certs import CertStore

        if self._store is None:
            place = ensure(self._folder)
            self._made_by = _stamp(self._folder)
            self._store = CertStore.from_store(place, NAME, KEY_SIZE)
        host, name = key
        # A host that cannot stand in a certificate is refused inside, with words: by a leaf for the name it can be.
        names = [each for each in map(_general_name, (host, name)) if each is not None]
        if not names:
            raise TwiceshyError(f"{host!r} cannot stand in a certificate")
        entry = self._store.get_cert(str(names[0].value), names, NAME)
        key_pem = entry.privatekey.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Offering h2 would be answered by clients that prefer it, and there is no HTTP/2 behind this door.
        context.set_alpn_protocols(["http/1.1"])
        _load(context, entry.cert.to_pem() + key_pem)
        return context


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Tells one authority from another without reading it."""
    try:
        found = (folder / "ca" / CERTIFICATE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _general_name(host: str) -> "x509.IPAddress | x509.DNSName | None":
    from cryptography import x509

    if not host:
        return None
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host if host.isascii() else host.encode("idna").decode("ascii"))
    except (UnicodeError, ValueError):
        return None


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """``load_cert_chain`` reads files only: a file that has no name and never reaches a disk."""
    fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
