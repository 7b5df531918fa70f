"""Words of the command line that nothing can be made of: one line and exit code 2, before anything is started."""

import os
from pathlib import Path

import pytest

from proxy import cli
from proxy.upstream import Upstream
from runtime.database import split
from runtime.errors import UsageError
from runtime.settings import Settings, load


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", os.fsdecode(b"\xff")], "no name"),
        (["show", "a\nb"], "no name"),
        (["resolve", "r", os.fsdecode(b"\xff"), "send_again"], "no name"),
        (["resolve", "r", "", "send_again"], "no step is named"),
        (["run", "--agent", os.fsdecode(b"a\xff"), "--", "true"], "no name"),
        (["runs", "--limit", "-1"], "a number from 1"),
        (["runs", "--limit", "0"], "a number from 1"),
        (["runs", "--limit", "9" * 20], "a number from 1"),
        (["up", "--port", "65536"], "from 0 (a free one) to 65535"),
        (["up", "--port", "-1"], "from 0 (a free one) to 65535"),
        (["up", "--host", ""], "every address"),
        (["start", "nobody"], "agent 'nobody' is not declared: none is"),
        (["start", "a\nb"], "no name"),
        (["start", "a", "--key", os.fsdecode(b"\xff")], "no name"),
        (["worker"], "no agent is declared"),
        (["worker", "--agent", "nobody"], "agent 'nobody' is not declared"),
        (["doctor"], "no command: twiceshy doctor"),
        (["doctor", "x", "--", "true"], "stands before the --: twiceshy doctor"),
        (["doctor", "--", "/no/such"], "no such file or command"),
        (["doctor", "--seconds", "0", "--", "true"], "a number above 0"),
        (["doctor", "--seconds", "inf", "--", "true"], "a number above 0"),
        (["doctor", "--allow", "a:b", "--", "true"], "HOST, HOST:PORT, :PORT or NETWORK"),
        (["doctor", "--allow", "no.such.twiceshy.internal:1", "--", "true"], "HOST, HOST:PORT, :PORT or NETWORK"),
    ],
)
def test_nonsense_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setenv("TWICESHY_HOME", str(tmp_path / "none"))
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lease", "abc", "a number, not 'abc'"),
        ("lease", "-1", "a number above 0, not '-1'"),
        ("resend", "1.5", "a whole number, not '1.5'"),
        ("resend", "-1", "a number from 0 on, not '-1'"),
        ("resend", "9" * 5000, "a whole number, not '999"),
        ("mode", "fast", "'durable', 'journal' or 'naive', not 'fast'"),
        ("deny_private", "maybe", "true or false, not 'maybe'"),
        ("laese", "3", "there is none of that name; is 'lease' meant?"),
        ("agents", "3", "a table, not '3'"),
    ],
)
def test_a_setting_that_is_wrong_is_told_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"TWICESHY_{name.upper()}", value)
    with pytest.raises(UsageError) as refused:
        load()
    assert f"TWICESHY_{name.upper()}: setting {name!r}: {words}" in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("value", ["inf", "nan", "1e400"])
def test_no_setting_is_endless(value: str) -> None:
    with pytest.raises(UsageError, match="'lease'"):
        load({"lease": value})


def test_a_broken_address_of_a_database_is_said() -> None:
    with pytest.raises(UsageError, match="Invalid IPv6 URL"):
        split("postgresql://[::1")


async def test_a_file_of_certificates_that_is_not_there_is_said() -> None:
    with pytest.raises(UsageError, match="extra_ca: /no/such: No such file"):
        Upstream(Settings(extra_ca="/no/such"), via="us", own_ports=frozenset())
