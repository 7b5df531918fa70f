from langchain_openai import ChatOpenAI
from telling import QUESTION, mail, tell

model = ChatOpenAI(model="gpt-5-mini")

first = model.invoke(QUESTION)
tell(first.content)

tell(mail(first.content))

tell([part.content for part in model.stream(f"{first.content} And in French?")])
