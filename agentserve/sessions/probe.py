"""What survives a chat template: found out when a model is loaded, by rendering sentinels."""

from typing import Any

import msgspec

from agentserve.sessions.template import ChatTemplate, TemplateRefused

_SENTINEL, _ARGUMENT, _RESULT_NAME, _RESULT_ID = "Zq7text", "Zq7argument", "Zq7name", "Zq7callid1"
_USER = {"role": "user", "content": "x"}
_CALL = {
    "id": "Zq7callid0",
    "type": "function",
    "function": {"name": "f", "arguments": {"key": _ARGUMENT}},
}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "x", "parameters": {"type": "object"}},
}


class Survival(msgspec.Struct, frozen=True):
    """Which kinds of content come out of a template, and whether results name their call."""

    system: bool  # as the first message
    system_inside: bool
    calls: bool
    reasoning: bool
    results: bool
    names_results: bool

    def warnings(self) -> list[str]:
        """Return one line for each kind that has to be rendered as a user message."""
        kinds = {
            "a system message": self.system,
            "a system message inside the conversation": self.system_inside,
            "a tool result": self.results,
        }
        return [
            f"the chat template drops or refuses {kind}: it is rendered as a user message"
            for kind, survives in kinds.items()
            if not survives
        ]


def probe(template: ChatTemplate, *, native: bool) -> Survival:
    """Render each kind of item with a sentinel and look for it; `native` templates take calls.

    Raises ValueError when not even a user message and an assistant message survive.
    """
    said = {"role": "assistant", "content": _SENTINEL}
    if not (_finds(template, [_message("user")]) and _finds(template, [_USER, said, _USER])):
        raise ValueError("the model's chat template drops user or assistant messages")
    text = {"role": "assistant", "content": "y"}
    system = _message("system")
    thought = {**text, "reasoning_content": _SENTINEL}
    calls = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {**_message("tool"), "name": _RESULT_NAME, "tool_call_id": _RESULT_ID}
    tools = [_TOOL] if native else None
    results = _finds(template, [_USER, text, result], tools)
    return Survival(
        system=_finds(template, [system, _USER]),
        system_inside=_finds(template, [_USER, text, system, _USER]),
        calls=native and results and _finds(template, [_USER, calls, result], tools, _ARGUMENT),
        reasoning=_finds(template, [_USER, thought, result if results else _USER], tools),
        results=results,
        names_results=any(
            _finds(template, [_USER, text, result], tools, wanted)
            for wanted in (_RESULT_NAME, _RESULT_ID)
        ),
    )


def _message(role: str) -> dict[str, Any]:
    return {"role": role, "content": _SENTINEL}


def _finds(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    wanted: str = _SENTINEL,
) -> bool:
    try:
        return wanted in template.render(messages, tools=tools, generation_prompt=True)
    except TemplateRefused:
        return False
