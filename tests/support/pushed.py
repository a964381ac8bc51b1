"""Output streams that are fed with the ids of a text."""

import itertools

import text_models

from agentserve import wire
from agentserve.sessions.output import OutputStream
from agentserve.sessions.toolformat import JSON

TOOLS = {
    tool.name: tool
    for tool in (
        wire.Tool(
            "grep",
            {
                "type": "object",
                "properties": {
                    "pattern": {"type": "string"},
                    "limit": {"type": "integer"},
                    "paths": {"type": "array"},
                },
                "required": ["pattern"],
            },
        ),
        wire.Tool("ls", {"type": "object"}),
    )
}
GREP = '{"name": "grep", "arguments": {"pattern": "a b", "limit": 3}}'
LS = '{"name": "ls", "arguments": {}}'


def open_stream(format, name, **options):
    counts = itertools.count(), itertools.count()
    return OutputStream(
        text_models.tokenizer(name),
        format,
        TOOLS,
        mint_call=lambda: f"call_{next(counts[0])}",
        mint_item=lambda: f"item_{next(counts[1])}",
        **options,
    )


def feed(format, text, *, step=1, reason="stop", name=None, logprobs=lambda ids: [], **options):
    """Return (stream, events, ids) of `text`, pushed `step` ids at a time."""
    name = name or ("smollm2" if format is JSON else "qwen3")
    stream = open_stream(format, name, **options)
    ids = text_models.tokenizer(name).encode_text(text)
    events, beside = [], logprobs(ids)
    for start in range(0, len(ids), step):
        events += stream.push(ids[start : start + step], beside[start : start + step])
    events += stream.finish(stream.stopped or reason)
    return stream, events, ids
