"""smolagents: a ToolCallingAgent, which shows the model its calls and results as text."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from task import FOLLOW_UP, QUESTION, arguments, finish, get_weather

url, _ = arguments()
model = OpenAIServerModel("any-model", api_base=f"{url}/v1", api_key="none")
agent = ToolCallingAgent(tools=[tool(get_weather)], model=model, max_steps=4, verbosity_level=0)
finish(agent.run(QUESTION), agent.run(FOLLOW_UP, reset=False))
