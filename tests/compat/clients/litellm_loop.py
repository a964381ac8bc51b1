"""litellm: a loop by hand; arguments `chat`, `streamed` (chat), `responses` or `messages`."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched

import litellm
from task import FOLLOW_UP, QUESTION, arguments, finish, get_weather

url, (form,) = arguments()
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Tell the weather.", "parameters": PARAMETERS}


def complete(messages: list[Any]) -> Any:
    """Return the model's message."""
    if form == "messages":
        model, base = "anthropic/any-model", url
    else:
        model, base = "openai/any-model", f"{url}/v1"
    asked = {
        "model": model,
        "api_base": base,
        "api_key": "none",
        "messages": messages,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    if form == "streamed":
        chunks = list(litellm.completion(**asked, stream=True))
        return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    return litellm.completion(**asked).choices[0].message


def by_messages(messages: list[Any]) -> str:
    """Run tools until the model answers."""
    while True:
        message = complete(messages)
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            output = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})


def by_responses(items: list[Any]) -> str:
    """The same with response items."""
    while True:
        answer = litellm.responses(
            model="openai/any-model",
            api_base=f"{url}/v1",
            api_key="none",
            input=items,
            tools=[{"type": "function", **FUNCTION}],
        )
        calls = [item for item in answer.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        if not calls:
            return answer.output[-1].content[0].text
        for call in calls:
            output = get_weather(**json.loads(call.arguments))
            result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
            items.append(result)


run = by_responses if form == "responses" else by_messages
history: list[Any] = [{"role": "user", "content": QUESTION}]
first = run(history)
history.append({"role": "user", "content": FOLLOW_UP})
finish(first, run(history))
