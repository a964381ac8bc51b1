"""pydantic-ai: arguments `chat`, `responses`, `chained` or `messages`."""

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIResponsesModel,
    OpenAIResponsesModelSettings,
)
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from task import FOLLOW_UP, QUESTION, arguments, finish, get_weather

url, (form,) = arguments()
settings = None
if form == "messages":
    model = AnthropicModel("any-model", provider=AnthropicProvider(base_url=url, api_key="none"))
else:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    kind = OpenAIChatModel if form == "chat" else OpenAIResponsesModel
    model = kind("any-model", provider=provider)
    if form == "chained":
        settings = OpenAIResponsesModelSettings(openai_previous_response_id="auto")
agent = Agent(model, instructions="Answer briefly.", tools=[get_weather], model_settings=settings)
first = agent.run_sync(QUESTION)
second = agent.run_sync(FOLLOW_UP, message_history=first.all_messages())
finish(first.output, second.output)
