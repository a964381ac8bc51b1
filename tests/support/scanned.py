"""What the scanner makes of text that comes in pieces, and whether its events tell the same."""

import itertools
import json

import msgspec

from agentserve import wire
from agentserve.sessions.emitter import Emitter
from agentserve.sessions.scan import Scanner

STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def tool(name, **properties):
    return wire.Tool(name, {"type": "object", "properties": properties})


TOOLS = {
    tool.name: tool
    for tool in (
        tool(
            "grep",
            pattern=STRING,
            limit=INTEGER,
            whole={"type": "boolean"},
            paths={"type": "array"},
            options={"type": "object"},
            near={"anyOf": [INTEGER, {"type": "null"}]},
        ),
        tool("ls"),
        tool("write", path=STRING, text=STRING),
        tool("brave_search", query=STRING),
    )
}


class Scanned:
    """One scan: items, events, the scanner."""

    def __init__(
        self, format, pieces, *, reason="stop", parallel=True, tools=TOOLS, tools_on=True, **options
    ):
        counts = itertools.count(), itertools.count()
        emitter = Emitter(
            tools,
            lambda: f"call_{next(counts[0])}",
            lambda: f"item_{next(counts[1])}",
            parallel and not format.one_call,
        )
        self.scanner = Scanner(format, tools, emitter, tools_on=tools_on, **options)
        self.events = []
        for piece in pieces:
            self.scanner.push(piece)
            self.events += emitter.take_events()
        if emitter.end is None:
            self.scanner.finish("unfinished" if reason == "stop" else "truncated")
        emitter.close()
        self.events += emitter.take_events()
        self.items = emitter.items

    @property
    def plain(self):
        """The items as rows: (type, what it says)."""
        return [plain(item) for item in self.items]


def plain(item):
    if isinstance(item, wire.ToolCallOut):
        return ("tool_call", item.name, item.arguments)
    if isinstance(item, wire.MalformedToolCallOut):
        return ("malformed_tool_call", item.name, item.error)
    return (msgspec.to_builtins(item)["type"], item.text)


def check_events(scanned):
    """Each item starts, grows by its deltas, and is done, in order; calls have ids of their own."""
    done, grown = [], ""
    for event in scanned.events:
        assert event.index == len(done)
        if isinstance(event, wire.ItemStarted):
            grown = ""
        elif isinstance(event, wire.ItemDone):
            if isinstance(event.item, wire.TextOut | wire.ReasoningOut):
                assert event.item.text == grown
            elif isinstance(event.item, wire.ToolCallOut):
                assert json.loads(grown) == event.item.arguments
            else:
                assert isinstance(event.item, wire.MalformedToolCallOut)
                assert event.item.error
            done.append(event.item)
        else:
            grown += event.delta
    assert done == scanned.items
    ids = [item.call_id for item in done if hasattr(item, "call_id")]
    assert len(ids) == len(set(ids))
