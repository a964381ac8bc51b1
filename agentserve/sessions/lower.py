"""Messages as the dictionaries that chat templates take, in kinds that this template renders."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from agentserve import wire
from agentserve.sessions.conversation import Call, Conversation, Message
from agentserve.sessions.examples import ANSWER, RESULT, worked_example
from agentserve.sessions.marks import Breaker, strings
from agentserve.sessions.probe import Survival
from agentserve.sessions.splice import reasoning_key, text_key
from agentserve.sessions.toolformat import ToolFormat

Lowered = list[dict[str, Any]]


def client_strings(conversation: Conversation) -> list[str]:
    """Return every piece of text in the conversation that the template could print."""
    found: list[str] = [*strings(conversation.options)]
    for message in conversation.messages:
        found += (message.tail, message.name, message.call_id)
        if message.ids is None:
            found += (message.text, message.reasoning)
            for call in message.calls:
                found += (call.call_id, call.name, *strings(call.arguments))
    for tool in conversation.tools:
        found += strings(msgspec.to_builtins(tool))
    return found


class Lowering:
    """Lowers the messages of one model.

    Kinds that the template drops or refuses become user text, joined with user text beside it.
    """

    def __init__(self, format: ToolFormat, survival: Survival, breaker: Breaker) -> None:
        self._format = format
        self._survival = survival
        self._breaker = breaker
        self.needs_calls = survival.needs_calls

    def tools(self, tools: Sequence[wire.Tool], mark: str) -> list[dict[str, Any]] | None:
        """Return the template's `tools`, or None where the system text tells of them."""
        if not tools or not self._format.native:
            return None
        return [
            {
                "type": "function",
                "function": {
                    "name": self._breaker.text(tool.name, mark),
                    "description": self._breaker.text(tool.description, mark),
                    "parameters": self._breaker.value(tool.parameters, mark),
                },
            }
            for tool in tools
        ]

    def messages(self, conversation: Conversation, mark: str, quote: str) -> Lowered:
        """Return the template's `messages`; spliced ones hold keys between `quote` characters."""
        lowered: Lowered = []
        joins = False  # whether the last user message takes more text
        calls: tuple[Call, ...] = ()
        for index, message in self._with_tool_prompt(conversation):
            if message.role == "assistant":
                calls, joins = message.calls, False
                message = self._answered(message, conversation.messages, index)
                lowered.append(self._assistant(message, index, mark, quote))
                continue
            survives = self._survives(message, first=not lowered)
            text = self._breaker.text(self._content(message, calls, survives), mark)
            after_user = bool(lowered) and lowered[-1]["role"] == "user"
            if after_user and (not survives or (joins and message.role == "user")):
                lowered[-1]["content"] += "\n\n" + text
                joins = True
                continue
            joins = not survives
            lowered.append({"role": message.role if survives else "user", "content": text})
            if message.role == "tool" and survives:
                lowered[-1]["name"] = self._breaker.text(message.name, mark)
                call_id = self._format.prompt_id(message.call_id, message.name)
                lowered[-1]["tool_call_id"] = self._breaker.text(call_id, mark)
        return self._one_by_one(lowered) if self._survival.one_call else lowered

    def _answered(self, message: Message, messages: Sequence[Message], index: int) -> Message:
        """Return a generated message with the calls that the results after it answer.

        They may be calls that could not be read, which are none of its own. Its index is negative
        where it is none of the conversation's messages.
        """
        if index < 0 or message.ids is None or message.calls or not self._survival.needs_calls:
            return message
        followers = (messages[place] for place in range(index + 1, len(messages)))
        results = itertools.takewhile(lambda after: after.role == "tool", followers)
        calls = tuple(Call(result.call_id, result.name or "unknown", {}) for result in results)
        return msgspec.structs.replace(message, calls=calls)

    def _one_by_one(self, lowered: Lowered) -> Lowered:
        """Return the messages with one call each: the next call comes after the result of one."""
        result: Lowered = []
        waiting: list[dict[str, Any]] = []
        for message in lowered:
            if message["role"] == "tool" and waiting:
                result += (message, waiting.pop(0))
                continue
            result += waiting
            calls = message.get("tool_calls", [])
            waiting = [
                {"role": "assistant", "content": message["content"] and "", "tool_calls": [call]}
                for call in calls[1:]
            ]
            result.append({**message, "tool_calls": calls[:1]} if waiting else message)
        return result + waiting

    def _with_tool_prompt(self, conversation: Conversation) -> Iterator[tuple[int, Message]]:
        """Yield (index, message).

        Where the template knows no tools, the system text tells of them, and a worked example of
        each follows. The examples are of the prompt only: neither history nor transcript has them.
        """
        messages = conversation.messages
        leads = bool(messages) and messages[0].role == "system"
        text = self._format.system(conversation.tools, messages[0].text if leads else None)
        if text is not None:
            yield -1, Message(role="system", text=text)
            for tool in conversation.tools:
                yield from ((-1, message) for message in _worked_example(tool))
        for index, message in enumerate(messages):
            if index or text is None or not leads:
                yield index, message

    def _survives(self, message: Message, *, first: bool) -> bool:
        if message.role == "tool":
            return self._survival.results
        if message.role == "system":
            return self._survival.system if first else self._survival.system_inside
        return True

    def _content(self, message: Message, calls: tuple[Call, ...], survives: bool) -> str:
        """Return the text; a result says which call it answers where nothing else would."""
        shown = self._survival.names_results if survives else ""
        if message.role != "tool" or shown == "id":
            return message.text
        if survives and (len(calls) < 2 or self._survival.one_call):
            return message.text
        same = [call.call_id for call in calls if call.name == message.name]
        if shown == "name" and len(same) < 2:
            return message.text
        number = f" #{same.index(message.call_id) + 1}" if message.call_id in same[1:] else ""
        if len(same) > 1 and not number:
            number = " #1"
        label = f"{message.name}{number}: " if survives else f"[result of {message.name}{number}]\n"
        return label + message.text

    def _assistant(self, message: Message, index: int, mark: str, quote: str) -> dict[str, Any]:
        if message.ids is not None:
            return self._spliced(message, index, mark, quote)
        lowered: dict[str, Any] = {"role": "assistant"}
        text, reasoning = message.text, message.reasoning
        if message.calls and not self._survival.calls:
            calls = [wire.ToolCall(call.name, call.arguments) for call in message.calls]
            text = self._format.emit([wire.Text(message.text), *calls])
        elif message.calls:
            lowered["tool_calls"] = [self._call(call, mark) for call in message.calls]
            reasoning = "" if text and self._format.text_or_reasoning else reasoning
        lowered["content"] = self._breaker.text(text, mark)
        if not text and message.calls and self._survival.no_content:
            lowered["content"] = None
        if reasoning:
            lowered[self._format.reasoning_key] = self._breaker.text(reasoning, mark)
        return lowered

    def _spliced(self, message: Message, index: int, mark: str, quote: str) -> dict[str, Any]:
        """Return a message whose ids come in place of a key, in its text or in a call's arguments.

        What of it the template prints itself is what `splice` cuts away.
        """
        lowered: dict[str, Any] = {"role": "assistant", "content": text_key(index, quote)}
        if message.calls and self._survival.needs_calls:
            lowered["content"] = None if self._survival.no_content else ""
            keyed = [
                Call(call.call_id, call.name, {"x": text_key(index, quote)} if not i else {})
                for i, call in enumerate(message.calls)
            ]
            lowered["tool_calls"] = [self._call(call, mark) for call in keyed]
        if message.body_start:
            lowered[self._format.reasoning_key] = reasoning_key(index, quote)
        return lowered

    def _call(self, call: Call, mark: str) -> dict[str, Any]:
        arguments = self._breaker.value(call.arguments, mark)
        if self._survival.text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": self._breaker.text(self._format.prompt_id(call.call_id, call.name), mark),
            "type": "function",
            "function": {"name": self._breaker.text(call.name, mark), "arguments": arguments},
        }


def _worked_example(tool: wire.Tool) -> tuple[Message, ...]:
    said, arguments = worked_example(tool)
    return (
        Message(role="user", text=said),
        Message(role="assistant", calls=(Call("", tool.name, arguments),)),
        Message(role="tool", text=RESULT, name=tool.name),
        Message(role="assistant", text=ANSWER),
    )
