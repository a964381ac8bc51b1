"""Mutated outputs of every family: whatever comes, it is read, and the same however it is cut."""

import random

import msgspec
from scanned import TOOLS, Scanned, check_events

from agentserve import wire
from agentserve.sessions.toolformat import FORMATS
from agentserve.spoken import SPOKEN

# Families that take one call a message stop after it; here they go on.
FAMILIES = [msgspec.structs.replace(format, one_call=False) for format in FORMATS.values()]
NAMES = tuple(format.name for format in FAMILIES)
KINDS = ("text", "reasoning", "tool_call", "malformed_tool_call")
LITTER = (
    *sorted(SPOKEN),
    *("</function>", "<function=grep>", "<parameter=limit>", "</parameter>", "<|call|>"),
    *('<invoke name="ls">', "```json\n", "```", " to=functions.ls", "functions.grep:0"),
    *('{"name": "grep", "arguments": {', '"parameters": ', '{"name": ', "[grep(limit=1)]", "ls()"),
    *('"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", ";", "\n", " ", "<", ">", "|"),
    *("\x00", "\ud7ff", "😀", "e\u0301", "\u2028", "\ufdd0", "1e999", "-", "None", "true", "\\u12"),
)
WORDS = ("look", "a < b", "if x:\n    y()", 'say "so"', "日本", "{test1,test2", "</b>", "1", "")
# Characters looked at for each that there is: a declined opening is looked at again.
VISITS = 8


def output(source):
    """Return (format, text): what a model of a random family might say."""
    format = source.choice(FAMILIES)
    parts = []
    if format.reasoning and source.random() < 0.4:
        parts.append(source.choice(WORDS).join(format.reasoning))
    for _ in range(source.randrange(4)):
        if source.random() < 0.4:
            parts.append(source.choice(WORDS))
        parts.append(format.emit([_call(source) for _ in range(source.randrange(1, 3))]))
    return format, source.choice(("\n", "", "\n\n")).join(parts)


def _call(source):
    name = source.choice((*TOOLS, "no_such_tool"))
    values = (*WORDS, 0, -7, 1.5, True, None, [], {}, [1, {"a": "]"}], {"k": {"k": "}"}})
    keys = ("pattern", "limit", "whole", "paths", "options", "near", "text", "query", "x y")
    chosen = source.sample(keys, source.randrange(4))
    return wire.ToolCall(name, {key: source.choice(values) for key in chosen})


def mutate(text, source):
    """Return `text` with up to six things wrong."""
    for _ in range(source.randrange(7)):
        at, to = sorted(source.randrange(len(text) + 1) for _ in range(2))
        kind = source.randrange(6)
        if kind == 0:
            text = text[:at] + text[to:]
        elif kind == 1:
            text = text[:to] + text[at:to] + text[to:]
        elif kind == 2:
            text = text[:at]
        elif kind == 3:
            text = text[:at] + text[to:] + text[at:to]
        else:
            text = text[:at] + source.choice(LITTER) + text[at + (kind == 5) :]
    return text[:20_000]


def pieces(text, source):
    """Cut `text` at random places."""
    size = source.choice((1, 2, 5, 40))
    cut, at = [], 0
    while at < len(text):
        step = source.randrange(1, 2 * size)
        cut.append(text[at : at + step])
        at += step
    return cut


def check(seed, number):
    """Read one mutated output whole and in pieces; return what it was."""
    source = random.Random(f"{seed}:{number}")
    format, text = output(source)
    text = mutate(text, source)
    options = {
        "reason": source.choice(("stop", "length")),
        "parallel": source.random() < 0.8,
        "in_reasoning": source.random() < 0.2,
        "tools_on": source.random() < 0.9,
    }
    whole = Scanned(format, [text], **options)
    parts = Scanned(format, pieces(text, source), **options)
    assert parts.items == whole.items, (format.name, text, options)
    for scanned in (whole, parts):
        check_events(scanned)
        assert not scanned.scanner.stalled, (format.name, text, options)
    assert whole.scanner.visited <= VISITS * len(text) + 2000, (format.name, text)
    return format.name, [row[0] for row in whole.plain]
