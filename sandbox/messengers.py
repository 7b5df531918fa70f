"""Who carries messages, each in its provider's shapes: Slack, Twilio, SendGrid. None of them knows keys.

Every request that is understood is a message that somebody gets.
"""

import json
from typing import Any
from urllib.parse import parse_qsl

from sandbox.answer import Answer, of_json
from sandbox.ledger import Ledger
from sandbox.service import Service
from sandbox.wire import Asked


def _fields(asked: Asked) -> dict[str, Any]:
    """The fields of a form or JSON body; none where there are no such."""
    if "form" in (asked.header("content-type") or ""):
        return dict(parse_qsl(asked.body.decode("utf-8", "replace")))
    try:
        value = json.loads(asked.body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _Messenger(Service):
    """Numbers the messages it carries, over restarts too."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._carried = len(ledger.made(self.name))

    def _carry(self, number: int, ident: str, **facts: Any) -> str:
        self._carried += 1
        made = ident.format(self._carried)
        self.ledger.effect(self.name, "message", number, made=made, **facts)
        return made


class Slack(_Messenger):
    """``POST /slack/chat.postMessage``. What fails is 200 with ``ok: false``, as there."""

    name = "slack"

    def act(self, asked: Asked, number: int) -> Answer:
        if asked.method != "POST" or asked.path != "/slack/chat.postMessage":
            return of_json(200, {"ok": False, "error": "unknown_method"})
        wanted = _fields(asked)
        channel, text = wanted.get("channel"), wanted.get("text")
        if not channel or not text:
            return of_json(200, {"ok": False, "error": "no_text" if channel else "channel_not_found"})
        stamp = self._carry(number, "1767225600.{:06}", channel=channel, text=text)
        message = {"type": "message", "text": text, "ts": stamp}
        return of_json(200, {"ok": True, "channel": channel, "ts": stamp, "message": message})


class Twilio(_Messenger):
    """``POST /twilio/2010-04-01/Accounts/SID/Messages.json``."""

    name = "twilio"

    def act(self, asked: Asked, number: int) -> Answer:
        account, _, what = asked.path.removeprefix("/twilio/2010-04-01/Accounts/").partition("/")
        if asked.method != "POST" or what != "Messages.json":
            return of_json(404, {"code": 20404, "message": f"no such thing: {asked.path}", "status": 404})
        wanted = _fields(asked)
        missing = [name for name in ("To", "From", "Body") if not wanted.get(name)]
        if missing:
            return of_json(400, {"code": 21604, "message": f"Missing: {', '.join(missing)}", "status": 400})
        to, sender, body = wanted["To"], wanted["From"], wanted["Body"]
        sid = self._carry(number, "SM{:032}", to=to, body=body)
        made = {"sid": sid, "account_sid": account, "to": to, "from": sender, "body": body, "status": "queued"}
        return of_json(201, made)


class SendGrid(_Messenger):
    """``POST /sendgrid/v3/mail/send``."""

    name = "sendgrid"

    def act(self, asked: Asked, number: int) -> Answer:
        if asked.method != "POST" or asked.path != "/sendgrid/v3/mail/send":
            return of_json(404, {"errors": [{"message": f"no such thing: {asked.path}"}]})
        wanted = _fields(asked)
        if not wanted.get("personalizations") or not wanted.get("from"):
            return of_json(400, {"errors": [{"message": "personalizations and from are required"}]})
        made = self._carry(number, "mail-{:04}", subject=wanted.get("subject"))
        return Answer(202, (b"",), (("X-Message-Id", made),), "text/plain")
