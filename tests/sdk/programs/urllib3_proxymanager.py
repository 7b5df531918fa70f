import os

import urllib3
from telling import URL, tell

# What urllib3 does not do by itself: it reads no proxy variable.
proxy = urllib3.util.parse_url(os.environ["HTTPS_PROXY"])
credentials = urllib3.make_headers(proxy_basic_auth=proxy.auth) if proxy.auth else None
pool = urllib3.ProxyManager(os.environ["HTTPS_PROXY"], proxy_headers=credentials)


def post(path: str, body: object) -> object:
    answer = pool.request("POST", URL + path, json=body)
    if answer.status >= 300:
        raise SystemExit(f"{answer.status} {answer.reason}: {answer.data.decode()}")
    return answer.json()


order = post("/orders", {"lines": [{"sku": "rice", "count": 1}]})
tell(order)
tell(post("/email/send", {"to": "ada@example.org", "text": order["id"]}))
tell(pool.request("GET", f"{URL}/orders/{order['id']}").json())
