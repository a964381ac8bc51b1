"""What a turn must reuse of the turn before it, from what the server says of a client's turns."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

BLOCK = 16  # tokens, of the scripted engine


class Step(msgspec.Struct, frozen=True):
    """The tokens of one turn.

    `least` is what it must have found in KV: the prompt and the answer of the turn before, without
    what was recomputed for a reason. The last generated token has no KV yet. `rewritten` are tokens
    of that answer for which the client sent another text; where that made another session of it,
    KV is shared by whole blocks, and `partial_block` tokens were computed again.
    """

    prompt: int
    output: int
    cached: int
    recomputed: dict[str, int]
    rewritten: int
    partial_block: int
    least: int

    @property
    def missing(self) -> int:
        """How many tokens were computed without a reason."""
        return max(0, self.least - self.cached)


def steps(turns: Sequence[dict[str, Any]]) -> list[Step]:
    """Return the steps of a client from its turns, in the order of its requests."""
    done: list[Step] = []
    before: dict[str, Any] = {}
    for turn in turns:
        usage = turn["usage"]
        recomputed = by_reason(usage["recomputed"])
        rewritten = partial = least = 0
        if done:
            rewritten = 0 if turn["previous"] == before["id"] else done[-1].output - 1
            known = done[-1].prompt + done[-1].output - 1 - rewritten
            if rewritten and turn["session"] != before["session"]:
                partial = known % BLOCK
            least = max(0, known - partial - sum(recomputed.values()))
        own = (usage["input_tokens"], usage["output_tokens"], usage["cached_tokens"])
        done.append(Step(*own, recomputed, rewritten, partial, least))
        before = turn
    return done


def by_reason(parts: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return recomputed tokens as {reason: tokens}."""
    counts: dict[str, int] = {}
    for part in parts:
        counts[part["reason"]] = counts.get(part["reason"], 0) + part["tokens"]
    return counts
