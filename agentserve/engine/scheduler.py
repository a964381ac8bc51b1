"""Which turn computes how many tokens in the next step.

One token budget a step, in this order: decodes, running prefills, admissions in the order of the
fair queue. A turn whose KV comes from the host is admitted, and has rows once the last block has
arrived; the others run meanwhile. Nothing that waits holds blocks, and the oldest running turn is
never preempted: it can take all others' blocks, so a turn that fits the empty pool always gets to
run (INV-06). Background turns run in steps that nobody else wants, in blocks that are free.

A step may be planned while the one before is in flight. Its rows then go on from what that one
computes and samples, and nobody with a row in flight leaves the batch for another's sake: what the
step in flight gives may end turns, so it is taken first.
"""

from array import array
from dataclasses import dataclass

from agentserve.clock import Clock
from agentserve.config import EngineSettings
from agentserve.engine.fairness import TurnQueue
from agentserve.engine.plan import (
    Copy,
    Row,
    RunnerInfo,
    SlotAdd,
    SlotDrop,
    StepPlan,
    TableAppend,
    pack,
)
from agentserve.engine.sequence import Turn
from agentserve.kv.blocks import NoRoom, require
from agentserve.kv.chains import KvCache


@dataclass(slots=True)
class Batch:
    """A plan and the turn of each of its rows. `admitted` entered it for their first time."""

    plan: StepPlan
    turns: list[Turn]
    admitted: list[Turn]


class Scheduler:
    """The waiting queue, the batch slots, and the decisions of each step."""

    def __init__(
        self, info: RunnerInfo, settings: EngineSettings, kv: KvCache, clock: Clock
    ) -> None:
        self._kv = kv
        self._clock = clock
        self._budget = budget = settings.token_budget or info.step_tokens
        self._background_budget = max(1, budget // 4)  # so long somebody else waits
        self._max_running = min(info.max_slots, budget)
        self._free_slots = list(reversed(range(info.max_slots)))
        self._generations = [0] * info.max_slots
        self.waiting = TurnQueue(clock, self._is_resident)
        self.running: list[Turn] = []  # oldest first
        self.preemptions = 0
        self.stall_s = 0.0  # time that admitted turns have waited for copies
        self._step = 0
        self._dropped: list[SlotDrop] = []
        self._added: list[SlotAdd] = []
        self._appended: list[TableAppend] = []
        self._counts: dict[Turn, int] = {}
        self._admitted: list[Turn] = []
        self._refused: tuple[Turn, int] | None = None  # the queue head, and room when it was tried
        self._starved = False  # a running turn found no room in this step
        self._in_flight = False  # a step is launched and not committed
        self.exhausted: list[Turn] = []  # background turns that found no free block

    @property
    def step(self) -> int:
        """Steps planned so far."""
        return self._step

    def add(self, turn: Turn) -> None:
        """Queue a new turn."""
        self.waiting.add(turn)
        turn.sequence.chain.idle.queued = turn.arrival
        self._kv.residency.touch(turn.sequence.chain)

    def remove(self, turn: Turn, *, discard: bool = False) -> None:
        """Take a turn that is over out of the batch or the queue."""
        if turn.running:
            self._leave(turn, discard=discard)
        else:
            self.waiting.remove(turn)
        turn.sequence.chain.idle.queued = 0

    def plan(self, *, in_flight: bool = False) -> Batch | None:
        """Return the next step, or None without anything to compute, to copy or to wait for.

        With the step before `in_flight`, None also says that its result has to be taken first.
        """
        self._counts, self._admitted, self.exhausted = {}, [], []
        self._starved, self._in_flight = False, in_flight
        self._join()
        budget = self._run(self._ready(), self._budget)
        if self._starved and in_flight:
            return None
        if not self._starved:
            self._admit_waiting(budget)
            self._kv.residency.pump()
        copies = self._kv.copies.take(self._clock.monotonic())
        wanted = self._admitted if in_flight else self._kv.copies  # to be told, to be waited for
        if not (self._counts or copies or wanted):
            return None
        return self._build(
            [
                Copy(c.ticket, c.group, c.source.number, c.target.number, c.tokens, c.kind)
                for c in copies
            ]
        )

    def _run(self, ready: list[Turn], budget: int) -> int:
        """Give rows to running turns, decodes first; return what is left of the budget."""
        for turn in ready:
            if turn.running and turn.pending == 1:
                budget -= self._schedule(turn, 1)
        for turn in ready:
            if turn.running and turn.pending > 1 and budget > 0:
                budget -= self._schedule(turn, self._share(turn, budget))
        return budget

    def _share(self, turn: Turn, budget: int) -> int:
        """Return how many tokens of a prefill come next."""
        most = min(budget, self._background_budget) if turn.command.background else budget
        return min(turn.pending, most)

    def _admit_waiting(self, budget: int) -> None:
        while budget > 0 and len(self.running) < self._max_running:
            turn = self.waiting.head()
            if turn is None or (turn.command.background and self.running):
                break
            if not self._admit(turn):
                break
            if turn.restoring:
                continue
            taken = self._schedule(turn, self._share(turn, budget), preempt=False)
            if not taken:
                break
            budget -= taken

    def _join(self) -> None:
        """Let the turns go on whose blocks have all arrived."""
        now = self._clock.monotonic()
        for turn in self.running:
            if turn.restoring and not turn.sequence.chain.loading:
                turn.restoring = False
                turn.restore_s += now - turn.admitted_at
                self.stall_s += now - turn.admitted_at

    def _ready(self) -> list[Turn]:
        """Return the turns that may have rows; background turns go when others want to run."""
        wanted = self.waiting.wanted or any(not t.command.background for t in self.running)
        if wanted:
            for turn in [t for t in self.running if t.command.background and not t.flying]:
                self._put_back(turn)
        return [t for t in self.running if not (t.restoring or (wanted and t.command.background))]

    def _is_resident(self, turn: Turn) -> bool:
        return self._kv.is_on_device(turn.sequence.chain)

    def check(self) -> None:
        """Verify slots and queues. Raises InvariantError."""
        slots = [turn.slot for turn in self.running]
        require(
            sorted(slots + self._free_slots) == list(range(len(self._generations))),
            "INV-02: batch slots are lost or used twice",
        )
        turns = [*self.running, *self.waiting]
        require(
            len({turn.sequence for turn in turns}) == len(turns),
            "INV-10: a sequence has two turns",
        )
        ages = [turn.arrival for turn in self.running]
        require(ages == sorted(ages), "INV-06: the oldest running turn is not known")
        for turn in turns:
            require(turn.sequence.turn is turn, "INV-10: a turn and its sequence disagree")
            require(turn.pending >= 0, "INV-04: more KV than tokens")
            require(turn.sequence.chain.active == turn.running, "INV-07: an idle chain is locked")

    def _schedule(self, turn: Turn, count: int, *, preempt: bool = True) -> int:
        """Give `turn` a row of `count` tokens; return the tokens taken from the budget."""
        chain = turn.sequence.chain
        length = turn.computed + count
        if turn.command.background and not self._kv.has_free(chain, length):
            if not turn.flying:
                self.exhausted.append(turn)
            return 0
        while self._kv.reserve(chain, length) is not None:
            # What copies lock is free when they have ended; the step in flight may end turns.
            if self._kv.copies or (preempt and self._in_flight):
                self._starved = True
                return 0
            if not (preempt and self._make_room(turn)):
                return 0
        self._announce(turn)
        self._counts[turn] = count
        return count

    def _make_room(self, turn: Turn) -> bool:
        """Preempt the youngest; False when that is `turn` itself, which then waits."""
        youngest = self.running[-1]
        youngest.preemptions += 1
        self.preemptions += 1
        self._put_back(youngest)
        return youngest is not turn

    def _put_back(self, turn: Turn) -> None:
        require(not turn.flying, "INV-04: a turn loses its blocks while a row of it is in flight")
        self._leave(turn)
        self.waiting.put_back(turn)
        turn.sequence.chain.idle.queued = turn.arrival

    def _leave(self, turn: Turn, *, discard: bool = False) -> None:
        """Take a turn out of the batch and give its blocks back, also under a row in flight.

        Such a row writes behind the committed tokens only: in the private tail or in blocks that
        nobody names from now on. Whoever gets these gets them from a later plan: its rows and
        copies on the device run after that row, in the order of plans, and copies between tiers
        wait for all compute work launched before them (`copier`, rule 1).
        """
        chain = turn.sequence.chain
        if discard:
            self._kv.discard(chain)
        else:
            self._kv.release(chain)
        known = [add for add in self._added if add.slot != turn.slot]
        if len(known) == len(self._added):  # else the runner has not heard of it yet
            self._dropped.append(SlotDrop(turn.slot, turn.slot_generation))
        self._added = known
        self._free_slots.append(turn.slot)
        self._appended = [append for append in self._appended if append.slot != turn.slot]
        turn.slot = -1
        turn.flying = turn.coming = 0
        turn.restoring = False
        self.running.remove(turn)
        self._counts.pop(turn, None)

    def _admit(self, turn: Turn) -> bool:
        if self._refused == (turn, self._kv.releases):
            return False
        chain = turn.sequence.chain
        background = turn.command.background
        headroom = len(self.running)
        cached = self._kv.acquire(chain, turn.sequence.log, headroom, evict=not background)
        if isinstance(cached, NoRoom):
            self._refused = None if background else (turn, self._kv.releases)
            if background:
                self.exhausted.append(turn)
            return False
        self.waiting.remove(turn)
        chain.idle.queued = 0
        self._take_slot(turn)
        turn.admitted_at = self._clock.monotonic()
        turn.restoring = chain.loading
        if turn.started_at < 0:
            turn.started_at = turn.admitted_at
            turn.cached, turn.from_host, turn.lost = cached, chain.from_host, chain.lost
            turn.dropped, chain.dropped = chain.dropped, False
            self._admitted.append(turn)
        else:
            turn.recomputed += chain.lost
        return True

    def _take_slot(self, turn: Turn) -> None:
        slot = self._free_slots.pop()
        self._generations[slot] += 1
        turn.slot, turn.slot_generation = slot, self._generations[slot]
        place = len(self.running)
        while place and self.running[place - 1].arrival > turn.arrival:
            place -= 1
        self.running.insert(place, turn)
        log, start = turn.sequence.log, turn.sequence.chain.length
        sampling = turn.command.sampling
        history = pack(log[:start]) if sampling.needs_history else b""
        forced = b"" if sampling.logprobs is None else turn.command.force
        self._added.append(
            SlotAdd(slot, turn.slot_generation, sampling, turn.prompt_length, history, forced)
        )
        self._announce(turn)

    def _announce(self, turn: Turn) -> None:
        for group, blocks in enumerate(self._kv.announce(turn.sequence.chain)):
            if blocks:
                self._appended.append(TableAppend(turn.slot, group, blocks))

    def _build(self, copies: list[Copy]) -> Batch:
        self._step += 1
        rows: list[Row] = []
        tokens = array("i")
        for turn, count in self._counts.items():
            log, start = turn.sequence.log, turn.computed
            last = count == turn.pending
            row = Row(turn.slot, start, count, last and turn.command.max_tokens > 0)
            rows.append(row)
            if start < len(log):
                tokens.extend(log[start : start + count])
            else:
                tokens.append(turn.next_forced)
            turn.flying += count
            turn.coming += row.sample
        plan = StepPlan(
            step=self._step,
            dropped=self._dropped,
            added=self._added,
            appended=self._appended,
            copies=copies,
            rows=rows,
            tokens=tokens.tobytes(),
            wait=not rows and not self._in_flight,
            overdue=self._kv.copies.overdue(self._clock.monotonic()),
        )
        self._dropped, self._added, self._appended = [], [], []
        return Batch(plan, list(self._counts), self._admitted)
