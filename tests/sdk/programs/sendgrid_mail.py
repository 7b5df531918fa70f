from sendgrid import SendGridAPIClient
from sendgrid.helpers.mail import Mail
from telling import URL, tell

client = SendGridAPIClient("SG.1", host=f"{URL}/sendgrid")

for text in ("rice is out", "rice is ordered"):
    letter = Mail(from_email="a@example.org", to_emails="b@example.org", subject=text, plain_text_content=text)
    answer = client.send(letter)
    tell([answer.status_code, answer.headers["X-Message-Id"]])
