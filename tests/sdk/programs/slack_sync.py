from slack_sdk import WebClient
from telling import URL, tell

client = WebClient("xoxb-1", base_url=f"{URL}/slack/")

first = client.chat_postMessage(channel="#pantry", text="rice is out")
tell(first["ts"])
tell(client.chat_postMessage(channel="#pantry", text="ordered", thread_ts=first["ts"]).data)
