import requests
from telling import URL, tell


def post(path: str, body: object) -> requests.Response:
    answer = session.post(URL + path, json=body, stream=True)
    answer.raise_for_status()
    return answer


with requests.Session() as session:
    order = post("/orders", {"lines": [{"sku": "rice", "count": 1}]}).json()
    tell(order)
    tell(post("/email/send", {"to": "ada@example.org", "text": order["id"]}).json())
    stream = {"model": "m", "messages": [{"role": "user", "content": order["id"]}], "stream": True}
    tell([line.decode() for line in post("/v1/chat/completions", stream).iter_lines()])
