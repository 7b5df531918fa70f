"""A forge with GitHub's API: a repository, issues, comments. It knows no keys: each POST makes another one."""

import json
import re
from typing import Any

from sandbox.answer import Answer, of_json
from sandbox.ledger import Ledger
from sandbox.service import Service
from sandbox.wire import Asked

_PATH = re.compile(r"/github(?P<repo>/repos/(?P<name>[^/]+/[^/]+))(?P<rest>/.*)?")
_ISSUE = re.compile(r"/issues/(\d+)")
_COMMENTS = re.compile(r"/issues/(\d+)/comments")


class Forge(Service):
    """``GET /github/repos/OWNER/NAME``; ``POST …/issues``; ``GET …/issues/N``; ``GET, POST …/issues/N/comments``.

    Any repository is there. Addresses in answers are paths, which clients put behind their base.
    """

    name = "github"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._issues: list[dict[str, Any]] = []
        self._comments: list[dict[str, Any]] = []
        for made in ledger.made(self.name):
            (self._issues if made["effect"] == "issue" else self._comments).append(made["facts"]["object"])

    def act(self, asked: Asked, number: int) -> Answer:
        found = _PATH.fullmatch(asked.path)
        if found is None:
            return _not_found()
        url, rest = found["repo"], found["rest"] or ""
        if rest == "" and asked.method == "GET":
            name = found["name"].partition("/")[2]
            return of_json(200, {"id": 1, "name": name, "full_name": found["name"], "private": False, "url": url})
        if rest == "/issues" and asked.method == "POST":
            return self._open(asked, number, url)
        if _ISSUE.fullmatch(rest) and asked.method == "GET":
            issue = self._issue(f"{url}{rest}")
            return of_json(200, {**issue, "comments": len(self._of(f"{url}{rest}"))}) if issue else _not_found()
        if one := _COMMENTS.fullmatch(rest):
            issue = self._issue(f"{url}/issues/{one[1]}")
            if issue is None:
                return _not_found()
            if asked.method == "GET":
                return of_json(200, self._of(issue["url"]))
            if asked.method == "POST":
                return self._comment(asked, number, url, issue["url"])
        return _not_found()

    def _issue(self, url: str) -> dict[str, Any] | None:
        return next((each for each in self._issues if each["url"] == url), None)

    def _of(self, issue: str) -> list[dict[str, Any]]:
        return [each for each in self._comments if each["issue_url"] == issue]

    def _open(self, asked: Asked, number: int, repository: str) -> Answer:
        wanted = _object(asked)
        if not wanted.get("title"):
            return of_json(422, {"message": "Validation Failed", "errors": [{"field": "title", "code": "missing"}]})
        n = 1 + sum(each["repository_url"] == repository for each in self._issues)
        made = {
            "id": 1000 + len(self._issues), "number": n, "state": "open", "title": wanted["title"],
            "body": wanted.get("body"), "url": f"{repository}/issues/{n}", "repository_url": repository,
        }  # fmt: skip
        self._issues.append(made)
        self.ledger.effect(self.name, "issue", number, made=str(made["id"]), object=made)
        return of_json(201, made)

    def _comment(self, asked: Asked, number: int, repository: str, issue: str) -> Answer:
        wanted = _object(asked)
        if not wanted.get("body"):
            return of_json(422, {"message": "Validation Failed", "errors": [{"field": "body", "code": "missing"}]})
        ident = 2000 + len(self._comments)
        url = f"{repository}/issues/comments/{ident}"
        made = {"id": ident, "body": wanted["body"], "url": url, "issue_url": issue}
        self._comments.append(made)
        self.ledger.effect(self.name, "comment", number, made=str(ident), object=made)
        return of_json(201, made)


def _object(asked: Asked) -> dict[str, Any]:
    try:
        value = json.loads(asked.body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _not_found() -> Answer:
    return of_json(404, {"message": "Not Found"})
