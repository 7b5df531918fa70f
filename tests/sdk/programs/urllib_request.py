import json
import urllib.request

from telling import URL, mail, tell


def post(path: str, body: object) -> object:
    data = json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(URL + path, data, {"Content-Type": "application/json"}))


with post("/orders", {"lines": [{"sku": "rice", "count": 1}]}) as answer:
    order = json.load(answer)
tell(order)
tell(mail(order["id"]))
stream = {"model": "m", "messages": [{"role": "user", "content": order["id"]}], "stream": True}
with post("/v1/chat/completions", stream) as answer:
    tell([line.decode() for line in answer])
