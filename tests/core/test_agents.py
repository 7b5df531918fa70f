"""Agents as twiceshy.toml declares them: what is read, what is refused, and in which words."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.agents import AgentTable, check_input, declared
from runtime.errors import UsageError
from runtime.keeping import settings_as_values
from runtime.launch.python_agent import interpreter
from runtime.settings import Settings, load

SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["ticket"],
    "properties": {"ticket": {"type": "integer", "minimum": 1}, "note": {"type": "string"}},
}  # fmt: skip
REFUND = AgentTable(command=["python", "refund.py"], input_schema=SCHEMA)


def written(folder: Path, text: str) -> Settings:
    (folder / "twiceshy.toml").write_text(text, "utf-8")
    return load(start=folder)


def test_files_are_seen_from_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), "utf-8")
    settings = written(
        tmp_path,
        """
        [agents.refund]
        command = ["python", "refund.py"]
        folder = "agents"
        input_schema = "schema.json"
        max_attempts = 2
        attempt_timeout = 60
        [agents.mail]
        command = ["./mail"]
        input_schema = { type = "string" }
        """,
    )
    refund, mail = settings.agents["refund"], settings.agents["mail"]
    assert refund.command == ["python", "refund.py"]
    assert Path(refund.folder) == tmp_path / "agents"
    assert refund.input_schema == SCHEMA
    assert (refund.max_attempts, refund.attempt_timeout) == (2, 60)
    assert Path(mail.folder) == tmp_path
    assert (mail.input_schema, mail.max_attempts) == ({"type": "string"}, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[agents.refund]\ncommnd = ["x"]', "agents.refund.commnd.*is 'command' meant"),
        ('[agents.refund]\ncommand = ["x"]\nretries = 3', "agents.refund.retries.*none of that name"),
        ('[agents.refund]\ncommand = "python x.py"', "agents.refund.command.*list"),
        ("[agents.refund]\ncommand = []", "agents.refund.*an agent has a command"),
        ("[agents.refund]\ncommand = ['x']\npython = 'agent:work'", "agents.refund.*a command, or python ="),
        ("[agents.refund]\npython = 'agent'", "agents.refund.python.*module:function, not 'agent'"),
        ("[agents.refund]\npython = 'agent:work'\npreload = ['agent.tools']", "agents.refund.*is the agent's own"),
        ("[agents.refund]\npython = 'agent:work'\npreload = ['a b']", "agents.refund.preload"),
        ("[agents.refund]\ncommand = ['x']\npreload = ['os']", "agents.refund.*interpreter and preload go with python"),
        ('[agents.refund]\ncommand = ["x"]\nmax_attempts = 0', "agents.refund.max_attempts"),
        ('[agents.refund]\ncommand = ["x"]\nmax_attempts = "5"', "agents.refund.max_attempts"),
        ('[agents.refund]\ncommand = ["x"]\ninput_schema = { type = "nothing" }', "agents.refund.input_schema.*no JSO"),
        ('[agents.refund]\ncommand = ["x"]\ninput_schema = "gone.json"', "agents.refund.input_schema.*gone.json"),
        ('[agents."a b"]\ncommand = ["x"]', "agents.a b"),
        ("agents = 3", "agents"),
        ("[agents]\nrefund = 3", "agents.refund"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_file_agent_and_field(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s){tmp_path}/twiceshy.toml.*{words}") as error:
        written(tmp_path, text)
    assert len(str(error.value).splitlines()) == 1


def test_an_interpreter_is_a_path_or_a_command_and_by_default_that_of_its_folder(tmp_path: Path) -> None:
    settings = written(
        tmp_path,
        """
        [agents.path]
        python = "agents.refund:handle.it"
        interpreter = "env/bin/python"
        [agents.command]
        python = "agents.refund:handle"
        interpreter = "python3"
        [agents.default]
        python = "agents.refund:handle"
        """,
    )
    path, command, default = (settings.agents[name] for name in ("path", "command", "default"))
    assert path.interpreter == str(tmp_path / "env" / "bin" / "python")
    with pytest.raises(UsageError, match=r"interpreter '.*env/bin/python': no such file"):
        interpreter(path)
    assert interpreter(command) == interpreter(default) == shutil.which("python3")
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    # By its own path a Python knows its environment.
    assert (interpreter(command), interpreter(default)) == (shutil.which("python3"), str(own))


def test_agents_change_nothing_of_which_sidecar_is_shared() -> None:
    with_agents = Settings(agents={"refund": REFUND}, slots=9, attempt_timeout=3.0)
    assert settings_as_values(with_agents) == settings_as_values(Settings())


def test_an_agent_that_is_not_declared_is_named_with_those_that_are() -> None:
    assert declared({"refund": REFUND}, "refund") is REFUND
    with pytest.raises(UsageError, match="'x' is not declared: there are a, b "):
        declared({"b": REFUND, "a": REFUND}, "x")
    with pytest.raises(UsageError, match="none is"):
        declared({}, "x")


@pytest.mark.parametrize("given", [b'{"ticket": 1}', b'{"ticket": 7, "note": "\\u0000", "more": null}'])
def test_an_input_that_fits(given: bytes) -> None:
    check_input("refund", REFUND, given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, r"\$: None is not of type 'object'"),
        (b"{}", r"\$: 'ticket' is a required property"),
        (b'{"ticket": 0}', r"\$.ticket: 0 is less than"),
        (b'{"ticket": "' + b"x" * 5000 + b'"}', r"\$.ticket: 'xxx"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b'{"ticket": NaN}', "NaN is no JSON"),
        (b"[" * 100_000, "nested more than 200 deep"),
        (b"9" * 5000, "more than 4300 digits"),
    ],
)
def test_an_input_that_does_not_is_refused_in_one_line(given: bytes | None, words: str) -> None:
    with pytest.raises(UsageError, match=f"agent refund.*{words}") as error:
        check_input("refund", REFUND, given)
    assert len(str(error.value)) < 500
    assert len(str(error.value).splitlines()) == 1


def test_without_a_schema_any_json_will_do() -> None:
    plain = AgentTable(command=["x"])
    for given in (None, b"null", b"[1e400]"):
        check_input("a", plain, given)
    with pytest.raises(UsageError):
        check_input("a", plain, b"nothing")


def test_a_schema_fetches_nothing() -> None:
    table = AgentTable(command=["x"], input_schema={"$ref": "http://127.0.0.1:1/schema.json"})
    with pytest.raises(UsageError, match=r"refers to .http://127\.0\.0\.1:1/schema\.json"):
        check_input("a", table, b"1")
