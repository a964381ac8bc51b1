"""What the engine holds of a session, as the server believes it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec

from agentserve.engine.messages import Fork, Residency, Submit
from agentserve.engine.plan import SamplingParams, pack
from agentserve.sessions.tree import common_prefix
from agentserve.wire import Recomputed


class SubmitOptions(msgspec.Struct, frozen=True):
    """How a turn generates, apart from its tokens."""

    max_tokens: int
    stop_ids: list[int]
    sampling: SamplingParams
    grammar: str | None = None
    said: int = 0  # of the prompt's last tokens, which the grammar has seen
    anew: bool = False  # the grammar may begin after them
    force: bytes = b""
    background: bool = False


@dataclass
class Ahead:
    """What was prefilled of a session before the turn that feeds it."""

    wanted: array[int] = field(default_factory=lambda: array("i"))  # the log that is to have KV
    turn: int = 0  # the prefill in flight, as the engine names it; 0 when there is none
    reported: int = 0  # tokens of it that were computed so far
    computed: int = 0  # tokens computed for `wanted`, by this prefill and earlier ones
    restarted: bool = False  # the KV had been lost with an engine before
    lost: list[Recomputed] = field(default_factory=list)  # tokens of `computed` that had had KV
    preempted: int = 0  # tokens that were computed once more because the prefill was preempted

    def take(self, log: array[int]) -> Ahead:
        """Hand what was computed to a turn that feeds `log`; nothing when it went another way."""
        taken = Ahead()
        if len(self.wanted) == common_prefix(self.wanted, log):
            taken.computed, taken.restarted = self.computed, self.restarted
            taken.lost, taken.preempted = self.lost, self.preempted
        self.wanted, self.computed, self.restarted = array("i"), 0, False
        self.lost, self.preempted = [], 0
        return taken


class Mirror:
    """The engine's log of one sequence.

    A submit keeps the common prefix of this mirror and the wanted log. After a restart of the
    engine the mirror is empty: the next submit sends every token under a new generation.
    """

    def __init__(self, sequence: int, namespace: str) -> None:
        self.sequence = sequence
        self.generation = 0
        self.tokens: array[int] = array("i")
        self.kv_length = 0
        self.lost = False  # the KV was lost with an engine since the last submit
        self.residency: Residency | None = None  # where it is, by the engine's last answer
        self._namespace = namespace
        self._incarnation = 0
        self._undo: tuple[int, array[int], int] = (0, array("i"), 0)

    def forget(self) -> None:
        """Note that the engine no longer has the sequence."""
        self.lost = self.lost or bool(self.tokens)
        self.tokens = array("i")
        self.kv_length = 0
        self.residency = None

    def sync(self, incarnation: int) -> None:
        """Forget the sequence when another engine is there than the last time."""
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self.forget()

    def submit(self, turn: int, log: array[int], options: SubmitOptions) -> Submit:
        """Return the command that makes the engine's log equal `log` and generates."""
        keep = common_prefix(self.tokens, log)
        if keep == 0:
            self.generation += 1
        self._undo = (keep, self.tokens[keep:], self.kv_length)
        del self.tokens[keep:]
        tail = log[keep:]
        self.tokens.extend(tail)
        self.kv_length = min(self.kv_length, keep)
        return Submit(
            turn=turn,
            sequence=self.sequence,
            generation=self.generation,
            keep=keep,
            tokens=pack(tail),
            namespace=self._namespace,
            max_tokens=options.max_tokens,
            stop_ids=options.stop_ids,
            sampling=options.sampling,
            grammar=options.grammar,
            said=options.said,
            anew=options.anew,
            force=options.force,
            background=options.background,
        )

    def reach(self, log: array[int]) -> int:
        """Return how many leading tokens of `log` have KV here."""
        return min(common_prefix(self.tokens, log), self.kv_length)

    def refused(self) -> None:
        """Take back the last submit, which the engine did not take: it changed nothing there."""
        keep, tail, self.kv_length = self._undo
        self.tokens[keep:] = tail

    def settle(self, log_length: int, kv_length: int) -> None:
        """Take the log with which the engine ended a turn."""
        del self.tokens[log_length:]
        self.kv_length = kv_length
        self.lost = False

    def fork_into(self, other: Mirror, log: array[int]) -> Fork | None:
        """Return the command that opens `other` with what both share with `log`, if anything."""
        keep = self.reach(log)
        if keep == 0:
            return None
        other.generation = 1
        other._incarnation = self._incarnation
        other.tokens = log[:keep]
        other.kv_length = keep
        return Fork(self.sequence, self.generation, other.sequence, other.generation, keep)


@dataclass(eq=False)
class Prepared:
    """A second sequence of a session: the log that its next user message will give."""

    mirror: Mirror
    wanted: array[int]
    turn: int = 0  # the prefill in flight, as the engine names it; 0 when there is none
    reached: int = 0  # tokens that have KV, by the last report of the prefill in flight
    done: int = 0  # tokens of them that it computed
    computed: int = 0  # tokens computed by this prefill and earlier ones
