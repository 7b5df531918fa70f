"""Why a connection went past the sidecar, and what to do about it. Pure.

What is known of a connection: the process (program, words, environment as it was started with, libraries in its
memory) and, where the process let itself be asked (``sitecustomize``, the Node preload), the frames of the code that
made it. The table below is gone through from the top; the first cause that fits is named.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runtime.launch.sightings import MAIL, SERVICES, Address, destination

GATEWAY = "or give the client the gateway address as its base URL"


@dataclass(frozen=True, slots=True)
class Frame:
    """A place in a program's source."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Told:
    """What a process itself wrote down of a connection. ``frames``: the innermost first."""

    pid: int
    host: str
    port: int
    name: str = ""  # what it looked up before, as far as that is known
    frames: tuple[Frame, ...] = ()

    @property
    def to(self) -> Address | None:
        """None: a host that was given by its name."""
        try:
            return destination("127.0.0.1" if self.host == "localhost" else self.host, self.port)
        except ValueError:
            return None

    def fits(self, pid: int, to: Address) -> bool:
        """Whether this may be the connection of *pid* to *to*."""
        return (self.pid, self.port) == (pid, to.port) and self.to in (None, to)


def told(line: str) -> Told | None:
    """A line of the file that ``TWICESHY_DOCTOR`` names."""
    try:
        read = json.loads(line)
        name = read["name"]
        frames = tuple(Frame(str(file), int(number)) for file, number in read["frames"])
        return Told(
            int(read["pid"]), str(read["host"]), int(read["port"]), name if isinstance(name, str) else "", frames
        )
    except (ValueError, TypeError, KeyError):
        return None


# ---- what is known

_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+)")
_NODE_PACKAGE = re.compile(r".*/node_modules/((?:@[^/]+/)?[^/]+)/")
_STANDARD = re.compile(
    r"/lib(?:64)?/python3\.\d+/(.+?)(?:/__init__)?\.py\Z|\Anode:(?:internal/)?(.+)\Z|\A<(frozen .*)>\Z"
)
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*\Z")
#: Of Python's one-letter options those that take the rest of their word, or the next one.
_WITH_VALUE = "cmWX"
#: Libraries whose file names in a process' memory tell of them, and what does.
LOADED = {"aiohttp": "/aiohttp/_", "grpc": "/grpc/_cython/", "uvloop": "/uvloop/", "libcurl": "/libcurl"}


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the tree. ``environment`` None: it could not be read."""

    pid: int
    program: str = ""  # path of what it runs
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    loaded: frozenset[str] = frozenset()

    @property
    def command(self) -> str:
        """Its words, for people."""
        return " ".join(self.words) or self.program or "?"


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of a connection.

    ``given``: what the environment of every process of the run must hold, by variable.
    """

    process: Process
    to: Address
    given: Mapping[str, str]
    frames: tuple[Frame, ...] = ()

    @property
    def program(self) -> str:
        return self.process.program.rpartition("/")[2] or self.process.command.split(" ")[0].rpartition("/")[2]

    @property
    def python(self) -> bool:
        return bool(_PYTHON.match(self.program))

    @property
    def node(self) -> bool:
        return self.program in ("node", "nodejs")

    @property
    def flags(self) -> frozenset[str]:
        """The one-letter options that a Python was started with."""
        return frozenset("".join(each[1:] for each in python_flags(self.process.words[1:])))

    def lacks(self, name: str) -> bool:
        """The process was certainly started without what the variable *name* must hold."""
        ours, known = self.given.get(name), self.process.environment
        return ours is not None and known is not None and ours not in known.get(name, "")

    @property
    def without_site(self) -> bool:
        return self.python and (bool(self.flags & set("IES")) or self.lacks("PYTHONPATH"))

    @property
    def libraries(self) -> tuple[str, ...]:
        """Packages, and modules of the standard library, that the frames are in; the innermost first."""
        return tuple(dict.fromkeys(name for frame in self.frames if (name := library(frame.file))))

    @property
    def caller(self) -> Frame | None:
        """The innermost frame that is the program's own."""
        return next((frame for frame in self.frames if not library(frame.file)), None)

    def through(self, *names: str) -> bool:
        return any(name in self.libraries for name in names)


def python_flags(words: tuple[str, ...]) -> list[str]:
    """The leading words of a Python's that are one-letter options without a value, alone or in one word."""
    found = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word in ("-", "--"):
            break
        if word.startswith("--"):  # --check-hash-based-pycs takes a value, --help and --version end it
            if word == "--check-hash-based-pycs":
                next(rest, None)
            continue
        plain = re.match(rf"-([^{_WITH_VALUE}]*)([{_WITH_VALUE}]?)(.*)", word)
        assert plain is not None
        if plain[1]:
            found.append("-" + plain[1])
        if plain[2] in ("c", "m"):
            break
        if plain[2] and not plain[3]:
            next(rest, None)
    return found


def library(file: str) -> str:
    """The package or the standard module that *file* is of; empty for the program's own."""
    package = _PACKAGE.search(file) or _NODE_PACKAGE.match(file)
    if package is not None:
        return package[1].removesuffix(".py")
    standard = _STANDARD.search(file)
    return next(each for each in standard.groups() if each).replace("/", ".") if standard is not None else ""


# ---- the table


@dataclass(frozen=True, slots=True)
class Cause:
    """Why, in a line, and the remedy. ``speaks``: the protocol, where it is known not to be HTTP."""

    name: str
    fits: Callable[[Evidence], bool]
    words: str
    remedy: str
    speaks: str = ""


def _driver(name: str, *packages: str) -> Cause:
    return Cause(
        f"driver of {name}", lambda e: e.through(*packages), f"a driver of {name}: not HTTP",
        "the journal covers HTTP only: what must not be done twice needs a transaction or a key of its own; "
        "--allow says that this address is well", speaks=name,
    )  # fmt: skip


_KEEP = "hand the environment on as it was given (subprocess env=, env -i, sudo, docker run need it said)"

CAUSES: tuple[Cause, ...] = (
    _driver("PostgreSQL", "asyncpg", "psycopg", "psycopg2", "pg", "postgres"),
    _driver("MySQL", "pymysql", "mysql", "aiomysql", "mysql2"),
    _driver("Redis", "redis", "ioredis", "@redis/client"),
    _driver("MongoDB", "pymongo", "motor", "mongodb"),
    Cause("mail", lambda e: e.through("smtplib", "aiosmtplib", "nodemailer") or e.to.port in MAIL,
          "mail is sent by SMTP, and again with each restart", "send it through a mail provider's HTTP API"),
    Cause("database", lambda e: e.to.port in SERVICES, "by its port a service that does not speak HTTP",
          "the journal covers HTTP only: what must not be done twice needs a transaction or a key of its own; "
          "--allow says that this address is well"),
    Cause("ssh", lambda e: e.to.port == 22, "ssh: not HTTP", "HTTPS where the other side has it (git, for one)"),
    Cause("environment replaced", lambda e: e.lacks("HTTPS_PROXY") and e.lacks("https_proxy"),
          "its environment has not the proxy variables that the run was given", _KEEP),
    Cause("websocket", lambda e: e.through("websockets", "websocket", "ws"),
          "a WebSocket, which cannot be journalled", "use the HTTP API of the same provider"),
    Cause("aiohttp without sitecustomize", lambda e: e.without_site and "aiohttp" in e.process.loaded,
          "aiohttp reads the proxy variables only with trust_env=True, which our sitecustomize turns on; this Python "
          "does not load it (-I, -E or -S, or another PYTHONPATH)",
          "drop the flag, keep PYTHONPATH, or say aiohttp.ClientSession(trust_env=True)"),
    Cause("python without sitecustomize", lambda e: e.without_site,
          "this Python does not load our sitecustomize (-I, -E or -S, or another PYTHONPATH), so which client it was "
          "cannot be told: urllib3.PoolManager, aiohttp, http.client, a raw socket",
          "drop the flag and keep PYTHONPATH; run doctor again to learn more"),
    Cause("aiohttp", lambda e: e.through("aiohttp"),
          "aiohttp with trust_env=False, or with a connector that leads elsewhere",
          f"drop trust_env=False, or proxy=os.environ['HTTPS_PROXY'] with each request, {GATEWAY}"),
    Cause("requests", lambda e: e.through("requests"),
          "a requests session with trust_env = False or proxies of its own, or the program changed the variables",
          "drop them"),
    Cause("httpx", lambda e: e.through("httpx", "httpx2"),
          "an httpx client with trust_env=False, a proxy, mounts or a transport of its own, or the program changed the "
          "variables",
          f"drop them, {GATEWAY}"),
    Cause("botocore", lambda e: e.through("botocore"), "boto3 with proxies in its Config, or its metadata client",
          "drop them; set AWS_EC2_METADATA_DISABLED=true where no metadata is needed"),
    Cause("urllib3.PoolManager", lambda e: e.through("urllib3"),
          "urllib3.PoolManager reads no proxy variable",
          f"urllib3.ProxyManager(os.environ['HTTPS_PROXY']) in its place, or requests, {GATEWAY}"),
    Cause("urllib.request", lambda e: e.through("urllib.request"),
          "an opener of urllib without the environment's proxies (ProxyHandler({})), or the program changed the "
          "variables", "drop the handler"),
    Cause("http.client", lambda e: e.through("http.client"), "http.client reads no proxy variable",
          f"urllib.request in its place, {GATEWAY}"),
    Cause("gRPC", lambda e: "grpc" in e.process.loaded and not e.frames,
          "gRPC: HTTP/2, which cannot be journalled", "another transport of that SDK (REST)"),
    Cause("a raw socket", lambda e: e.python and bool(e.frames),
          "a raw socket (socket, asyncio streams)", f"an HTTP client that reads HTTPS_PROXY, {GATEWAY}"),
    Cause("a C library in Python", lambda e: e.python,
          "a library that connects below Python (uvloop, libcurl, a driver in C)",
          f"give that client the proxy by its own setting, {GATEWAY}"),
    Cause("Node without the preload", lambda e: e.node and e.lacks("NODE_OPTIONS"),
          "Node without our preload (another NODE_OPTIONS): before 22.21 and 24.5 its fetch, http and https read no "
          "proxy variable", "put your options into NODE_OPTIONS before `twiceshy run`, and keep what stands there"),
    Cause("Node's http2", lambda e: e.node and e.through("http2.core", "http2"),
          "Node's http2, which reads no proxy variable", f"fetch or https in its place, {GATEWAY}"),
    Cause("Node's undici", lambda e: e.node and e.through("undici", "deps.undici.undici"),
          "a dispatcher (undici) of the program's own", "EnvHttpProxyAgent in its place, or none"),
    Cause("Node's agents", lambda e: e.node and e.through("_http_client", "https", "http"),
          "an http(s) agent with a createConnection of its own", f"drop it, {GATEWAY}"),
    Cause("a raw socket in Node", lambda e: e.node and bool(e.frames), "net or tls: a raw socket",
          f"fetch or https in its place, {GATEWAY}"),
    Cause("Node", lambda e: e.node, "a client that leads past the preload (http2, net, a worker with execArgv)",
          f"fetch or https in its place, {GATEWAY}"),
    Cause("curl", lambda e: e.program == "curl", "curl with --noproxy, a proxy of its own, or a .curlrc that has one",
          "drop it"),
    Cause("unknown", lambda _e: True, "a program that reads no proxy variables, or is told not to",
          f"give it the proxy by a setting of its own, {GATEWAY}"),
)  # fmt: skip


def cause(evidence: Evidence) -> Cause:
    """The first cause that fits."""
    return next(each for each in CAUSES if each.fits(evidence))
