"""The house: whether it is well, which agents it knows, its document and the page that shows that."""

from importlib.resources import files

from aiohttp import web

from runtime.api import answers
from runtime.api.call import Call
from runtime.api.routes import Answer, Routes
from runtime.database import sql, transaction

ROUTES = Routes("house")

#: The page shows what comes from here, runs what comes from here, and asks here: nothing else, and in no frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


@ROUTES.add("GET", "/healthz", {200: answers.Health}, keyless=True)
async def health(call: Call) -> Answer:
    """Say whether process and database answer."""
    async with call.connection() as connection, transaction(connection):
        await connection.fetchval(sql("alive"))
    return Answer(answers.Health(status="ok"))


@ROUTES.add("GET", "/v1/agents", {200: answers.Agents})
async def list_agents(call: Call) -> Answer:
    """List the agents that runs can be started of, with the schemas of their inputs."""
    return Answer(
        answers.Agents(
            agents=[
                answers.Agent(name=name, input_schema=table.input_schema)
                for name, table in sorted(call.house.agents().items())
            ]
        )
    )


def page(name: str) -> web.StreamResponse:
    """A file of the page that shows the document."""
    text = files("runtime.api").joinpath("docs", name).read_bytes()
    kind = _KINDS[name.rpartition(".")[2]]
    return web.Response(body=text, content_type=kind, charset="utf-8", headers={"Content-Security-Policy": POLICY})
