from agents import Agent, Runner
from telling import QUESTION, mail, tell

agent = Agent(name="steward", model="gpt-5-mini", instructions="Be short.")

first = Runner.run_sync(agent, QUESTION)
tell(first.final_output)

tell(mail(first.final_output))

tell(Runner.run_sync(agent, f"{first.final_output} And in French?").final_output)
