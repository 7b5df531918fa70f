"""Loaded by an agent's Python before its program: what environment variables alone cannot do. Standard library only.

* Every client's SSL context also trusts the sidecar's CA, in libraries too that bring a bundle of their own.
* aiohttp sessions read the proxy variables unless told otherwise: one that does not goes past the journal in silence.
* A ``sitecustomize`` that was there before is run as well.

Both modules are changed when, and if, the program imports them: neither is free, and some programs (gevent) care
who imports ssl first. Without ``TWICESHY_CA_FILE`` in the environment only the last is done. Not reached: ``python
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


def _run_the_other():
    """A virtual environment or the distribution may have a sitecustomize of its own: it is hidden by this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in sys.path:
        if os.path.abspath(folder or ".") == here:
            continue
        path = os.path.join(folder, "sitecustomize.py")
        if os.path.isfile(path):
            with open(path, "rb") as file:
                source = file.read()
            exec(compile(source, path, "exec"), {"__name__": "sitecustomize", "__file__": path})
            return


if os.path.isfile(os.environ.get("TWICESHY_CA_FILE") or ""):
    sys.meta_path.insert(0, _Changes())
_run_the_other()
