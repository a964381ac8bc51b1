"""Agents' conversations by their sizes and waits alone: what the simulated sessions do.

A conversation is a list of requests; a request says how many tokens of its session's log it keeps,
how many it appends, how many it generates, and how long the client took before it. The real ones
come from Claude Code (callanjfox/kv-cache-tester, Apache-2.0), logged with 64-token prefix hashes.
"""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """One turn. Sizes in tokens; `wait_s` is the client's delay since the last turn ended."""

    kept: int
    new: int
    output: int
    wait_s: float
    after_tool: bool  # the delay was a tool's; else a person's


Conversation = tuple[Request, ...]


def load(path: Path, max_context: int, max_wait_s: float) -> list[Conversation]:
    """Return the logged conversations that never exceed `max_context` tokens.

    Waits are cut to `max_wait_s`. Sub-agents, which are conversations of their own, are left out.
    """
    conversations = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            logged = [r for r in json.loads(line)["requests"] if r["type"] != "subagent"]
            if all(r["in"] + r["out"] <= max_context for r in logged):
                conversations.append(tuple(_requests(logged, max_wait_s)))
    return conversations


def _requests(logged: list[dict[str, Any]], max_wait_s: float) -> Iterator[Request]:
    last: dict[str, Any] | None = None
    for row in logged:
        kept = _kept(last, row) if last is not None else 0
        yield Request(
            kept=kept,
            new=row["in"] - kept,
            output=max(1, row["out"]),
            wait_s=min(max_wait_s, row.get("think_time", 0.0)) if last is not None else 0.0,
            after_tool=last is not None and last.get("stop") != "end_turn",
        )
        last = row


def _kept(last: dict[str, Any], row: dict[str, Any]) -> int:
    """Return how many tokens of the last request's prompt and output `row` goes on from."""
    common = 0
    for ours, theirs in zip(last["hash_ids"], row["hash_ids"], strict=False):
        if ours != theirs:
            break
        common += 1
    if common < len(last["hash_ids"]) - 1:  # the last block may be a partly filled one
        return min(64 * common, row["in"] - 1)
    return min(last["in"] + last["out"], row["in"] - 1)


def draw(rng: random.Random, conversations: list[Conversation]) -> Iterator[Conversation]:
    """Yield one agent's conversations without end.

    The first is met somewhere in its middle, as in a system that has run for long: each logged
    request is equally likely to be the first, and what came before it is then its prompt.
    """
    first = rng.choices(conversations, [len(c) for c in conversations])[0]
    start = rng.randrange(len(first))
    head = first[start]
    yield (Request(0, head.kept + head.new, head.output, 0.0, False), *first[start + 1 :])
    while True:
        yield rng.choice(conversations)
