"""The house itself: what the checks claim to watch is really watched."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

from tests.canary import watch

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
CONTRACTS: dict[str, dict[str, Any]] = {each["id"]: each for each in PROJECT["tool"]["importlinter"]["contracts"]}
LOCKS = ("requirements.lock", "requirements-dev.lock")


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def modules(package: str) -> dict[str, Path]:
    """Dotted name of each module of *package*, and its file."""
    files = (ROOT / package).rglob("*.py")
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


# ---- layers


#: Named by the design as decisions, which are pure; the ones that have not come yet, too.
DECISIONS = frozenset(
    """runtime.step runtime.entries runtime.lease runtime.retry runtime.tape
    proxy.message proxy.canonical proxy.difference proxy.profiles proxy.keys proxy.streams proxy.exchange
    proxy.tape proxy.refusals""".split()
)


def test_what_is_pure_is_held_to_it() -> None:
    """Pure is what the design names, and what says "Pure." or "Pure:" in its docstring."""
    there = {name: file for package in PACKAGES for name, file in modules(package).items()}
    docstrings = {name: ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "" for name, file in there.items()}
    pure = {name for name, words in docstrings.items() if name in DECISIONS or re.search(r"\bPure(?=[.:]| \()", words)}
    held = set(CONTRACTS["pure"]["source_modules"])
    assert held == pure, "pyproject.toml, contract `pure`: add what is missing, take out what has gone"


def test_the_library_needs_the_standard_library_only() -> None:
    for name, file in modules("twiceshy").items():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            else:
                continue
            strangers = {each.partition(".")[0] for each in imported} - sys.stdlib_module_names - {"twiceshy"}
            assert not strangers, f"{name} imports {strangers}"


PLANTED_IMPORTS = {
    "pure": ("runtime/step.py", "import asyncio"),
    "downwards": ("runtime/entries.py", "import proxy.message"),
    "library-alone": ("twiceshy/__init__.py", "import runtime.step"),
    "sandbox-alone": ("sandbox/__init__.py", "import runtime.step"),
    "nobody-in-sandbox": ("runtime/entries.py", "import sandbox"),
}


def test_each_contract_bites(tmp_path: Path) -> None:
    """With one forbidden import planted for each contract, each contract is broken."""
    assert PLANTED_IMPORTS.keys() == CONTRACTS.keys()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, line in PLANTED_IMPORTS.values():
        with (tmp_path / file).open("a", encoding="utf-8") as source:
            source.write(f"\n{line}\n")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    run = subprocess.run(
        [*command, "--no-logo", "--no-cache"],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    kept = re.findall(r"^(.+) KEPT", run.stdout, re.MULTILINE)
    broken = re.findall(r"^(.+) BROKEN", run.stdout, re.MULTILINE)
    assert (kept, len(broken)) == ([], len(CONTRACTS)), run.stdout + run.stderr
    assert run.returncode == 1


# ---- types


def test_the_canary_misses_a_checker_that_sees_nothing() -> None:
    source = text(str(watch.PLANTED))
    assert len(watch.faults(source, "Success: no issues found in 1 source file")) == len(watch.planted(source)) > 5


def test_the_canary_notices_what_was_not_planted() -> None:
    source = "a = 1  # planted: type-arg\nb = 2\n"
    output = "x.py:1: error: Missing  [type-arg]\nx.py:2: error: Other  [misc]\n"
    assert watch.faults(source, output) == [f"{watch.PLANTED}:2: nobody planted [misc] here"]


# ---- locks


def pins(lock: str) -> dict[str, list[Requirement]]:
    """The pinned releases of each package in *lock*: more than one where Python's versions need different ones."""
    found: dict[str, list[Requirement]] = {}
    for line in text(lock).splitlines():
        if re.match(r"[a-zA-Z0-9]", line):
            requirement = Requirement(line.removesuffix("\\"))
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def declared(lock: str) -> list[str]:
    groups = PROJECT["dependency-groups"]
    more = [] if lock == "requirements.lock" else [*groups["dev"], *groups["build"]]
    return [*PROJECT["project"]["dependencies"], *more]


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_holds_what_the_project_declares(lock: str) -> None:
    locked = pins(lock)
    for line in declared(lock):
        wanted = Requirement(line)
        assert any(spec.operator in ("<", "<=") for spec in wanted.specifier), f"{line} has no upper bound"
        for pin in locked[canonicalize_name(wanted.name)]:
            (exact,) = pin.specifier
            assert exact.operator == "=="
            assert wanted.specifier.contains(exact.version), f"{pin} is not {line}; `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_each_pin_has_its_hashes_and_no_place(lock: str) -> None:
    content = text(lock)
    for entry in re.split(r"^(?=[a-zA-Z0-9])", content, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in entry, entry
    assert not re.search(r"://|file:|^-|@ |/", re.sub(r"#.*", "", content), re.MULTILINE)


def test_development_has_what_is_shipped() -> None:
    shipped, developed = pins(LOCKS[0]), pins(LOCKS[1])
    for name, pinned in shipped.items():
        assert list(map(str, developed[name])) == list(map(str, pinned))


# ---- what is shipped


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    present = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert packed == present
    assert {f"{package}/py.typed" for package in PACKAGES} < packed


def test_the_image_gets_what_it_builds_from_and_nobody_is_root_in_it() -> None:
    let_in = re.findall(r"^!(.+)$", text(".dockerignore"), re.MULTILINE)
    assert text(".dockerignore").startswith("*\n")
    assert {*PACKAGES, "pyproject.toml", "requirements.lock", "LICENSE"} <= set(let_in)
    users = re.findall(r"^USER (\d+)", text("Dockerfile"), re.MULTILINE)
    assert users
    assert "0" not in users


def test_the_command_line_knows_what_the_image_says_to_it() -> None:
    """In a container, loopback is of no use: ``twiceshy up`` has to be told where to listen."""
    pytest.importorskip("proxy.cli")
    entry = re.search(r"^ENTRYPOINT (.*)$", text("Dockerfile"), re.MULTILINE)
    command = re.search(r"^CMD (.*)$", text("Dockerfile"), re.MULTILINE)
    assert entry
    assert command
    assert json.loads(entry[1]) == list(PROJECT["project"]["scripts"])
    verb, *options = json.loads(command[1])
    program = "import sys; from proxy.cli import main; sys.exit(main())"
    told = subprocess.run(
        [sys.executable, "-c", program, verb, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for option in options:
        assert not option.startswith("--") or option in told.stdout


def test_the_compose_file_opens_nothing_to_the_network() -> None:
    services = YAML(typ="safe").load(text("docker-compose.yml"))["services"]
    assert set(services) == {"postgres", "sidecar", "worker", "sandbox"}
    for service in services.values():
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists()


# ---- one word for one thing


def pythons() -> list[str]:
    found = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert found
    return found


def test_every_file_means_the_same_pythons() -> None:
    lowest, highest = pythons()[0], pythons()[-1]
    above = f"3.{int(highest.partition('.')[2]) + 1}"
    assert PROJECT["project"]["requires-python"] == f">={lowest},<{above}"
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + lowest.replace(".", "")
    assert f"({lowest.replace('.', ', ')}) <= sys.version_info[:2] <= ({highest.replace('.', ', ')})" in text(
        "Makefile"
    )
    workflow = YAML(typ="safe").load(text(".github/workflows/check.yml"))
    assert workflow["jobs"]["check"]["strategy"]["matrix"]["python"] == pythons()
    (image,) = set(re.findall(r"^FROM python:([\d.]+)-slim", text("Dockerfile"), re.MULTILINE))
    assert image in pythons()


def test_every_target_is_told_by_help() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", text("Makefile"), re.MULTILINE)
    assert phony
    told = re.findall(r"^([a-z-]+):.*## ", text("Makefile"), re.MULTILINE)
    assert told == phony[1].split()


def test_continuous_integration_runs_the_command_of_the_readme() -> None:
    assert "step make check\nstep make test\n" in text(".ci/run")
    assert "make test" in text("README.md")


# ---- tiers


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_tiers.py").write_text(
        "import pytest\n\n"
        "def test_plain(): pass\n\n"
        "@pytest.mark.check_all\ndef test_slow(): pass\n\n"
        "@pytest.mark.proof\ndef test_proof(): pass\n"
    )

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    left = run("-n", "1")
    assert "1 passed" in left
    assert "left out: 1 × check_all: takes minutes" in left
    assert "left out: 1 × proof: " in left
    assert "3 passed" in (everything := run("--tier", "all"))
    assert "left out" not in everything
