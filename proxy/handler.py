"""One request, from the door to the last byte of its answer: identity → rule → fence → step → answer."""

import asyncio
import logging
import time
from dataclasses import replace

from aiohttp import web

from proxy import identity, internal, mcp, own, relay, upgrade
from proxy.admission import Admission
from proxy.asked_back import Response
from proxy.attempts import Attempts
from proxy.children import Children
from proxy.continuing import told
from proxy.doors import NO_TUNNEL_HERE, Written, door_of
from proxy.identity import Addressed
from proxy.journalled import Journalled, read_apart
from proxy.message import Request
from proxy.own import Asked
from proxy.profiles import Rule, Rules
from proxy.recorder import Exchange, Shell
from proxy.refusals import Refusal, reads_xml
from proxy.relay import Client
from proxy.run import Run
from proxy.websockets import WebSockets
from runtime import kin
from runtime.errors import DatabaseAway, Unreadable
from runtime.failpoints import reach
from runtime.step import Effect
from runtime.tokens import hash_token

log = logging.getLogger("twiceshy.handler")

#: What is refused before its body was read may say in so many seconds how it wants to be answered.
_LATE_BODY = 5.0


class Handler:
    """Serves requests. One per sidecar."""

    def __init__(self, shell: Shell, attempts: Attempts, admission: Admission, rules: Rules, secret: bytes) -> None:
        self._shell = shell
        self._settings = shell.settings
        self._attempts = attempts
        self._admission = admission
        self._websockets = WebSockets(shell.upstream, attempts, shell.settings)
        self._rules = rules
        self._journalled = Journalled(shell, attempts, rules, secret)
        self._children = Children(shell.journal, shell.settings.agents)
        self._forwarded: set[Exchange] = set()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        door = door_of(request)
        if door is None:
            return Written(keep_alive=False)
        http10 = request.version < (1, 1)
        # What came behind a request that asks for another protocol may be of either.
        keep_alive = request.keep_alive and not http10 and "Upgrade" not in request.headers
        client = Client(
            door, request.method, http10, keep_alive, self._settings.client_buffer, self._settings.record_wait,
            xml=reads_xml(request.raw_headers),
        )  # fmt: skip
        written = door.written
        refusal: Refusal | None
        try:
            refusal = await self._answer(request, client)
        except DatabaseAway as error:
            refusal = Refusal("database-away", f"{error} Nothing was sent.")
        except Unreadable as error:
            refusal = Refusal("internal", f"{error} Nothing was sent.")
        except Exception as error:
            if not door.gone:
                log.exception("%s %s", request.method, request.rel_url.host)
            refusal = Refusal("internal", f"twiceshy failed: {error!r}")
        if (refusal is None) == (door.written == written):
            # Part of an answer has gone out, and anything after it would be taken for its body; or there is none.
            door.abort(reset=http10)
        elif refusal is not None:
            if client.call is None:
                await self._ask_for_its_call(request, client, refusal)
            # Where a body was not read, or the request not understood, nobody knows where the next one begins.
            clear = request.content.is_eof() and refusal.status != 400
            client = replace(client, keep_alive=client.keep_alive and clear)
            await relay.refuse(client, refusal)
        return Written(keep_alive=client.keep_alive and not door.gone)

    # ---- the way of a request; each part returns a refusal, or None when the answer was given

    async def _answer(self, http: web.BaseRequest, client: Client) -> Refusal | None:
        if http.method == "CONNECT":
            client.door.refuse(NO_TUNNEL_HERE)
            return None
        addressed = identity.address(http.raw_path, tuple(http.raw_headers), client.door.tunnel)
        if isinstance(addressed, Refusal):
            return addressed
        fault = self._faulty(http, addressed, client)
        if fault is not None:
            known = self._attempts.get(addressed.named.run) if addressed.named is not None else None
            if known is not None:
                known.count(addressed.target, "refused")
            return fault
        known = self._attempts.get(addressed.named.run) if addressed.named is not None else None
        if known is None or addressed.target.internal:
            came = await self._come(http, addressed, client)
        else:
            with known.understanding(client.door):
                came = await self._come(http, addressed, client)
        if came is None:
            return await self._let_pass(http, addressed, client)
        if isinstance(came, Refusal):
            return await self._continued(http, addressed, client, came)
        run, request = came
        reach("read-whole")
        if not internal.is_of_launchers(request):
            run.idle_since = time.monotonic()
        if addressed.target.internal:
            return await self._own(run, request, addressed, client)
        rule = await read_apart(request, lambda: self._rules.match(request))
        if rule.denied:
            run.count(addressed.target, "refused")
            return _denied(request, rule)
        if upgrade.is_asked_for(http.raw_headers):
            return await self._websockets.answer(http, addressed.target, request, client, run)
        if rule.effect is Effect.PASSTHROUGH or self._settings.mode == "naive":
            run.count(addressed.target, "passthrough")
            await self._forward(request, client, rule, run)
            return None
        return await self._serve(run, request, rule, addressed, client)

    async def _come(
        self, http: web.BaseRequest, addressed: Addressed, client: Client
    ) -> tuple[Run, Request] | Refusal | None:
        """The request, whole, and the attempt that may ask it; None: it is let pass. Raises DatabaseAway."""
        run = await self._admission.of(addressed.named, addressed.target, client.door)
        if run is None or addressed.named is None:
            return run if isinstance(run, Refusal) else None
        if isinstance(run, Refusal):
            ended = self._attempts.get(addressed.named.run)
            if ended is not None and ended.refusal is run:
                ended.count(addressed.target, "refused")
                await self._attempts.save(ended)  # a stopped run's launcher asks once more, for the tape
            return run
        body = await self._read(http, client)
        if isinstance(body, Refusal):
            return body
        request = await self._request(http, addressed, body, client)
        trusted = await self._attempts.trusted(run)  # the body may have taken its time
        return trusted if isinstance(trusted, Refusal) else (run, request)

    async def _own(self, run: Run, request: Request, addressed: Addressed, client: Client) -> Refusal | None:
        """Answer what is asked of the sidecar itself."""
        asked = own.read(request, self._settings.payload_max) if request.host == identity.INTERNAL else None
        if isinstance(asked, Refusal):
            return replace(asked, run=run.run_id)
        if asked is not None:
            asked = replace(asked, refused=await self._children.refused(run, asked))
            asked = replace(asked, token=None if addressed.named is None else addressed.named.token)
            return await self._serve(run, own.as_json(request), asked.rule, addressed, client, asked)
        head, answer = await internal.answer(
            run, request, self._attempts, self._shell.journal, self._journalled.permits, self._settings
        )
        await relay.give(client, head, answer)
        return None

    async def _continued(
        self, http: web.BaseRequest, addressed: Addressed, client: Client, refusal: Refusal
    ) -> Refusal | None:
        """Give *refusal*; but who asks once more to continue is told again as whom the run goes on."""
        named, target = addressed.named, addressed.target
        asked = (http.method, target.host, target.target) == ("POST", identity.INTERNAL, "/continue")
        if not asked or named is None or named.token is None or refusal.code not in ("continued", "not-running"):
            return refusal
        successor = await kin.successor(self._shell.journal, named.run, hash_token(named.token))
        if successor is None or isinstance(await self._read(http, client), Refusal):
            return refusal
        await relay.give(client, internal.TOLD, told(successor))
        return None

    async def _serve(
        self, run: Run, request: Request, rule: Rule, addressed: Addressed, client: Client, asked: Asked | None = None
    ) -> Refusal | None:
        """Answer a request that is a step."""
        assert addressed.named is not None
        run.serving[client.door] = None
        run.count(addressed.target, "journalled")  # before its client has the answer, and may end
        try:
            refusal = await self._journalled.answer(run, request, rule, addressed.named.step, client, asked)
        finally:
            run.serving.pop(client.door, None)
        if refusal is not None:
            run.count(addressed.target, "refused", "journalled")
        return refusal

    def _faulty(self, http: web.BaseRequest, addressed: Addressed, client: Client) -> Refusal | None:
        headers = {name.lower() for name, _ in http.raw_headers}
        if b"transfer-encoding" in headers and (
            client.http10 or http.headers["Transfer-Encoding"].lower() != "chunked"
        ):
            return Refusal("bad-request", "Transfer-Encoding may be chunked, and with HTTP/1.1 only. Nothing was sent.")
        if upgrade.is_asked_for(http.raw_headers) and (
            why := upgrade.fault(http.method, http.raw_headers, http10=client.http10)
        ):
            return Refusal("bad-request", f"This asks for no WebSocket: {why}. Nothing was sent.")
        for name, value in addressed.headers:
            try:
                name.decode("ascii"), value.decode("utf-8")
            except UnicodeDecodeError:
                return Refusal(
                    "bad-request",
                    f"The header {name.decode('latin-1')!r} is not UTF-8 and could not be passed on unaltered. "
                    "Nothing was sent.",
                )
        if addressed.gateway and not self._own_name(http.headers.get("Host", "")):
            return Refusal(
                "bad-request",
                f"The gateway address was called by the name {http.headers.get('Host')!r}, which is not one of this "
                "sidecar's (setting gateway_hosts). Nothing was sent.",
            )
        return self._admission.out_of_reach(addressed.target)

    def _own_name(self, host: str) -> bool:
        parsed = identity.authority(host, 80)
        if isinstance(parsed, Refusal):
            return False
        name = parsed[0]
        named = {text.strip() for text in self._settings.gateway_hosts.split(",")}
        return name == "localhost" or name in named or identity.is_address(name)

    async def _let_pass(self, http: web.BaseRequest, addressed: Addressed, client: Client) -> Refusal | None:
        """Pass on what names no run."""
        body = await self._read(http, client)
        if isinstance(body, Refusal):
            return body
        request = await self._request(http, addressed, body, client)
        rule = await read_apart(request, lambda: self._rules.match(request))
        if rule.denied:
            return _denied(request, rule)
        if upgrade.is_asked_for(http.raw_headers):
            return await self._websockets.answer(http, addressed.target, request, client, None)
        await self._forward(request, client, rule, None)
        return None

    async def _read(self, http: web.BaseRequest, client: Client, limit: int | None = None) -> bytes | Refusal:
        limit = limit or self._settings.request_body_max
        if (http.content_length or 0) > limit:
            return self._too_large(limit)
        if not client.http10 and http.headers.get("Expect", "").lower() == "100-continue":
            client.door.go_on()
        pieces: list[bytes] = []
        size = 0
        try:
            while data := await http.content.readany():
                size += len(data)
                if size > limit:
                    return self._too_large(limit)
                pieces.append(data)
        except web.RequestPayloadError as error:
            return Refusal("bad-request", f"The request's body is malformed: {error}. Nothing was sent.")
        return b"".join(pieces)

    @staticmethod
    def _too_large(limit: int) -> Refusal:
        return Refusal(
            "body-too-large", f"The request's body is larger than request_body_max ({limit} bytes). Nothing was sent."
        )

    async def _request(self, http: web.BaseRequest, addressed: Addressed, body: bytes, client: Client) -> Request:
        """The request, read whole; and *client* is known to want an answer of MCP if it does."""
        method, target, headers = http.method, addressed.target, addressed.headers
        request = Request(method, target.scheme, target.host, target.port, target.target, headers, body)
        client.call = await read_apart(request, lambda: mcp.call(method, headers, body))
        return request

    async def _ask_for_its_call(self, http: web.BaseRequest, client: Client, refusal: Refusal) -> None:
        """A request is refused that was not read: if it looks like one of MCP, its body says how to answer it."""
        headers = tuple(http.raw_headers)
        unread = not http.content.at_eof() and refusal.code != "body-too-large" and "Expect" not in http.headers
        if not unread or not mcp.looks_like_one(http.method, headers):
            return
        try:
            async with asyncio.timeout(_LATE_BODY):
                body = await self._read(http, client, self._settings.memory_body)
        except TimeoutError:
            return
        if isinstance(body, bytes):
            client.call = mcp.call(http.method, headers, body)

    async def _forward(self, request: Request, client: Client, rule: Rule, run: Run | None) -> None:
        """Pass on what is never journalled."""
        response = None
        if run is not None:
            named = await read_apart(request, lambda: mcp.responded(request.method, request.headers, request.body))
            response = None if named is None else Response(run, request, named)
        sent = request if response is None else response.request
        exchange = Exchange(self._shell, None, "" if run is None else run.run_id, sent, rule, None)
        self._forwarded.add(exchange)
        exchange.attach()
        exchange.start()
        try:
            await relay.relay(client, exchange, ())
        finally:
            exchange.detach()
            self._forwarded.discard(exchange)
        if response is not None and exchange.answer.head is not None:
            response.arrived(exchange.answer.head.status)

    async def close(self) -> None:
        await self._journalled.permits.close()
        for exchange in list(self._forwarded):
            await exchange.stop()


def _denied(request: Request, rule: Rule) -> Refusal:
    return Refusal(
        "denied",
        f"{request.method} {request.authority}{request.path} is denied by the rule {rule.name!r}. Nothing was sent.",
    )
