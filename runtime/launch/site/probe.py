"""Asks for a name that only the sidecar knows, by every HTTP client that is here (``twiceshy doctor``).

    python [FLAGS] -c TEXT HOST

Prints a line for each client and scheme; what it means is judged elsewhere. Runs in the agent's own Python, whichever
that is. Standard library but for the clients; nobody is waited for longer than ``SECONDS``.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, ignore-errors

import importlib.util
import json
import os
import sys
import threading

SECONDS = 10.0


def by_urllib(url):
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:  # noqa: S310
            return answer.read()
    except urllib.error.HTTPError as error:
        return error.read()


def by_requests(url):
    import requests

    return requests.get(url, timeout=SECONDS).content


def by_httpx(url):
    import httpx

    return httpx.get(url, timeout=SECONDS).content


def by_httpx2(url):
    import httpx2

    return httpx2.get(url, timeout=SECONDS).content


def by_aiohttp(url):
    import asyncio

    import aiohttp

    async def ask():
        limit = aiohttp.ClientTimeout(total=SECONDS)
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as answer:
            return await answer.read()

    return asyncio.run(ask())


def by_pool_manager(url):
    import urllib3

    return urllib3.PoolManager(retries=False, timeout=SECONDS).request("GET", url).data


CLIENTS = {
    "urllib": ("urllib", by_urllib),
    "requests": ("requests", by_requests),
    "httpx": ("httpx", by_httpx),
    "httpx2": ("httpx2", by_httpx2),
    "aiohttp": ("aiohttp", by_aiohttp),
    "urllib3.PoolManager": ("urllib3", by_pool_manager),
}


def is_here(module):
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def say(**what):
    os.write(1, b"\ntwiceshy-probe " + json.dumps(what).encode() + b"\n")


def words(error):
    """The exception and what it came from, down to the cause that tells something."""
    found = []
    while error is not None and len(found) < 8:
        found.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return " < ".join(found)[:2000]


def ask(client, module, by, host):
    for scheme in ("http", "https"):
        told = {"client": client, "scheme": scheme, "answer": None, "error": None}
        try:
            answer = by(f"{scheme}://{host}/")
            told["answer"] = answer.decode("utf-8", "replace")[:2000]
        except Exception as error:
            told["error"] = words(error)
        told["version"] = getattr(sys.modules.get(module), "__version__", "")
        say(**told)


def main(host):
    say(interpreter="Python " + sys.version.split()[0], path=sys.executable)
    found = [(client, module, by) for client, (module, by) in CLIENTS.items() if is_here(module)]
    asked = [threading.Thread(target=ask, args=(*each, host), daemon=True) for each in found]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join(2 * SECONDS)
    for (client, _, _), thread in zip(found, asked):  # noqa: B905 - Python 3.9 has no strict
        if thread.is_alive():
            say(client=client, scheme="", answer=None, error=f"no answer within {SECONDS:g} s", version="")
    os._exit(0)


main(sys.argv[1])
