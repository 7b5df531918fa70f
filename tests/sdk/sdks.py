"""The SDKs that are tried: one line each, and a program of a few lines in ``programs/``.

A program is what anybody would write with that SDK. It knows nothing of twiceshy: it takes its upstream's address as
that SDK takes it, from the environment or as an argument. ``{url}`` is the sandbox's.
"""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from tests.stack import PROJECT

PROGRAMS = Path(__file__).with_name("programs")
NODE = Path(__file__).with_name("node")
AGENTS = PROJECT / os.environ.get("AGENTS", ".agents")
NOTHING = "nothing"


@dataclass(frozen=True)
class Sdk:
    """One line of the table."""

    name: str
    package: str  # the distribution whose version is told; python, node, curl: the program itself
    program: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    stack: str = ""  # what it speaks HTTP with, where that is another package
    needs: str = NOTHING  # what its user has to do
    #: Where a refusal's words are read: the exception has our message, or only the reason phrase.
    words: Literal["message", "reason"] = "message"
    upstream: Literal["sandbox", "moto"] = "sandbox"
    begins: int = 1  # how many requests it makes, one after the other, until one of them is answered
    alone: bool = False  # killed in a test of its own: some of what it asks is asked by each attempt
    quick: bool = False  # tried by `make test` too: one for each HTTP stack that no other test has

    @property
    def node(self) -> bool:
        return self.program.endswith(".cjs")

    def command(self) -> list[str]:
        """How it is started. Raises LookupError that names what is not installed here."""
        self.version()
        return [interpreter(self.program), str(PROGRAMS / self.program), *self.arguments]

    def given(self, url: str) -> dict[str, str]:
        """What its environment has, with a sandbox at *url*."""
        given = {name: value.replace("{url}", url) for name, value in self.environment.items()}
        return {"SANDBOX_URL": url, "PYTHONDONTWRITEBYTECODE": "1", "NODE_PATH": str(NODE / "node_modules")} | given

    def version(self) -> str:
        """Raises LookupError when it is not installed."""
        return version(self.package, node=self.node)


def interpreter(program: str) -> str:
    """Who runs *program*. Raises LookupError."""
    if program.endswith(".py"):
        return str(AGENTS / "bin" / "python")
    name = "node" if program.endswith(".cjs") else "sh"
    found = shutil.which(name)
    if found is None:
        raise LookupError(f"{name} is not installed here")
    return found


@functools.cache
def version(package: str, *, node: bool = False) -> str:
    """The version of *package* that the programs find. Raises LookupError."""
    if package == "curl":
        if shutil.which("curl") is None:
            raise LookupError("curl is not installed here")
        return subprocess.check_output(["curl", "--version"], text=True).split()[1]
    if package == "node":
        return subprocess.check_output([interpreter(".cjs"), "--version"], text=True).strip().removeprefix("v")
    if node:
        interpreter(".cjs")
        path = NODE / "node_modules" / package / "package.json"
        if not path.exists():
            raise LookupError(f"{package} is not installed in {NODE}: `make check-all` does it")
        return str(json.loads(path.read_text("utf-8"))["version"])
    python = interpreter(".py")
    if not Path(python).exists():
        raise LookupError(f"{python} is not there: `make test` makes it")
    ask = "import platform as p; print(p.python_version())"
    if package != "python":
        ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    found = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True)
    if found.returncode:
        raise LookupError(f"{package} is not installed in {AGENTS}: `make check-all` does it")
    return found.stdout.strip()


OPENAI = {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "sk-test"}
ANTHROPIC = {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "sk-test"}
GEMINI = {"GOOGLE_GEMINI_BASE_URL": "{url}", "GOOGLE_API_KEY": "test"}
#: Without it litellm asks GitHub for its prices when it is imported.
LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
AWS = {
    "AWS_ENDPOINT_URL": "{url}/aws", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}  # fmt: skip
#: Traces go to api.openai.com, which is not there in tests.
TRACELESS = {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
OPENAI_LITELLM = OPENAI | LITELLM
ANTHROPIC_LITELLM = {"ANTHROPIC_API_BASE": "{url}", "ANTHROPIC_API_KEY": "sk-test"} | LITELLM
GPT, CLAUDE = ("openai/gpt-5-mini",), ("anthropic/claude-sonnet-4-5",)

SDKS = [
    Sdk("openai", "openai", "openai_sync.py", OPENAI, stack="httpx2", quick=True),
    Sdk("openai Responses, async", "openai", "openai_async.py", OPENAI, stack="httpx2"),
    Sdk("anthropic", "anthropic", "anthropic_sync.py", ANTHROPIC, stack="httpx2"),
    Sdk("anthropic, async", "anthropic", "anthropic_async.py", ANTHROPIC, stack="httpx2"),
    Sdk("google-genai", "google-genai", "google_genai_sync.py", GEMINI, stack="httpx2"),
    Sdk("google-genai, async", "google-genai", "google_genai_async.py", GEMINI, stack="httpx2"),
    Sdk("litellm openai/", "litellm", "litellm_sync.py", OPENAI_LITELLM, GPT, "openai"),
    Sdk("litellm openai/, async", "litellm", "litellm_async.py", OPENAI_LITELLM, GPT, "openai on aiohttp"),
    Sdk("litellm anthropic/", "litellm", "litellm_sync.py", ANTHROPIC_LITELLM, CLAUDE, "httpx"),
    Sdk("litellm anthropic/, async", "litellm", "litellm_async.py", ANTHROPIC_LITELLM, CLAUDE, "aiohttp"),
    Sdk("langchain-openai", "langchain-openai", "langchain_openai_chat.py", OPENAI, stack="openai"),
    Sdk("openai-agents", "openai-agents", "openai_agents.py", OPENAI | TRACELESS, stack="openai"),
    Sdk("pydantic-ai", "pydantic-ai-slim", "pydantic_ai_agent.py", OPENAI, stack="openai"),
    Sdk("stripe", "stripe", "stripe_sync.py", stack="requests", quick=True),
    Sdk("stripe, async", "stripe", "stripe_async.py", stack="httpx"),
    Sdk("boto3 S3", "boto3", "boto3_s3.py", AWS, stack="urllib3", upstream="moto"),
    Sdk("boto3 SQS", "boto3", "boto3_sqs.py", AWS, stack="urllib3", upstream="moto"),
    Sdk("boto3 DynamoDB", "boto3", "boto3_dynamodb.py", AWS, stack="urllib3", upstream="moto"),
    Sdk("httpx", "httpx", "httpx_client.py", arguments=("httpx",), words="reason"),
    Sdk("httpx, async", "httpx", "httpx_async.py", arguments=("httpx",), words="reason"),
    Sdk("httpx2", "httpx2", "httpx_client.py", arguments=("httpx2",), words="reason"),
    Sdk("httpx2, async", "httpx2", "httpx_async.py", arguments=("httpx2",), words="reason"),
    Sdk("requests", "requests", "requests_session.py", stack="urllib3", words="reason"),
    Sdk("aiohttp", "aiohttp", "aiohttp_session.py", words="reason"),
    Sdk("urllib.request", "python", "urllib_request.py", words="reason"),
    Sdk("urllib3 ProxyManager", "urllib3", "urllib3_proxymanager.py", needs="`ProxyManager`"),
    Sdk("slack_sdk", "slack_sdk", "slack_sync.py", stack="urllib.request"),
    Sdk("slack_sdk, async", "slack_sdk", "slack_async.py", stack="aiohttp"),
    Sdk("twilio", "twilio", "twilio_messages.py", stack="requests"),
    Sdk("sendgrid", "sendgrid", "sendgrid_mail.py", stack="urllib.request", words="reason"),
    Sdk("PyGithub", "PyGithub", "pygithub_issues.py", stack="requests"),
    Sdk("mcp", "mcp", "mcp_client.py", stack="httpx2", begins=2, alone=True),
    Sdk("Node fetch", "node", "node_fetch.cjs", words="reason"),
    Sdk("Node https", "node", "node_https.cjs", words="reason"),
    Sdk("undici request", "undici", "undici_client.cjs", arguments=("own",)),
    Sdk("undici ProxyAgent", "undici", "undici_client.cjs", arguments=("proxy",), needs="`ProxyAgent`"),
    Sdk("undici fetch", "undici", "undici_client.cjs", arguments=("fetch",), words="reason"),
    Sdk("openai (npm)", "openai", "node_openai.cjs", OPENAI, stack="fetch"),
    Sdk("@anthropic-ai/sdk", "@anthropic-ai/sdk", "node_anthropic.cjs", ANTHROPIC, stack="fetch"),
    Sdk("stripe (npm)", "stripe", "node_stripe.cjs", stack="https"),
    Sdk("axios", "axios", "node_axios.cjs", stack="https", words="reason"),
    Sdk("curl", "curl", "curl.sh"),
]

#: What goes past the sidecar, and what to do.
UNREACHED = {
    "`urllib3.PoolManager`": "it reads no proxy variable and goes straight out; use `ProxyManager`",
    "`aiohttp.ClientSession(trust_env=False)`": "goes straight out; leave it out",
    "a dispatcher that a Node program gives undici or `fetch` itself, but `ProxyAgent`": "goes straight out",
}


def each(sdks: Iterable[Sdk]) -> pytest.MarkDecorator:
    """For a test that is made once for each of *sdks*."""
    return pytest.mark.parametrize("sdk", [pytest.param(sdk, id=sdk.name) for sdk in sdks])


def named(name: str) -> Sdk:
    """The line of the table with this name."""
    return next(sdk for sdk in SDKS if sdk.name == name)


QUICK = each(sdk for sdk in SDKS if sdk.quick)
