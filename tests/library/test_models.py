"""Model calls: what is asked, what fits, and what is asked once more. No I/O."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from tests.library.scripted import Script, no, ok
from twiceshy import errors, models, schemas
from twiceshy.wire import Cut, Reply


class Verdict(BaseModel):
    decision: str
    cents: int


SCHEMA = {
    "type": "object",
    "properties": {"decision": {"enum": ["refund", "refuse"]}, "cents": {"type": "integer", "minimum": 0}},
    "required": ["decision", "cents"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://model/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("MODEL", "m")


def said(text: str | None) -> Reply:
    return ok({"choices": [{"message": {"role": "assistant", "content": text}}]})


def test_a_text() -> None:
    script = Script(said("hello"))
    assert script.play(models.llm("hi", system="be kind", temperature=1)) == "hello"
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    url = "http://model/v1/chat/completions"
    assert script.asked == [("POST", url, {"model": "m", "temperature": 1, "messages": messages})]
    assert script.headers == [{"Authorization": "Bearer secret"}]


@pytest.mark.parametrize("shape", [Verdict, TypeAdapter(Verdict), SCHEMA])
@pytest.mark.parametrize("fence", ["{}", "```json\n{}\n```"])
def test_a_value(shape: Any, fence: str) -> None:
    script = Script(said(fence.replace("{}", '{"decision": "refund", "cents": 5}')))
    value = script.play(models.llm([{"role": "user", "content": "?"}], schema=shape))
    assert (value if isinstance(value, dict) else value.model_dump()) == {"decision": "refund", "cents": 5}
    shape_sent = script.asked[0][2]["response_format"]["json_schema"]
    assert (shape_sent["name"], shape_sent["schema"]["required"]) == ("answer", ["decision", "cents"])


@pytest.mark.parametrize("shape", [Verdict, SCHEMA])
def test_an_answer_that_does_not_fit_is_repaired_once(shape: Any) -> None:
    script = Script(said('{"decision": "refund"}'), said('{"decision": "refund", "cents": 5}'))
    assert script.play(models.llm("?", schema=shape))
    question, answer, complaint = script.asked[1][2]["messages"]
    assert (question["content"], answer["content"]) == ("?", '{"decision": "refund"}')
    assert "cents" in complaint["content"]
    with pytest.raises(errors.InvalidAnswer, match=r"it is no JSON|Invalid JSON") as invalid:
        Script(said("no"), said("never")).play(models.llm("?", schema=shape))
    assert invalid.value.text == "never"


def test_any_validator_will_do() -> None:
    def check(text: str) -> int:
        return int(text)

    assert Script(said("many"), said("7")).play(models.llm("how many?", check=check)) == 7
    with pytest.raises(errors.InvalidAnswer, match="invalid literal"):
        Script(said("many")).play(models.llm("how many?", check=check, repairs=0))


def test_a_busy_model_is_asked_again_as_the_same_step() -> None:
    busy = Reply(429, {"retry-after": "7"}, b"{}")
    script = Script(busy, Reply(500, {}, b"{}"), Cut("cut"), said("at last"))
    assert script.play(models.llm("?")) == "at last"
    assert script.again == [0, 1, 2, 3]
    assert script.paused == [7.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (Reply(401, {}, b'{"error": {"message": "bad key"}}'), errors.Refused),
        (no("parked"), errors.Parked),
        (no("no-run", status=428), errors.Refused),
        (no("internal", status=500), errors.Refused),
    ],
)
def test_what_is_no_use_asking_again_is_not(answer: Reply, raised: type[BaseException]) -> None:
    with pytest.raises(raised):
        Script(answer).play(models.llm("?"))


def test_a_model_that_never_answers() -> None:
    with pytest.raises(errors.Unreachable, match="http://model/v1/chat/completions: refused"):
        Script(*[OSError("refused")] * models.TRIES).play(models.llm("?"))


@pytest.mark.parametrize("answer", [ok({}), ok([]), said(None), ok({"choices": []})])
def test_an_answer_without_a_text(answer: Reply) -> None:
    with pytest.raises(errors.InvalidAnswer):
        Script(answer).play(models.llm("?"))


def test_a_model_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL")
    with pytest.raises(ValueError, match="which model"):
        Script().play(models.llm("?"))


# ---- JSON Schema


NODE = {"$ref": "#/$defs/node"}
TREE = NODE | {"$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [NODE, {"type": "null"}]}}}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, 3, 3.5),
        ({"type": "integer"}, 3.0, True),
        ({"type": "number"}, 3.5, "3"),
        ({"type": ["string", "null"]}, None, 3),
        ({"type": "boolean"}, False, 0),
        ({"enum": ["a", 1]}, 1, "b"),
        ({"const": "a"}, "a", "b"),
        ({"minLength": 2, "maxLength": 3}, "ab", "a"),
        ({"maxLength": 3}, "abc", "abcd"),
        ({"pattern": "^a+$"}, "aa", "ab"),
        ({"minItems": 1}, [1], []),
        ({"items": {"type": "string"}}, ["a"], ["a", 1]),
        ({"minimum": 1, "maximum": 2}, 2, 3),
        ({"required": ["a"]}, {"a": None}, {}),
        ({"properties": {"a": {"type": "string"}}}, {"b": 1}, {"a": 1}),
        ({"properties": {"a": True}, "additionalProperties": False}, {"a": 1}, {"b": 1}),
        ({"additionalProperties": {"type": "string"}}, {"a": "b"}, {"a": 1}),
        ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, 2, 1),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "a", None),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, 1, 3),
        (TREE, {"next": {"next": None}}, {"next": {"next": 3}}),
        (True, 1, ...),
        (False, ..., 1),
    ],
)
def test_what_fits(schema: Any, good: Any, bad: Any) -> None:
    if good is not ...:
        assert schemas.problem_of(good, schema, schema) is None
    if bad is not ...:
        assert schemas.problem_of(bad, schema, schema) is not None


def test_a_problem_says_where() -> None:
    schema = {"properties": {"lines": {"items": {"properties": {"cents": {"type": "integer"}}}}}}
    with pytest.raises(ValueError, match=r'^\$\.lines\[1\]\.cents: "5" is no integer$'):
        schemas.read(schema, json.dumps({"lines": [{"cents": 5}, {"cents": "5"}]}))


def test_what_is_no_shape() -> None:
    with pytest.raises(TypeError, match="neither JSON Schema nor"):
        schemas.of(int)
