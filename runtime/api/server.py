"""The API's process: its listener, and the way of a request from there to a handler and back.

``proxy.api`` composes it with the rules of the proxy, and is what is started.
"""

import asyncio
import contextlib
import functools
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

import twiceshy
from runtime.agents import AgentTable
from runtime.api import guard, keys, of_approvals, of_house, of_runs, of_shown, openapi, problems, tail
from runtime.api.call import Call, House
from runtime.api.json_text import encode, members
from runtime.api.problems import Problem
from runtime.api.routes import Answer, Route, header_values, query_values
from runtime.api.store import Store
from runtime.api.watch import Watch
from runtime.errors import DatabaseAway, TwiceshyError, UsageError
from runtime.folder import Lock
from runtime.settings import Settings
from runtime.settling import Assume

log = logging.getLogger("twiceshy.api")

ROUTES: tuple[Route, ...] = tuple(
    route
    for routes in (of_runs.ROUTES, of_shown.ROUTES, tail.ROUTES, of_approvals.ROUTES, of_house.ROUTES)
    for route in routes.all
)
#: A body larger than this is read off the event loop: a megabyte takes a tenth of a second and more.
OFF_LOOP = 256 << 10
#: Seconds for a body to come.
BODY_WITHIN = 60.0
#: Seconds for what is being answered when the process is to end.
DRAIN = 5.0
#: Of a request's head, in bytes: its first line, and one of its headers. A key of a start or a cursor is far shorter.
#: Who was told that the body is too large may go on sending it for so many seconds.
LIMITS: dict[str, Any] = {
    "max_line_size": 16 << 10,
    "max_field_size": 16 << 10,
    "auto_decompress": False,
    "lingering_time": 2.0,
}
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "twiceshy"}

Step = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(house: House) -> web.Application:
    """The API, to be served."""
    house.document = json.dumps(openapi.document(ROUTES, house.settings, twiceshy.__version__), indent=1).encode()
    made = web.Application(middlewares=[_as_problems, _guarded(house)])
    for route in ROUTES:
        made.router.add_route(route.method, route.path, _answering(house, route))
    for path, name in (("/docs", "index.html"), ("/docs/page.css", "page.css"), ("/docs/page.js", "page.js")):
        made.router.add_route("GET", path, _page(name))
    made.router.add_route("GET", "/", _to_the_page)
    made.router.add_route("GET", "/openapi.json", _document(house))
    made.on_response_prepare.append(_finish)
    return made


async def _finish(_http: web.BaseRequest, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)


def _document(house: House) -> Step:
    async def show(_http: web.Request) -> web.StreamResponse:
        return web.Response(body=house.document, content_type="application/json")

    return show


def _page(name: str) -> Step:
    async def show(_http: web.Request) -> web.StreamResponse:
        return of_house.page(name)

    return show


async def _to_the_page(_http: web.Request) -> web.StreamResponse:
    return web.Response(status=303, headers={"Location": "/docs"})


# ---- a request's way


@web.middleware
async def _as_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong is answered as a problem."""
    try:
        return await handler(request)
    except Problem as error:
        problem = error
    except TwiceshyError as error:
        problem = problems.of(error)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        problem = Problem(405, f"{request.path} has {allowed}, not {request.method}", headers={"Allow": allowed})
    except web.HTTPException as error:
        problem = Problem(error.status, f"{request.method} {request.path[:200]}: {error.reason}")
    except Exception:
        log.exception("%s %s", request.method, request.path)
        problem = Problem(500, "a fault of the server's own; its log tells more")
    return web.Response(
        status=problem.status, body=encode(problem.as_json()), content_type=problems.MEDIA_TYPE, headers=problem.headers
    )


def _guarded(house: House) -> Middleware:
    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (problem := guard.judge(request.headers, house.names)) is not None:
            raise problem
        return await handler(request)

    return guarded


def _answering(house: House, route: Route) -> Step:
    async def answer(http: web.Request) -> web.StreamResponse:
        if not route.keyless:
            await _check_key(house, http)
        values = {
            "path": dict(http.match_info),
            "query": query_values(route.model("query"), http.query),
            "headers": header_values(route.model("headers"), http.headers),
        }
        raw: dict[str, bytes] = {}
        if route.method == "POST":
            values["body"], raw = await _body(house.settings, route, http)
        arguments = route.arguments(values, house.settings)
        try:
            found = await route.handler(Call(house, http, raw), **arguments)
        except DatabaseAway:
            if route.method != "GET":
                raise
            # A connection that was there before the server was started again is noticed by who uses it first.
            found = await route.handler(Call(house, http, raw), **arguments)
        if isinstance(found, Answer):
            return web.Response(
                status=found.status, body=encode(found.content), content_type="application/json", headers=found.headers
            )
        return found

    return answer


async def _check_key(house: House, http: web.Request) -> None:
    key = guard.bearer(http.headers.get(hdrs.AUTHORIZATION))
    if key is not None:
        try:
            found = await _is_known(house, key)
        except DatabaseAway:
            # A connection from before the server was started again: who uses it first, notices.
            found = await _is_known(house, key)
        if found:
            return
    words = "it needs a key" if key is None else "this key is not known"
    raise Problem(
        401, f"{words}: Authorization: Bearer KEY (twiceshy api --show prints it)",
        headers={"WWW-Authenticate": 'Bearer realm="twiceshy"'},
    )  # fmt: skip


async def _is_known(house: House, key: str) -> bool:
    async with house.store.connection() as connection:
        return await keys.known(connection, key)


async def _body(settings: Settings, route: Route, http: web.Request) -> tuple[Any, dict[str, bytes]]:
    """The body's value, and the text of its members."""
    if http.body_exists and http.content_type != "application/json":
        raise Problem(415, f"the body must be application/json, and is said to be {http.content_type[:100]}")
    text = await _read(http, settings.api_body_max)
    if not text:
        if route.model("body") is not None:
            raise Problem(400, "a JSON body is wanted")
        return None, {}
    read = functools.partial(members, text, settings.api_body_max, "the body")
    try:
        value, raw = read() if len(text) <= OFF_LOOP else await asyncio.to_thread(read)
    except UsageError as error:
        raise Problem(400, str(error)) from error
    if route.model("body") is None and value != {}:
        raise Problem(422, "body: nothing is asked for here but {}")
    return value, raw


async def _read(http: web.Request, limit: int) -> bytes:
    too_large = Problem(413, f"the body is larger than api_body_max ({limit} bytes)")
    if (http.content_length or 0) > limit:
        raise too_large
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_WITHIN):
            async for piece in http.content.iter_any():
                size += len(piece)
                if size > limit:
                    raise too_large
                pieces.append(piece)
    except TimeoutError:
        raise Problem(408, f"the body did not come within {BODY_WITHIN:g} s") from None
    except (ConnectionError, web.RequestPayloadError):
        raise Problem(400, "the body did not come whole") from None  # its client has gone, or does not count right
    return b"".join(pieces)


# ---- the process


async def serve(
    settings: Settings,
    dsn: str,
    folder: Path,
    *,
    host: str,
    port: int,
    agents: Callable[[], Mapping[str, AgentTable]],
    assume: Assume,
    listening: Callable[[int], object],
) -> None:
    """Run until SIGTERM or SIGINT; *listening* is told the port. Raises UsageError when the port is taken."""
    store = await Store.open(dsn, settings)
    house = House(
        settings, agents, store, Watch(store, settings.poll), assume, guard.own_names(host, settings.api_hosts)
    )
    runner = web.AppRunner(application(house), access_log=None, handle_signals=False, shutdown_timeout=DRAIN, **LIMITS)
    claiming: asyncio.Task[None] | None = None
    try:
        async with store.connection() as connection:
            await keys.of_folder(connection, folder)
        await runner.setup()
        site = web.TCPSite(runner, host, port, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(f"the API cannot listen on {host}:{port}: {error.strerror or error}") from error
        port = runner.addresses[0][1]
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        claiming = asyncio.create_task(_be_the_one(folder, host, port))
        listening(port)
        await stopping.wait()
    finally:
        if claiming is not None:
            claiming.cancel()
            await asyncio.gather(claiming, return_exceptions=True)
        house.ending.set()
        await house.watch.end()
        await runner.cleanup()
        await store.close()


async def _be_the_one(folder: Path, host: str, port: int) -> None:
    """Be the API that the folder's clients find, as soon as no other is."""
    lock, path = Lock(folder / "api.lock"), keys.address_file(folder)
    try:
        while not lock.take():
            await asyncio.sleep(1.0)
        draft = path.with_name(f"{path.name}.{port}")
        draft.write_text(f"{url(host, port)}\n", "ascii")
        draft.replace(path)
        await asyncio.Event().wait()
    finally:
        if lock.fd is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            lock.release()


def url(host: str, port: int) -> str:
    """Where somebody on this host finds it."""
    spoken = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{spoken}:{port}"
