"""The engine: commands in, one step at a time, events out.

One step is: plan, launch, mask, sample, collect, settle, commit. On a runner of depth 1 the result
of a step is collected after the next one has been launched, so that a device computes while the
host decides. The loop is the one owner of KV residency: copies are planned and settled here and
nowhere else. Everything that can go wrong in one turn (its grammar, a non-finite row) ends that
turn and no other.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from agentserve.clock import Clock
from agentserve.config import EngineSettings
from agentserve.engine.commands import Commands
from agentserve.engine.commit import Committer
from agentserve.engine.costs import CostModel
from agentserve.engine.grammars import Compiler, Grammars
from agentserve.engine.ledger import Ledger
from agentserve.engine.messages import NOTHING_FITS, Command, Event, Started, Stats
from agentserve.engine.plan import Runner
from agentserve.engine.report import count_lost, stats_of
from agentserve.engine.rules import SubmitRules
from agentserve.engine.scheduler import Batch, Scheduler
from agentserve.engine.sequence import Turn
from agentserve.kv.blocks import require
from agentserve.kv.chains import KvCache, KvShape
from agentserve.kv.policy import make_policy


@dataclass(slots=True)
class Flight:
    """A launched step whose result has not been taken."""

    batch: Batch
    handle: Any
    started: float  # when its plan was begun


class Engine:
    """Runs turns on a runner. Not thread-safe: one thread applies commands and steps."""

    def __init__(
        self,
        runner: Runner,
        clock: Clock,
        settings: EngineSettings,
        compiler: Compiler | None = None,
        kv: KvCache | None = None,
    ) -> None:
        info = runner.info
        self._runner = runner
        self._info = info
        self._clock = clock
        self._settings = settings
        shape = KvShape(
            info.identity, info.num_blocks, info.block_size, info.host_blocks, len(info.groups)
        )
        self._kv = kv or KvCache(shape, make_policy(settings.kv_policy))
        self._scheduler = Scheduler(info, settings, self._kv, clock)
        self.grammars = Grammars(compiler, settings, clock)
        self._ledger = Ledger(self._scheduler, self._kv, self.grammars, clock)
        self._sequences, self._turns = self._ledger.sequences, self._ledger.turns
        self._counters = self._ledger.counters
        rules = SubmitRules(info, settings, self._kv)
        self._commands = Commands(info, rules, self._ledger, self._scheduler, self._kv, clock)
        self._committer = Committer(self._ledger, self._kv, clock)
        tokens = info.num_blocks * info.block_size
        token_bytes = sum(group.block_bytes for group in info.groups) // info.block_size
        self._costs = CostModel(token_bytes, tokens)
        self._flight: Flight | None = None
        self._measured: list[tuple[Batch, float]] = []  # steps to be learned from
        self._taken_at = 0.0  # when the last result was

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to say."""
        moves = self._kv.copies or self._kv.residency.pending
        told = self._ledger.events or self.grammars.wake_in() == 0
        return bool(self._turns or told or moves or self._flight)

    def wake_in(self) -> float:
        """Return the seconds until an engine that is not busy has something to do by itself."""
        return self.grammars.wake_in()

    def close(self) -> None:
        """End what runs beside the engine. Its turns stay as they are."""
        self.grammars.close()

    def apply(self, command: Command) -> None:
        """Take a command; its answer comes with the next step's events. No bad one makes it raise.

        A refused submit or fork changes nothing. Other commands about what is unknown are ignored.
        """
        self._learn()
        self._commands.apply(command)

    def step(self) -> list[Event]:
        """Run one step and return what happened, with Stats last; [] when there was nothing."""
        started = self._clock.monotonic()
        self._learn()
        self._commands.resume()
        self._kv.residency.begin_step(started, self._costs.costs)
        batch = self._scheduler.plan(in_flight=self._flight is not None)
        if batch is None and self._flight is not None:
            self._take_result()
            self._learn()
            batch = self._scheduler.plan()
        if batch is not None:
            self._report_admitted(batch)
            handle = self._runner.launch(batch.plan)
            self._kv.residency.policy.settle()
            if self._flight is not None:
                self._take_result()  # before the masks: grammars go on from its tokens
            self._runner.sample(handle, self._masks(batch))
            self._flight = Flight(batch, handle, started)
            if not (self._info.depth and batch.turns):
                self._take_result()
        while self._scheduler.exhausted:
            self._ledger.finish(self._scheduler.exhausted.pop(), "prefilled")
        if self._settings.check_invariants:
            self.check()
        events, self._ledger.events = self._ledger.events, []
        if events or (batch is not None and batch.turns):
            events.append(self.stats())
        return events

    @property
    def turns(self) -> Collection[int]:
        """The turns that are open, without those that wait for their grammar."""
        return self._turns.keys()

    @property
    def steps(self) -> int:
        """Steps planned so far."""
        return self._scheduler.step

    def stats(self) -> Stats:
        """Return counts of turns, blocks (of KV group 0) and work since the start."""
        return stats_of(self._scheduler, self._kv, self.grammars, self._counters)

    def check(self) -> None:
        """Verify every invariant; slow, for tests and debugging.

        Raises InvariantError, whose message names INV-xx as numbered in ARCHITECTURE.md.
        """
        self._kv.check()
        self._scheduler.check()
        self.grammars.check()
        open_turns = {t.id for t in (*self._scheduler.running, *self._scheduler.waiting)}
        require(open_turns == set(self._turns), "INV-08: a turn was lost")
        for sequence in self._sequences.values():
            require(sequence.chain.length <= len(sequence.log), "INV-04: KV is longer than the log")
            self._kv.check_tokens(sequence.chain, sequence.log)
        flying: dict[Turn, int] = {}
        if self._flight is not None:
            rows = zip(self._flight.batch.plan.rows, self._flight.batch.turns, strict=True)
            flying = {turn: row.count for row, turn in rows if turn.running}
        open_rows = {turn: turn.flying for turn in self._turns.values() if turn.flying}
        require(flying == open_rows, "INV-03: tokens in flight are not those of the step in flight")

    def _take_result(self) -> None:
        """Wait for the step in flight, settle its copies and commit what it gave."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        result = self._runner.collect(flight.handle)
        self._counters.traffic = result.traffic
        self._kv.copies.settle(result.tickets)
        now = self._clock.monotonic()
        # While it was queued behind another step it cost nothing.
        self._measured.append((flight.batch, now - max(flight.started, self._taken_at)))
        self._taken_at = now
        self._committer.commit(flight.batch, result)

    def _report_admitted(self, batch: Batch) -> None:
        for turn in batch.admitted:
            computed = turn.prompt_length - turn.cached
            waited = turn.started_at - turn.submitted_at
            lost, reason = count_lost(turn, self._kv, self._counters)
            if turn.cached or lost:
                self._costs.queued(waited, resident=not (turn.from_host or lost))
            self._ledger.events.append(
                Started(turn.id, turn.cached, computed, waited, turn.from_host, lost, reason)
            )

    def _learn(self) -> None:
        """Learn from the steps that ended; before anything is decided, and after their events."""
        measured, self._measured = self._measured, []
        for batch, seconds in measured:
            self._measure(batch, seconds)

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
            if turn.matcher is None or not (row.sample and turn.running):
                continue
            try:
                turn.matcher.prepare()
                if turn.generated < len(turn.forced):
                    continue
                mask = turn.matcher.mask()
            except Exception as error:  # a grammar's fault stays with its turn
                turn.fault = f"grammar: {error}"
            else:
                if mask is not None and not mask.strip(b"\0"):
                    turn.fault = NOTHING_FITS
                elif mask is not None:
                    masks[number] = mask
        return masks
