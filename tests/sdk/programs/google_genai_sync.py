from google import genai
from telling import QUESTION, mail, tell

client = genai.Client()

first = client.models.generate_content(model="gemini-2.5-flash", contents=QUESTION)
tell(first.text)

tell(mail(first.text))

events = client.models.generate_content_stream(model="gemini-2.5-flash", contents=first.text + " And in French?")
tell([event.text for event in events])
