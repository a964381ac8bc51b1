"""langchain-openai under langgraph: arguments `chat`, `responses` or `chained`."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from task import FOLLOW_UP, QUESTION, arguments, finish, get_weather

url, (form,) = arguments()
model = ChatOpenAI(
    model="any-model",
    base_url=f"{url}/v1",
    api_key="none",
    use_responses_api=form != "chat",
    use_previous_response_id=form == "chained",
)
agent = create_agent(
    model, [tool(get_weather)], system_prompt="Answer briefly.", checkpointer=InMemorySaver()
)
thread = {"configurable": {"thread_id": "a-thread"}}
first = agent.invoke({"messages": [("user", QUESTION)]}, thread)["messages"][-1]
last = None
for _, state in agent.stream(
    {"messages": [("user", FOLLOW_UP)]}, thread, stream_mode=["messages", "values"]
):
    last = state["messages"][-1] if isinstance(state, dict) else last
finish(first.text, last.text)
