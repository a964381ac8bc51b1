"""Judges every event of a simulated engine against what it must be.

Each session has a reference, its token list: every token of every turn must be the one that
`oracle_next` gives for that list alone, each turn must end once and for a reason that holds, and
what is reused must have been computed in the same namespace.
"""

from collections import Counter
from dataclasses import dataclass, field

from agentserve.engine.messages import (
    Event,
    Finished,
    Inspected,
    Progress,
    Refused,
    Started,
    Stats,
    Submit,
    Tokens,
)
from agentserve.engine.oracle import oracle_logprobs, oracle_next
from agentserve.engine.simworld import Computed, ToyCompiler, World


class SimulationError(Exception):
    """The engine did what the reference does not allow."""


def expect(condition: bool, message: str) -> None:
    """Raise SimulationError with `message` unless `condition` holds."""
    if not condition:
        raise SimulationError(message)


@dataclass(slots=True)
class Reference:
    """What a session's tokens must be, and the turn that is open on it."""

    sequence: int
    generation: int
    namespace: str
    tokens: list[int] = field(default_factory=list)
    turn: Submit | None = None
    generated: int = 0
    cancelled: bool = False
    opened: bool = False  # the engine has a sequence of this generation
    started: bool = False  # the open turn was admitted
    held: bool = False  # the open turn was cancelled while it waited for its grammar
    before: tuple[list[int], int] = ([], 0)  # tokens and generation before the open turn


class Referee:
    """What is known of a world's sessions. Raises SimulationError at the first wrong event."""

    def __init__(self, world: World) -> None:
        self.sessions: dict[int, Reference] = {}
        self.open: dict[int, Reference] = {}  # by turn
        self.expected: list[tuple[int, int, str]] = []  # turn, sequence, code of each refusal
        self.ended = -1  # the sequence of the turn that ended last
        self.counts: Counter[str] = Counter()
        self._world = world
        self._computed = Computed()

    def see(self, event: Event) -> None:
        """Judge one event."""
        if isinstance(event, Refused) and event.turn in self.open:
            self._see_no_grammar(event)
        elif isinstance(event, Refused):
            expect(bool(self.expected), f"an unexpected refusal: {event}")
            expected = self.expected.pop(0)
            expect((event.turn, event.sequence, event.code) == expected, f"{event}: {expected}")
        elif isinstance(event, Tokens):
            self._see_tokens(event)
        elif isinstance(event, Finished):
            self._see_finished(event)
        elif isinstance(event, Started):
            session = self._session(event.turn)
            session.started = session.opened = True
            total = len(session.tokens)
            others = (other for other in self.open.values() if other is not session)
            self._computed.update((other.namespace, other.tokens) for other in others)
            reused = session.tokens[: event.cached]
            expect(
                self._computed.has(session.namespace, reused),
                f"INV-04: {event}: nobody in this namespace has computed that prefix",
            )
            expect(event.cached + event.computed == total, f"{event} for {total} tokens")
            expect(event.computed >= 1 and 0 <= event.host <= event.cached, str(event))
            expect(event.lost < event.computed, str(event))
            self.counts.update(cached=event.cached, computed=event.computed)
            self.counts["from host"] += event.host
        elif isinstance(event, Progress):
            self._session(event.turn)
            expect(0 < event.done <= event.total, str(event))
        elif isinstance(event, Inspected):
            for each in event.sequences:
                expect(max(each.device, each.host) <= each.tokens, str(each))
        else:
            expect(isinstance(event, Stats), f"an unexpected event: {event}")

    def _see_no_grammar(self, event: Refused) -> None:
        """Judge the end of a turn that waited for its grammar: nothing has changed."""
        session = self._session(event.turn)
        spec = (session.turn and session.turn.grammar) or ""
        kind = spec.partition(":")[0].partition("/")[0]
        slow = kind in ("even", "breaks") and self._world.grammar_s < ToyCompiler.LONGEST_S
        expect(event.code == "bad_grammar" and not session.started, f"{event} of {session.turn}")
        expect(slow or kind in ("hang", "die", "bad"), f"a good grammar was refused: {event}")
        expect(slow or kind != "hang" or "longer" in event.message, str(event))
        del self.open[event.turn]
        session.turn = None
        session.tokens, session.generation = session.before
        self.counts["ended without a grammar"] += 1

    def _see_tokens(self, event: Tokens) -> None:
        session = self._session(event.turn)
        asked = session.turn.sampling.logprobs if session.turn is not None else None
        many = 0 if asked is None else len(event.tokens)
        expect(len(event.logprobs) == many, f"{event}: {many} log probabilities are asked for")
        for place, token in enumerate(event.tokens):
            if asked is not None:
                hashed = oracle_next(session.tokens, self._world.vocab_size)
                right = oracle_logprobs(hashed, token, asked, self._world.vocab_size)
                expect(event.logprobs[place] == right, f"{event}: not {right}")
                self.counts["log probabilities"] += 1
            expected = self._next_token(session)
            if token != expected:
                where = f"turn {event.turn}, token {len(session.tokens)}"
                raise SimulationError(f"{where}: {token} instead of {expected}")
            session.tokens.append(token)
            session.generated += 1

    def _see_finished(self, event: Finished) -> None:
        session = self._session(event.turn)
        command = session.turn
        del self.open[event.turn]
        session.turn = None
        self.ended = session.sequence
        self.counts["turns"] += 1
        self.counts[f"ended by {event.reason}"] += 1
        self._computed.update([(session.namespace, session.tokens)])
        if session.held:
            kept = command is not None and event.log_length == command.keep
            expect(kept and event.reason == "cancelled", f"wrong end: {event} of {command}")
            self.counts["cancelled without a grammar"] += 1
            session.tokens, session.generation = session.before  # nothing has changed
            session.held = False
            return
        session.started = False
        length = len(session.tokens)
        expect(command is not None and event.log_length == length, f"{event}: {length} tokens")
        expect(event.kv_length <= event.log_length, str(event))
        if command is None:
            return
        allowed = {
            "stop": event.stop_id in command.stop_ids
            and not event.kv_length < length
            and event.stop_id == self._next_token(session, command),
            "length": session.generated == command.max_tokens > 0,
            "context": self._full(length),
            "prefilled": command.max_tokens == 0
            and (event.kv_length == length or command.background),
            "cancelled": session.cancelled,
            "error": "finite" in event.message or (command.grammar or "").startswith("breaks"),
        }
        expect(allowed.get(event.reason, False), f"wrong end: {event} of {command}")

    def _next_token(self, session: Reference, command: Submit | None = None) -> int:
        command = command or session.turn
        if command is None:
            raise SimulationError("tokens came without a turn")
        forced = len(command.force) // 4
        if session.generated < forced:
            start = 4 * session.generated
            return int.from_bytes(command.force[start : start + 4], "little")
        token = oracle_next(session.tokens, self._world.vocab_size)
        if command.grammar is not None and token % 2:
            token = (token + 1) % self._world.vocab_size
        return token

    def _session(self, turn: int) -> Reference:
        expect(turn in self.open, f"INV-08: an event for turn {turn}, which is not open")
        return self.open[turn]

    def _full(self, length: int) -> bool:
        blocks = -(-length // self._world.block_size)
        return length >= self._world.max_context or blocks > self._world.num_blocks
