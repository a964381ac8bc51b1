"""The engine: commands in, one step at a time, events out.

One step is: plan, launch, mask, sample, collect, settle, commit. The loop is the one owner of KV
residency: copies are planned and settled here and nowhere else. Everything that can go wrong in
one turn (its grammar, a non-finite row) ends that turn and no other.
"""

from typing import Any

from agentserve.clock import Clock
from agentserve.config import EngineSettings
from agentserve.engine.costs import CostModel
from agentserve.engine.messages import (
    Cancel,
    Close,
    Command,
    Event,
    Finished,
    Fork,
    Hint,
    Inspect,
    Inspected,
    Progress,
    Promote,
    Refused,
    Started,
    Stats,
    Submit,
    Tokens,
)
from agentserve.engine.plan import Runner, StepResult
from agentserve.engine.report import Counters, count_lost, residency_of, stats_of
from agentserve.engine.rules import GrammarFactory, Refusal, SubmitRules, unknown_sequence
from agentserve.engine.scheduler import Batch, Scheduler
from agentserve.engine.sequence import Matcher, Sequence, Turn
from agentserve.kv.blocks import require
from agentserve.kv.chains import KvCache, KvShape
from agentserve.kv.policy import make_policy

__all__ = ["Engine", "GrammarFactory", "Matcher"]


class Engine:
    """Runs turns on a runner. Not thread-safe: one thread applies commands and steps."""

    def __init__(
        self,
        runner: Runner,
        clock: Clock,
        settings: EngineSettings,
        grammars: GrammarFactory | None = None,
        kv: KvCache | None = None,
    ) -> None:
        self._runner = runner
        self._info = runner.info
        self._clock = clock
        self._settings = settings
        info = runner.info
        shape = KvShape(
            info.identity, info.num_blocks, info.block_size, info.host_blocks, len(info.groups)
        )
        self._kv = kv or KvCache(shape, make_policy(settings.kv_policy))
        self._rules = SubmitRules(info, settings, self._kv, grammars)
        self._policy = self._kv.residency.policy
        self._scheduler = Scheduler(info, settings, self._kv, clock)
        self._sequences: dict[int, Sequence] = {}
        self._turns: dict[int, Turn] = {}
        self._arrivals = 0
        self._events: list[Event] = []
        self._counters = Counters()
        tokens = info.num_blocks * info.block_size
        token_bytes = sum(group.block_bytes for group in info.groups) // info.block_size
        self._costs = CostModel(token_bytes, tokens)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to say."""
        work = self._turns or self._events or self._kv.copies or self._kv.residency.pending
        return bool(work)

    def apply(self, command: Command) -> None:
        """Take a command; its answer comes with the next step's events. No bad one makes it raise.

        A refused submit or fork changes nothing. Other commands about what is unknown are ignored.
        """
        try:
            if isinstance(command, Submit):
                self._submit(command)
            elif isinstance(command, Fork):
                self._fork(command)
            elif isinstance(command, Close):
                self._close(command.sequence)
            elif isinstance(command, Cancel):
                self._cancel(command)
            elif isinstance(command, Inspect):
                self._inspect(command)
            elif command.sequence in self._sequences:
                self._advise(self._sequences[command.sequence], command)
        except Refusal as refusal:
            turn = command.turn if isinstance(command, Submit) else -1
            sequence = command.into if isinstance(command, Fork) else _sequence_of(command)
            self._events.append(Refused(turn, sequence, refusal.code, str(refusal)))

    def step(self) -> list[Event]:
        """Run one step and return what happened, with Stats last; [] when there was nothing."""
        started = self._clock.monotonic()
        self._kv.residency.begin_step(started, self._costs.costs)
        batch = self._scheduler.plan()
        if batch is not None:
            self._report_admitted(batch)
            handle = self._runner.launch(batch.plan)
            masks = self._masks(batch)
            self._runner.sample(handle, masks)
            result = self._runner.collect(handle)
            self._counters.traffic = result.traffic
            self._kv.copies.settle(result.tickets)
            self._measure(batch, self._clock.monotonic() - started)
            self._commit(batch, result)
        while self._scheduler.exhausted:
            self._finish(self._scheduler.exhausted.pop(), "prefilled")
        if self._settings.check_invariants:
            self.check()
        events, self._events = self._events, []
        if events or (batch is not None and batch.turns):
            events.append(self.stats())
        return events

    @property
    def steps(self) -> int:
        """Steps planned so far."""
        return self._scheduler.step

    def stats(self) -> Stats:
        """Return counts of turns, blocks (of KV group 0) and work since the start."""
        return stats_of(self._scheduler, self._kv, self._counters)

    def check(self) -> None:
        """Verify every invariant; slow, for tests and debugging.

        Raises InvariantError, whose message names INV-xx as numbered in ARCHITECTURE.md.
        """
        self._kv.check()
        self._scheduler.check()
        open_turns = {t.id for t in (*self._scheduler.running, *self._scheduler.waiting)}
        require(open_turns == set(self._turns), "INV-08: a turn was lost")
        for sequence in self._sequences.values():
            require(sequence.chain.length <= len(sequence.log), "INV-04: KV is longer than the log")
            self._kv.check_tokens(sequence.chain, sequence.log)

    # Commands

    def _submit(self, command: Submit) -> None:
        tokens = self._rules.ids(command.tokens)
        forced = self._rules.ids(command.force)
        sequence = self._target(command)
        keep = command.keep if sequence is not None else 0
        prompt = keep + len(tokens)
        self._rules.admissible(command, prompt, len(self._scheduler.waiting))
        matcher = self._rules.matcher(command.grammar)
        now = self._clock.monotonic()
        if sequence is None:
            before = self._sequences.get(command.sequence)
            self._close(command.sequence)
            chain = self._kv.open(command.namespace)
            sequence = Sequence(command.sequence, command.generation, command.namespace, chain)
            sequence.service = before.service if before is not None else 0.0
            self._sequences[sequence.id] = sequence
        elif sequence.waits and command.max_tokens:
            sequence.waits = False
            self._policy.learn(sequence.chain.idle, now)
        self._kv.cut(sequence.chain, keep)
        del sequence.log[keep:]
        sequence.log.extend(tokens)
        self._arrivals += 1
        turn = Turn(
            command=command,
            sequence=sequence,
            arrival=self._arrivals,
            submitted_at=now,
            prompt_length=prompt,
            forced=forced,
            stop_ids=frozenset(command.stop_ids),
            matcher=matcher,
        )
        sequence.turn = turn
        self._turns[turn.id] = turn
        self._scheduler.add(turn)

    def _target(self, command: Submit) -> Sequence | None:
        """Return the sequence that the submit goes on, or None when it opens one."""
        sequence = self._sequences.get(command.sequence)
        if sequence is not None and sequence.turn is not None:
            raise Refusal("busy", f"sequence {command.sequence} has a running turn")
        if command.turn in self._turns:
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
        source = self._sequences.get(command.sequence)
        if (
            source is None
            or source.generation != command.generation
            or not 0 <= command.keep <= len(source.log)
        ):
            raise unknown_sequence(command)
        if command.into == command.sequence:
            raise Refusal("invalid", "a sequence cannot be forked into itself")
        into = self._sequences.get(command.into)
        if into is not None and into.turn is not None:
            raise Refusal("busy", f"sequence {command.into} has a running turn")
        self._close(command.into)
        chain = self._kv.fork(source.chain, command.keep)
        chain.idle.since = self._clock.monotonic()
        self._sequences[command.into] = Sequence(
            command.into,
            command.into_generation,
            source.namespace,
            chain,
            source.log[: command.keep],
            service=source.service,
        )

    def _close(self, sequence_id: int) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.turn is not None:
            self._finish(sequence.turn, "cancelled")
        self._kv.close(sequence.chain)
        del self._sequences[sequence_id]

    def _cancel(self, command: Cancel) -> None:
        turn = self._turns.get(command.turn)
        if turn is not None:
            self._finish(turn, "cancelled")

    def _advise(self, sequence: Sequence, command: Hint | Promote) -> None:
        residency, idle = self._kv.residency, sequence.chain.idle
        if isinstance(command, Promote):
            residency.promote(sequence.chain, begin=command.begin)
            return
        idle.tools, idle.expected_s = tuple(command.tools), command.expected_s
        idle.hinted_at, idle.kv = self._clock.monotonic(), command.kv
        residency.hint(sequence.chain)

    def _inspect(self, command: Inspect) -> None:
        known = [self._sequences[n] for n in command.sequences if n in self._sequences]
        where = [residency_of(sequence, self._info) for sequence in known]
        self._events.append(Inspected(command.number, where))

    # One step

    def _report_admitted(self, batch: Batch) -> None:
        for turn in batch.admitted:
            computed = turn.prompt_length - turn.cached
            waited = turn.started_at - turn.submitted_at
            lost, reason = count_lost(turn, self._kv, self._counters)
            if turn.cached or lost:
                self._costs.queued(waited, resident=not (turn.from_host or lost))
            self._events.append(
                Started(turn.id, turn.cached, computed, waited, turn.from_host, lost, reason)
            )

    def _measure(self, batch: Batch, seconds: float) -> None:
        """Learn what the step cost; share its time out, but not for what we made turns lose."""
        block_size = self._info.block_size
        used = (self._kv.num_blocks - self._kv.pools[0].free) * block_size
        demanded = sum(len(turn.sequence.log) for turn in self._scheduler.waiting)
        self._costs.step(batch.plan.rows, seconds)
        self._costs.traffic(self._counters.traffic)
        self._costs.pool(used, demanded, self._kv.residency.spare(0) * block_size)
        total = sum(row.count for row in batch.plan.rows)
        for row, turn in zip(batch.plan.rows, batch.turns, strict=True):
            chain = turn.sequence.chain
            again = chain.acquired + chain.lost - row.start
            fresh = row.count - max(0, min(again, row.count))
            self._scheduler.waiting.charge(turn.sequence, seconds * fresh / total)

    def _masks(self, batch: Batch) -> dict[int, Any]:
        """Return the masks of constrained rows, computed while the forward pass runs."""
        masks: dict[int, Any] = {}
        for number, (row, turn) in enumerate(zip(batch.plan.rows, batch.turns, strict=True)):
            if turn.matcher is None or not row.sample or turn.generated < len(turn.forced):
                continue
            try:
                mask = turn.matcher.mask()
            except Exception as error:  # a grammar's fault stays with its turn
                turn.fault = f"grammar: {error}"
            else:
                if mask is not None:
                    masks[number] = mask
        return masks

    def _commit(self, batch: Batch, result: StepResult) -> None:
        for number, (row, turn) in enumerate(zip(batch.plan.rows, batch.turns, strict=True)):
            self._count(row.count, turn)
            if not result.finite[number]:
                turn.fault = "the model gave a value that is not finite"
            if turn.fault:
                self._finish(turn, "error")
                continue
            sequence = turn.sequence
            length = row.start + row.count
            self._kv.commit(sequence.chain, sequence.log, length)
            self._report_progress(turn, length)
            if row.sample:
                self._accept(turn, result.tokens[number])
            elif length == len(sequence.log):
                self._finish(turn, "prefilled")

    def _count(self, computed: int, turn: Turn) -> None:
        if turn.generated and computed == 1:
            self._counters.decode_tokens += 1
        else:
            self._counters.prefill_tokens += computed

    def _report_progress(self, turn: Turn, length: int) -> None:
        done = min(length, turn.prompt_length) - turn.cached
        if done > turn.reported:
            turn.reported = done
            self._events.append(Progress(turn.id, done, turn.prompt_length - turn.cached))

    def _accept(self, turn: Turn, sampled: list[int]) -> None:
        """Log what the step sampled, or the forced token instead, up to what ends the turn."""
        if turn.first_token_at < 0:
            turn.first_token_at = self._clock.monotonic()
        given: list[int] = []
        reason, stop_id = "", None
        for token in sampled:
            if turn.generated < len(turn.forced):
                token = turn.forced[turn.generated]
            if token in turn.stop_ids:
                reason, stop_id = "stop", token
                break
            try:
                if turn.matcher is not None:
                    turn.matcher.accept(token)
            except Exception as error:  # a grammar's fault stays with its turn
                reason, turn.fault = "error", f"grammar: {error}"
                break
            turn.sequence.log.append(token)
            turn.generated += 1
            given.append(token)
            reason = self._limit(turn)
            if reason:
                break
        if given:
            self._events.append(Tokens(turn.id, given))
        if reason:
            self._finish(turn, reason, stop_id)

    def _limit(self, turn: Turn) -> str:
        """Return why no further token can follow, or an empty string."""
        length = len(turn.sequence.log)
        if turn.generated >= turn.command.max_tokens:
            return "length"
        if length >= self._info.max_context or not self._rules.fits_pool(length):
            return "context"
        return ""

    def _finish(self, turn: Turn, reason: str, stop_id: int | None = None) -> None:
        sequence = turn.sequence
        self._scheduler.remove(turn, discard=reason == "error")
        sequence.turn = None
        del self._turns[turn.id]
        sequence.stall_s += turn.restore_s
        if turn.recomputed:
            self._counters.lost["preempted"] += turn.recomputed
        now = self._clock.monotonic()
        if turn.command.max_tokens or not sequence.waits:  # a prefill in a wait does not end it
            sequence.chain.idle.since = now
        if turn.command.max_tokens:
            sequence.waits = True
            sequence.chain.idle.tools, sequence.chain.idle.expected_s = (), None
        first = turn.first_token_at if turn.first_token_at >= 0 else now
        started = turn.started_at if turn.started_at >= 0 else now
        self._events.append(
            Finished(
                turn=turn.id,
                reason=reason,
                log_length=len(sequence.log),
                kv_length=sequence.chain.length,
                stop_id=stop_id,
                message=turn.fault,
                prefill_s=first - started,
                decode_s=now - first,
                preemptions=turn.preemptions,
                recomputed=turn.recomputed,
                restore_s=turn.restore_s,
            )
        )


def _sequence_of(command: Command) -> int:
    return command.sequence if isinstance(command, Submit | Close | Hint | Promote) else -1
