from stripe import StripeClient
from telling import URL, tell

client = StripeClient("sk_test_1", base_addresses={"api": f"{URL}/payments"})

tell(client.v1.refunds.create({"charge": "ch_1", "amount": 1250}).id)
tell(client.v1.refunds.retrieve("re_0001").amount)
tell(client.v1.refunds.create({"charge": "ch_2", "amount": 990}).to_dict())
