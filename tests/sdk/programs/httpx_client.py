import sys

from telling import URL, tell

httpx = __import__(sys.argv[1])  # httpx and httpx2 are asked in the same way

with httpx.Client(base_url=URL) as client:
    order = client.post("/orders", json={"lines": [{"sku": "rice", "count": 1}]}).raise_for_status().json()
    tell(order)
    tell(client.get(f"/orders/{order['id']}").raise_for_status().json())
    tell(client.post("/crm/notes", json={"text": f"ordered {order['id']}"}).raise_for_status().json())
