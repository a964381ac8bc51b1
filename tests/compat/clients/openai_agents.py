"""openai-agents: arguments `responses`, `chat`, or `chained` (previous_response_id)."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIProvider,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from task import FOLLOW_UP, QUESTION, arguments, finish, get_weather


async def main() -> None:
    url, (form,) = arguments()
    set_tracing_disabled(True)
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none", use_responses=form != "chat")
    agent = Agent(
        name="weather",
        instructions="Answer briefly.",
        model="any-model",
        model_settings=ModelSettings(parallel_tool_calls=True),
        tools=[function_tool(get_weather)],
    )
    chained = form == "chained"
    settings = RunConfig(model_provider=provider)
    first = await Runner.run(
        agent, QUESTION, run_config=settings, auto_previous_response_id=chained
    )
    if chained:
        history, previous = FOLLOW_UP, first.last_response_id
    else:
        history, previous = [*first.to_input_list(), {"role": "user", "content": FOLLOW_UP}], None
    second = Runner.run_streamed(agent, history, run_config=settings, previous_response_id=previous)
    async for _ in second.stream_events():
        pass
    finish(first.final_output, second.final_output)


asyncio.run(main())
