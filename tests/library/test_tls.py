"""Model calls over https: through the tunnel, with the sidecar's certificates, blocking and awaited."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import twiceshy
from proxy.kit import lay_out
from runtime.launch.environment import environment
from tests.stack import Stack, stack
from twiceshy import aio

pytestmark = pytest.mark.check_all


@pytest.fixture
def secured(dsn: str, tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    with stack(dsn, tmp_path, tls=True) as made:
        attempt = made.claim(run)
        assert attempt.token is not None
        kit = lay_out(made.folder)
        given = environment({}, run=run, token=attempt.token, proxy=f"127.0.0.1:{attempt.port}", kit=kit)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("OPENAI_BASE_URL", made.url("/v1"))
        yield made


async def test_a_model_over_https(secured: Stack, run: str) -> None:
    first = await aio.llm("hello", model="m")
    assert await asyncio.to_thread(twiceshy.llm, "hello again", model="m")
    many = await asyncio.gather(*(aio.llm(f"number {n}", model="m") for n in range(8)))
    assert len(set(many)) == 8
    assert secured.sandbox.count("llm") == 10
    assert {each.method for each in secured.sandbox.requests("llm")} == {"POST"}
    assert "Twiceshy" not in str([each.headers for each in secured.sandbox.requests("llm")])
    claimed = await asyncio.to_thread(secured.claim, run)
    assert claimed.token is not None
    with pytest.raises(twiceshy.Fenced, match=run):
        await aio.llm("a zombie's", model="m")
    assert first
    assert secured.sandbox.count("llm") == 10


async def test_a_call_that_is_given_up_lets_go(secured: Stack) -> None:
    secured.sandbox.fault(match={"path": "/v1/chat/completions"}, hold="model")
    call = asyncio.create_task(aio.llm("hello", model="m"))
    await asyncio.to_thread(secured.sandbox.wait_held, "model")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    secured.sandbox.release("model")
    assert await aio.llm("hello", model="m")  # joins the call that goes on without it
    assert secured.sandbox.count("llm") == 1


async def test_a_client_that_does_not_trust_the_ca_says_so(secured: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(OSError, match="certificate verify failed"):
        await aio.llm("hello", model="m")
    with pytest.raises(OSError, match="certificate verify failed"):
        await asyncio.to_thread(twiceshy.llm, "hello", model="m")
