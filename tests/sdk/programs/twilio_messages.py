from telling import URL, tell
from twilio.rest import Client

client = Client("AC1", "secret")
client.api.base_url = f"{URL}/twilio"

for text in ("rice is out", "rice is ordered"):
    message = client.messages.create(to="+4930111", from_="+4930222", body=text)
    tell([message.sid, message.status, message.body])
