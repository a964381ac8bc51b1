"""What commands do: sequences open, fork and close, turns begin and are cancelled.

Commands come between two steps. One that is refused changes nothing.
"""

from array import array

from agentserve.clock import Clock
from agentserve.engine.grammars import Compiled, NotCompiled
from agentserve.engine.ledger import Ledger
from agentserve.engine.messages import (
    Cancel,
    Close,
    Command,
    Fork,
    Hint,
    Inspect,
    Inspected,
    Promote,
    Refused,
    Submit,
)
from agentserve.engine.plan import RunnerInfo
from agentserve.engine.report import residency_of
from agentserve.engine.rules import (
    Refusal,
    SubmitRules,
    grammar_refusal,
    new_matcher,
    unknown_sequence,
)
from agentserve.engine.scheduler import Scheduler
from agentserve.engine.sequence import Sequence, Turn
from agentserve.kv.chains import KvCache


class Commands:
    """Applies commands to one engine's ledger, scheduler and KV."""

    def __init__(
        self,
        info: RunnerInfo,
        rules: SubmitRules,
        ledger: Ledger,
        scheduler: Scheduler,
        kv: KvCache,
        clock: Clock,
    ) -> None:
        self._info = info
        self._rules = rules
        self._ledger = ledger
        self._scheduler = scheduler
        self._grammars = ledger.grammars
        self._kv = kv
        self._clock = clock
        self._policy = kv.residency.policy
        self._arrivals = 0

    def apply(self, command: Command) -> None:
        """Take a command. What it breaks becomes a Refused event; it never raises."""
        try:
            if isinstance(command, Submit):
                self._submit(command)
            elif isinstance(command, Fork):
                self._fork(command)
            elif isinstance(command, Close):
                self._ledger.close(command.sequence)
            elif isinstance(command, Cancel):
                self._ledger.cancel(command.turn)
            elif isinstance(command, Inspect):
                self._inspect(command)
            elif command.sequence in self._ledger.sequences:
                self._advise(self._ledger.sequences[command.sequence], command)
        except Refusal as refusal:
            self._refuse(command, refusal)

    def resume(self) -> None:
        """Take up the submits whose grammars the compiler has answered."""
        for held in self._grammars.advance():
            try:
                if isinstance(held.outcome, NotCompiled):
                    raise grammar_refusal(held.outcome)
                self._open(held.command, held.outcome, held.since, held=True)
            except Refusal as refusal:
                self._refuse(held.command, refusal)

    def _refuse(self, command: Command, refusal: Refusal) -> None:
        turn = command.turn if isinstance(command, Submit) else -1
        sequence = command.into if isinstance(command, Fork) else _sequence_of(command)
        self._ledger.events.append(Refused(turn, sequence, refusal.code, str(refusal)))

    def _submit(self, command: Submit) -> None:
        if command.grammar is None:
            self._open(command, None, self._clock.monotonic())
            return
        try:
            compiled = self._grammars.find(command.grammar)
        except NotCompiled as error:
            self._check(command)
            raise grammar_refusal(error) from None
        if compiled is not None:
            self._open(command, compiled, self._clock.monotonic())
            return
        self._check(command)
        self._grammars.hold(command)

    def _check(
        self, command: Submit, *, held: bool = False
    ) -> "tuple[Sequence | None, array[int], array[int]]":
        """Return the sequence that the submit goes on, if any, its tokens, and the forced ones.

        Raises Refusal.
        """
        tokens, forced = self._rules.ids(command.tokens), self._rules.ids(command.force)
        sequence = self._target(command)
        keep = command.keep if sequence is not None else 0
        # One that was held was counted when it came.
        waiting = 0 if held else len(self._scheduler.waiting) + len(self._grammars)
        self._rules.admissible(command, keep + len(tokens), waiting)
        return sequence, tokens, forced

    def _open(
        self, command: Submit, compiled: Compiled | None, since: float, *, held: bool = False
    ) -> None:
        sequence, tokens, forced = self._check(command, held=held)
        keep = command.keep if sequence is not None else 0
        prompt = keep + len(tokens)
        kept = sequence.log[prompt - command.said : keep] if sequence is not None else ()
        said = [*kept, *tokens][-command.said :] if command.said else ()
        matcher = new_matcher(compiled, said, anew=command.anew)
        if sequence is None:
            before = self._ledger.sequences.get(command.sequence)
            self._ledger.close(command.sequence)
            chain = self._kv.open(command.namespace)
            sequence = Sequence(command.sequence, command.generation, command.namespace, chain)
            sequence.service = before.service if before is not None else 0.0
            self._ledger.sequences[sequence.id] = sequence
        elif sequence.waits and command.max_tokens:
            sequence.waits = False
            self._policy.learn(sequence.chain.idle, since)
        self._kv.cut(sequence.chain, keep)
        del sequence.log[keep:]
        sequence.log.extend(tokens)
        self._arrivals += 1
        turn = Turn(
            command=command,
            sequence=sequence,
            arrival=self._arrivals,
            submitted_at=since,
            prompt_length=prompt,
            limit=self._rules.limit(command, prompt),
            forced=forced,
            stop_ids=frozenset(command.stop_ids),
            matcher=matcher,
        )
        sequence.turn = turn
        self._ledger.turns[turn.id] = turn
        self._scheduler.add(turn)

    def _target(self, command: Submit) -> Sequence | None:
        """Return the sequence that the submit goes on, or None when it opens one."""
        sequence = self._ledger.sequences.get(command.sequence)
        if self._is_busy(command.sequence):
            raise Refusal("busy", f"sequence {command.sequence} has a running turn")
        if command.turn in self._ledger.turns or command.turn in self._grammars:
            raise Refusal("invalid", f"turn {command.turn} is already open")
        if command.keep == 0:
            return None
        if command.keep < 0 or command.max_tokens < 0:
            raise Refusal("invalid", "keep and max_tokens are not negative")
        if (
            sequence is None
            or sequence.generation != command.generation
            or sequence.namespace != command.namespace
            or command.keep > len(sequence.log)
        ):
            raise unknown_sequence(command)
        return sequence

    def _fork(self, command: Fork) -> None:
        source = self._ledger.sequences.get(command.sequence)
        if (
            source is None
            or source.generation != command.generation
            or not 0 <= command.keep <= len(source.log)
        ):
            raise unknown_sequence(command)
        if command.into == command.sequence:
            raise Refusal("invalid", "a sequence cannot be forked into itself")
        if self._is_busy(command.into):
            raise Refusal("busy", f"sequence {command.into} has a running turn")
        self._ledger.close(command.into)
        chain = self._kv.fork(source.chain, command.keep)
        chain.idle.since = self._clock.monotonic()
        self._ledger.sequences[command.into] = Sequence(
            command.into,
            command.into_generation,
            source.namespace,
            chain,
            source.log[: command.keep],
            service=source.service,
        )

    def _is_busy(self, number: int) -> bool:
        sequence = self._ledger.sequences.get(number)
        return self._grammars.holds(number) or (sequence is not None and sequence.turn is not None)

    def _advise(self, sequence: Sequence, command: Hint | Promote) -> None:
        residency, idle = self._kv.residency, sequence.chain.idle
        if isinstance(command, Promote):
            residency.promote(sequence.chain, begin=command.begin)
            return
        idle.tools, idle.expected_s = tuple(command.tools), command.expected_s
        idle.hinted_at, idle.kv = self._clock.monotonic(), command.kv
        residency.hint(sequence.chain)

    def _inspect(self, command: Inspect) -> None:
        known = [
            self._ledger.sequences[n] for n in command.sequences if n in self._ledger.sequences
        ]
        where = [residency_of(sequence, self._info) for sequence in known]
        self._ledger.events.append(Inspected(command.number, where))


def _sequence_of(command: Command) -> int:
    return command.sequence if isinstance(command, Submit | Close | Hint | Promote) else -1
