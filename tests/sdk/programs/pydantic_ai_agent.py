from pydantic_ai import Agent
from telling import QUESTION, mail, tell

agent = Agent("openai-chat:gpt-5-mini", instructions="Be short.")

first = agent.run_sync(QUESTION)
tell(first.output)

tell(mail(first.output))

tell(agent.run_sync("And in French?", message_history=first.all_messages()).output)
