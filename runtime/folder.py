"""The state folder: where it is, its locks, its sockets, its ports, its logs.

::

    FOLDER/keeper.lock        held by the keeper *and its sidecars*: free only when all of them are dead
    FOLDER/up.lock            held by ``twiceshy up``: background keepers make way
    FOLDER/keeper.sock        who has it open is a user; the last one gone, everything ends
    FOLDER/keeper.log         what the keeper had to say
    FOLDER/postgres/          embedded Postgres, when DATABASE_URL is not set; FOLDER/postgres.log
    FOLDER/sidecars/HASH/     settings.json, port and sidecar.log of the sidecar with these settings
    FOLDER/runs/RUN.lock      held by the launcher of a run

One folder per *database*, not per rule file: the runs of embedded Postgres live in it, and must still be
found after an edit of the rules. Users whose rules differ get a sidecar of their own inside it.
"""

import contextlib
import fcntl
import hashlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from runtime.errors import UsageError

#: ``sun_path`` has 108 bytes, the last of which is zero.
LONGEST_SOCKET_PATH = 107
#: Logs are appended to, and put aside when they have grown to this.
LOG_LIMIT = 16 << 20
#: What libpq's variables add to a DSN that does not say it.
_PLACE = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER")


def database_identity(dsn: str | None, environment: Mapping[str, str] | None = None) -> str:
    """Which database *dsn* is, as a short hash; ``embedded`` for None."""
    if not dsn:
        return "embedded"
    known = os.environ if environment is None else environment
    parts = [dsn, *(known.get(name, "") for name in _PLACE)]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def state_folder(dsn: str | None) -> Path:
    """TWICESHY_HOME, else a folder of the database's own below the user's state folder. Does not make it."""
    if home := os.environ.get("TWICESHY_HOME"):
        return Path(home).absolute()
    if xdg := os.environ.get("XDG_STATE_HOME"):
        base = Path(xdg).absolute()
    elif os.geteuid() == 0:
        base = Path("/var/lib")  # below /root, Postgres (which refuses to be root) could not reach its data
    else:
        try:
            base = Path.home() / ".local" / "state"
        except RuntimeError as error:  # a uid without an entry, and no HOME
            raise UsageError("this user has no home folder: set TWICESHY_HOME") from error
    return base / "twiceshy" / database_identity(dsn)


def make_folder(folder: Path) -> None:
    """Make *folder* and the parents it lacks; for root so that others may pass, for others private."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                # Root's Postgres runs as another user, who must get through.
                path.chmod(0o711 if os.geteuid() == 0 else 0o700)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK) or not folder.is_dir():
            raise PermissionError(13, "not a folder that may be written to")
    except OSError as error:
        raise UsageError(f"state folder {folder}: {error.strerror}: set TWICESHY_HOME to another") from error


class Lock:
    """A lock file. The kernel frees it when the last process that has its descriptor is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd: int | None = None

    def take(self) -> bool:
        """Try to take it. False: another process has it. Raises UsageError when there can be no such file."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(OSError):  # for people and messages, and no reason to fail on a full disk
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        self.fd = fd
        return True

    def owner(self) -> str:
        """The pid of who took it last, ``?`` if unknown."""
        try:
            return self.path.read_text("ascii", "replace").strip() or "?"
        except OSError:
            return "?"

    def held(self) -> bool:
        """Whether some process has it."""
        if self.fd is not None:
            return True
        try:
            fd = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def release(self) -> None:
        """Let it go in this process; processes that inherited it keep it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


# ---- sockets


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """*path* as a socket address, by way of /proc when it is too long for one."""
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def listen(path: Path) -> socket.socket:
    """A listening Unix socket that only this user may connect to. Takes a stale one's place."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with _address(path) as address:
            listener.bind(address)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


def connect(path: Path) -> socket.socket | None:
    """A connection to the socket at *path*, None when nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            connection.connect(address)
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return connection


def hold_port(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Bind *port* (0: a free one) without listening: nobody else is given it, and a server that is a child
    of ours can come and go on it (it sets SO_REUSEADDR, as servers do). Raises OSError when it is taken.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except BaseException:
        held.close()
        raise
    return held


def hold_kept_port(remembered: Path) -> socket.socket:
    """The port that the file *remembered* names if it is free, else a free one, which is written there."""
    try:
        return hold_port(int(remembered.read_text("ascii")))
    except (OSError, ValueError, OverflowError):
        held = hold_port(0)
    remembered.write_text(f"{held.getsockname()[1]}\n", "ascii")
    return held


# ---- logs


def open_log(path: Path) -> int:
    """A descriptor that appends to *path*. Appending is what makes ``trim_log`` safe."""
    trim_log(path)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def trim_log(path: Path) -> None:
    """Put a log that has grown too large aside, as ``NAME.1``; its writers go on in the emptied file."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size < LOG_LIMIT:
            return
        aside = path.with_name(path.name + ".1")
        with (
            path.open("rb+") as log,
            os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as old,
        ):
            while piece := log.read(1 << 20):
                old.write(piece)
            log.truncate(0)


def tail(path: Path, since: int = 0, lines: int = 4) -> str:
    """The last *lines* of a log, of what was written after its first *since* bytes, on one line."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(since if since <= size else 0, size - 4096))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return " / ".join(text.strip().splitlines()[-lines:])
