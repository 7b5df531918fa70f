"""Lays out what an agent's process is given: certificates, ``sitecustomize``, the Node preload, the library.

They are copied into the state folder, so that nothing else of this installation comes onto an agent's path, and an
upgrade does not change files under a running agent.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

import twiceshy
from proxy.authority import BUNDLE, CERTIFICATE, ensure
from runtime.launch import environment

SITE = Path(environment.__file__).with_name("site")
LIBRARY = Path(twiceshy.__file__).parent


def lay_out(folder: Path) -> environment.Kit:
    """Make or find the kit in the state *folder*. Blocking; under a second but for the first time ever."""
    ca = ensure(folder)
    site = folder / "site" / _digest()
    if not site.exists():
        site.parent.mkdir(exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=site.parent))
        for name in ("sitecustomize.py", "preload.cjs"):
            shutil.copyfile(SITE / name, fresh / name)
        shutil.copytree(LIBRARY, fresh / "twiceshy", ignore=shutil.ignore_patterns("__pycache__"))
        fresh.chmod(0o755)
        try:
            fresh.rename(site)
        except OSError:  # another one was first
            shutil.rmtree(fresh)
    return environment.Kit(site, site / "preload.cjs", ca / CERTIFICATE, ca / BUNDLE)


def _files(base: Path) -> list[Path]:
    return [*base.glob("*.*")] if base == SITE else [*base.rglob("*.py")]


def _digest() -> str:
    """Names the content of what is copied."""
    digest = hashlib.sha256()
    # By their places in it, for the library may be found in a kit: twiceshy can be started by an agent.
    files = {path.relative_to(base).as_posix(): path for base in (SITE, LIBRARY) for path in _files(base)}
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name].read_bytes())
    return digest.hexdigest()[:12]
