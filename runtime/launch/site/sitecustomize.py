"""Loaded by an agent's Python before its program: what environment variables alone cannot do. Standard library only.

* Every SSL context also trusts the sidecar's CA, in libraries too that bring a bundle of their own.
* aiohttp sessions read the proxy variables unless told otherwise: one that does not goes past the journal in silence.
* A ``sitecustomize`` that was there before is run as well.

Without ``TWICESHY_CA_FILE`` in the environment it does nothing but the last.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=method-assign

import os
import sys


def _trust(path):
    import ssl

    context = ssl.SSLContext
    locations, defaults = context.load_verify_locations, context.set_default_verify_paths

    def load_verify_locations(self, cafile=None, capath=None, cadata=None):
        locations(self, cafile, capath, cadata)
        locations(self, path)

    def set_default_verify_paths(self):
        defaults(self)
        locations(self, path)

    context.load_verify_locations = load_verify_locations
    context.set_default_verify_paths = set_default_verify_paths

    # load_default_certs is written in Python and calls set_default_verify_paths only where no variable is set.
    loads = context.load_default_certs

    def load_default_certs(self, purpose=ssl.Purpose.SERVER_AUTH):
        loads(self, purpose)
        locations(self, path)

    context.load_default_certs = load_default_certs


class _Aiohttp:
    """Finds aiohttp's client once, to turn ``trust_env`` on by default."""

    def find_spec(self, name, path=None, target=None):
        if name != "aiohttp.client":
            return None
        sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            session = getattr(module, "ClientSession", None)
            if session is None:
                return
            init = session.__init__

            def __init__(self, *args, **kwargs):
                kwargs.setdefault("trust_env", True)
                init(self, *args, **kwargs)

            session.__init__ = __init__

        spec.loader.exec_module = exec_module
        return spec


def _run_the_other() -> None:
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


_ca = os.environ.get("TWICESHY_CA_FILE")
if _ca and os.path.isfile(_ca):
    _trust(_ca)
    sys.meta_path.insert(0, _Aiohttp())
_run_the_other()
