"""What survives a chat template: found out when a model is loaded, by rendering sentinels."""

import json
from typing import Any, Literal

import msgspec

from agentserve.sessions.template import ChatTemplate, TemplateRefused

_SENTINEL, _ARGUMENT, _SECOND = "Zq7text", "Zq7argument", "Zq7second"
_NAME, _IDS = "Zq7name", ("Zq7call00", "Zq7call01")
_USER = {"role": "user", "content": "x"}
_TEXT = {"role": "assistant", "content": "y"}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "x", "parameters": {"type": "object"}},
}
Results = Literal["", "name", "id"]


class Survival(msgspec.Struct, frozen=True):
    """Which kinds of content come out of a template, and in which shape it takes them.

    `names_results`: what a result's text shows of the call that it answers. `needs_calls`: results
    are taken only after an assistant message with calls. `text_arguments`, `no_content`: arguments
    are taken as JSON text, calls only in a message whose content is null. `one_call`: a message has
    one call.
    """

    system: bool  # as the first message
    system_inside: bool
    calls: bool
    reasoning: bool
    results: bool
    names_results: Results = ""
    needs_calls: bool = False
    text_arguments: bool = False
    no_content: bool = False
    one_call: bool = False

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


def probe(template: ChatTemplate, *, native: bool, reasoning_key: str) -> Survival:
    """Render each kind of item with a sentinel and look for it; `native` templates take calls.

    `reasoning_key` is the template's name for reasoning. Raises ValueError when not even a user
    message and an assistant message survive.
    """
    said = {"role": "assistant", "content": _SENTINEL}
    if not (_finds(template, [_message("user")]) and _finds(template, [_USER, said, _USER])):
        raise ValueError("the model's chat template drops user or assistant messages")
    system = _message("system")
    tools = [_TOOL] if native else None
    result = _result(0)
    shape = _shape(template, tools) if native else None
    # A loop's next answer must be taken too: some want roles to alternate, but for calls.
    plain = _finds(template, [_USER, _TEXT, result], tools) and (
        shape is None
        or _finds(template, [_USER, _TEXT, result, _TEXT, _USER], tools)
        or not _finds(template, [_USER, _called(*shape), result, _TEXT, _USER], tools)
    )
    before = _TEXT if plain or shape is None else _called(*shape)
    results = plain or (shape is not None and _finds(template, [_USER, before, result], tools))
    thought = {**(_TEXT if plain or not results else before), reasoning_key: _SENTINEL}
    after = {**result, "content": "z"} if results else _USER
    return Survival(
        system=_finds(template, [system, _USER]),
        system_inside=_finds(template, [_USER, _TEXT, system, _USER]),
        calls=shape is not None and results,
        reasoning=_finds(template, [_USER, thought, after], tools),
        results=results,
        names_results=_names(template, [_USER, before], tools),
        needs_calls=results and not plain,
        text_arguments=shape is not None and shape[0],
        no_content=shape is not None and shape[1],
        one_call=shape is not None and results and not _takes_two(template, tools, *shape),
    )


def _shape(template: ChatTemplate, tools: list[dict[str, Any]] | None) -> tuple[bool, bool] | None:
    """Return (arguments as text, content null) as the template takes them; None for neither."""
    for shape in ((False, False), (True, False), (False, True), (True, True)):
        for result in (_result(0), _USER):
            if _finds(template, [_USER, _called(*shape), result], tools, _ARGUMENT):
                return shape
    return None


def _takes_two(
    template: ChatTemplate,
    tools: list[dict[str, Any]] | None,
    text_arguments: bool,
    no_content: bool,
) -> bool:
    calls = _called(text_arguments, no_content, (_ARGUMENT, _SECOND))
    messages = [_USER, calls, _result(0), _result(1)]
    return all(_finds(template, messages, tools, wanted) for wanted in (_ARGUMENT, _SECOND))


def _names(
    template: ChatTemplate, before: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> Results:
    """Return what the render shows of a result's call that it did not show without the result."""
    try:
        whole = template.render([*before, _result(0)], tools=tools, generation_prompt=True)
        shown = template.render(before, tools=tools)
    except TemplateRefused:
        return ""
    if whole.count(_IDS[0]) > shown.count(_IDS[0]):
        return "id"
    return "name" if whole.count(_NAME) > shown.count(_NAME) else ""


def _called(
    text_arguments: bool, no_content: bool, values: tuple[str, ...] = (_ARGUMENT,)
) -> dict[str, Any]:
    """Return an assistant message with calls, an argument each."""
    arguments: list[Any] = [{"key": value} for value in values]
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": _NAME, "arguments": json.dumps(a) if text_arguments else a},
        }
        for call_id, a in zip(_IDS, arguments, strict=False)
    ]
    return {"role": "assistant", "content": None if no_content else "", "tool_calls": calls}


def _result(number: int) -> dict[str, Any]:
    return {**_message("tool"), "name": _NAME, "tool_call_id": _IDS[number]}


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
