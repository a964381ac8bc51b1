"""Every shape that an answer can have in a stream, as scripts for a model that thinks (Qwen3).

An answer is due when the user says the name of its shape, as often as that is.
"""

from dataclasses import dataclass, field
from typing import Any

LONG = "Ünïcödé, 🙂🙂, 你好, and\nlines.\n" * 5
NESTED = {"city": "Tromsø", "days": 2.5, "more": {"list": [1, None, True], "quote": '"\\'}}


@dataclass(frozen=True)
class Shape:
    """One answer, and how a client sees it.

    `limit` is the number of tokens after which the answer is cut, `stop` a string that ends it.
    """

    name: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    raw: str | None = None
    limit: int = 1000
    stop: str | None = None
    end: str = "stop"

    @property
    def answer(self) -> dict[str, Any]:
        """The answer of the script."""
        due: dict[str, Any] = {"when": f"shape: {self.name}.", "repeat": True}
        if self.raw is not None:
            return due | {"raw": self.raw}
        parts = [{"type": "reasoning", "text": self.reasoning}] if self.reasoning else []
        parts += [{"type": "text", "text": self.text}] if self.text else []
        parts += [
            {"type": "tool_call", "name": "get_weather", "arguments": call} for call in self.calls
        ]
        return due | {"output": parts}

    @property
    def question(self) -> str:
        """What the user says to get it."""
        return f"shape: {self.name}."


@dataclass
class Seen:
    """What a client has accumulated of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    end: str = ""
    prompt: int = 0
    cached: int = 0
    output: int = 0


def expected(shape: Shape) -> Seen:
    """Return what has to be accumulated of a shape that is not cut; tokens are left at zero."""
    return Seen(
        shape.text, shape.reasoning, [("get_weather", call) for call in shape.calls], shape.end
    )


WHOLE = [
    Shape("text", "Hello."),
    Shape("long text", LONG),
    Shape("reasoning", "555", "37 times 15 is 555."),
    Shape("call", calls=({"city": "Oslo"},), end="calls"),
    Shape("call without arguments", calls=({},), end="calls"),
    Shape("nested arguments", calls=(NESTED,), end="calls"),
    Shape("three calls", calls=({"city": "A"}, {"city": "B"}, {"city": "C"}), end="calls"),
    Shape("text and calls", "I look.", calls=({"city": "A"}, NESTED), end="calls"),
    Shape("all", "I look.", "Which?\nBoth.", ({"city": "A"}, {"city": "B"}), end="calls"),
]
CUT = [
    Shape("cut text", LONG, limit=9, end="length"),
    Shape("cut reasoning", "555", LONG, limit=9, end="length"),
    Shape("cut call", calls=(NESTED,), limit=14, end="length"),
    Shape("stop string", "One, two, three.", stop=" three"),
    Shape("nothing", raw=""),
    Shape(
        "call that cannot be read", raw='<tool_call>\n{"name": "get_weather", "argu\n</tool_call>'
    ),
    Shape("talk of calls", "To call, write <tool_call> and a name."),
]
SHAPES = WHOLE + CUT
