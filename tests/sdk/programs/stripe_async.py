import asyncio

from stripe import HTTPXClient, StripeClient
from telling import URL, tell


async def main() -> None:
    client = StripeClient("sk_test_1", base_addresses={"api": f"{URL}/payments"}, http_client=HTTPXClient())
    tell((await client.v1.refunds.create_async({"charge": "ch_1", "amount": 1250})).id)
    tell((await client.v1.refunds.retrieve_async("re_0001")).amount)
    tell((await client.v1.refunds.create_async({"charge": "ch_2", "amount": 990})).to_dict())


asyncio.run(main())
