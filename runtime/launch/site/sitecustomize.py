"""Loaded by an agent's Python before its program: what environment variables alone cannot do. Standard library only.

* Every client's SSL context also trusts the sidecar's CA, in libraries too that bring a bundle of their own.
* aiohttp sessions read the proxy variables unless told otherwise: one that does not goes past the journal in silence.
* A ``sitecustomize`` that was there before is run as well.
* Under ``twiceshy doctor`` (``TWICESHY_DOCTOR``) it is written down which code connects to where.

Both modules are changed when, and if, the program imports them: neither is free, and some programs (gevent) care
who imports ssl first. Without ``TWICESHY_CA_FILE`` in the environment the first two are not done. Not reached: ``python
-I`` and ``-E`` (the variables that lead here are ignored), ``-S``, and what verifies by other means than ``ssl``.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=method-assign

import os
import sys


def _trust(ssl):
    """Add the sidecar's CA to whatever a client's context is told to trust."""
    path = os.environ["TWICESHY_CA_FILE"]
    context = ssl.SSLContext
    locations, defaults = context.load_verify_locations, context.set_default_verify_paths

    def add(self):
        # A server that asks its clients for certificates must not take those that the sidecar signs.
        if self.protocol != getattr(ssl, "PROTOCOL_TLS_SERVER", None):
            locations(self, path)

    def load_verify_locations(self, cafile=None, capath=None, cadata=None):
        locations(self, cafile, capath, cadata)
        add(self)

    def set_default_verify_paths(self):
        defaults(self)
        add(self)

    context.load_verify_locations = load_verify_locations
    context.set_default_verify_paths = set_default_verify_paths


def _read_proxies(client):
    """Turn ``trust_env`` on where a program does not say."""
    session = getattr(client, "ClientSession", None)
    if session is None:
        return
    init = session.__init__

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("trust_env", True)
        init(self, *args, **kwargs)

    __init__.__wrapped__ = init  # type: ignore[attr-defined]
    session.__init__ = __init__


class _Changes:
    """Finds these modules once each, to change them when they have been loaded."""

    def __init__(self):
        self.changes = {"ssl": _trust, "aiohttp.client": _read_proxies}
        for name in [name for name in self.changes if name in sys.modules]:
            self.changes.pop(name)(sys.modules[name])

    def find_spec(self, name, path=None, target=None):
        change = self.changes.pop(name, None)
        if change is None:
            return None
        import importlib.util

        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if module.__name__ == name:  # the loader of a zip file loads others, too
                change(module)

        spec.loader.exec_module = exec_module
        return spec


def _write_down(path):
    """Append a line of JSON to the file *path* for each connection: what is asked for, by which frames."""
    names = {}  # port -> the name that was last looked up for it

    def told(event, args):
        if event == "socket.getaddrinfo":
            names[args[1]] = args[0]
        elif event == "socket.connect" and isinstance(args[1], tuple):
            if args[0].type != sys.modules["_socket"].SOCK_STREAM:
                return  # nothing is sent by this
            import json

            frames, frame = [], sys._getframe(2)  # type: ignore[var-annotated]
            while frame is not None and len(frames) < 60:
                frames.append([frame.f_code.co_filename, frame.f_lineno])
                frame = frame.f_back  # type: ignore[assignment]
            host, port = args[1][:2]
            name = names.get(port, names.get(str(port)))
            line = {"pid": os.getpid(), "host": host, "port": port, "name": name, "frames": frames}
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(fd, json.dumps(line).encode() + b"\n")
            finally:
                os.close(fd)

    def hook(event, args):
        if event.startswith("socket."):
            try:
                told(event, args)
            except Exception:  # noqa: S110 - what a hook raises would be raised at the program
                pass

    sys.addaudithook(hook)


def _run_the_other():
    """A virtual environment or the distribution may have a sitecustomize of its own: it is hidden by this one."""
    here, hidden = os.path.dirname(os.path.abspath(__file__)), False
    for folder in sys.path:
        if os.path.abspath(folder or ".") == here:
            hidden = True  # what stands before this one ran already: it may be another copy of it, which led here
            continue
        if not hidden:
            continue
        path = os.path.join(folder, "sitecustomize.py")
        if os.path.isfile(path):
            with open(path, "rb") as file:
                source = file.read()
            exec(compile(source, path, "exec"), {"__name__": "sitecustomize", "__file__": path})
            return


if os.path.isfile(os.environ.get("TWICESHY_CA_FILE") or ""):
    sys.meta_path.insert(0, _Changes())
if os.environ.get("TWICESHY_DOCTOR"):
    _write_down(os.environ["TWICESHY_DOCTOR"])
_run_the_other()
