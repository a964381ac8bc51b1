"""Which turn computes how many tokens in the next step.

One token budget a step, in this order: decodes, running prefills, new admissions first come first
served. Nothing that waits holds blocks, and the oldest running turn is never preempted: it can
take all others' blocks, so a turn that fits the empty pool always gets to run (INV-06).
"""

from array import array
from collections import deque
from dataclasses import dataclass

from agentserve.clock import Clock
from agentserve.config import EngineSettings
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
        self._budget = settings.token_budget
        self._max_running = min(info.max_slots, settings.token_budget)
        self._free_slots = list(reversed(range(info.max_slots)))
        self._generations = [0] * info.max_slots
        self.waiting: deque[Turn] = deque()
        self.running: list[Turn] = []  # oldest first
        self.preemptions = 0
        self._step = 0
        self._dropped: list[SlotDrop] = []
        self._added: list[SlotAdd] = []
        self._appended: list[TableAppend] = []
        self._counts: dict[Turn, int] = {}
        self._admitted: list[Turn] = []
        self._refused: tuple[Turn, int] | None = None  # the queue head, and room when it was tried

    @property
    def step(self) -> int:
        """Steps planned so far."""
        return self._step

    def add(self, turn: Turn) -> None:
        """Queue a new turn."""
        self.waiting.append(turn)

    def remove(self, turn: Turn, *, discard: bool = False) -> None:
        """Take a turn that is over out of the batch or the queue."""
        if turn.running:
            self._leave(turn, discard=discard)
        else:
            self.waiting.remove(turn)

    def plan(self) -> Batch | None:
        """Return the next step, or None when there is nothing to compute and nothing to copy."""
        self._counts, self._admitted = {}, []
        budget = self._budget
        for turn in self.running.copy():
            if turn.running and turn.pending == 1:
                budget -= self._schedule(turn, 1)
        for turn in self.running.copy():
            if turn.running and turn.pending > 1 and budget > 0:
                budget -= self._schedule(turn, min(turn.pending, budget))
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            turn = self.waiting[0]
            if not self._admit(turn):
                break
            taken = self._schedule(turn, min(turn.pending, budget))
            if not taken:
                break
            budget -= taken
        copies = self._kv.copies.take()
        if not self._counts and not copies:
            return None
        return self._build(
            [Copy(c.ticket, c.group, c.source.number, c.target.number, c.tokens) for c in copies]
        )

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
        ages += [turn.arrival for turn in self.waiting]
        require(ages == sorted(ages), "INV-09: a turn was overtaken")
        for turn in turns:
            require(turn.sequence.turn is turn, "INV-10: a turn and its sequence disagree")
            require(turn.pending >= 0, "INV-04: more KV than tokens")
            require(turn.sequence.chain.active == turn.running, "INV-07: an idle chain is locked")

    def _schedule(self, turn: Turn, count: int) -> int:
        """Give `turn` a row of `count` tokens; return the tokens taken from the budget."""
        chain = turn.sequence.chain
        length = chain.length + count
        while self._kv.reserve(chain, length) is not None:
            if self._kv.copies:  # what copies lock is free after this step
                return 0
            if not self._make_room(turn):
                return 0
        self._announce(turn)
        self._counts[turn] = count
        return count

    def _make_room(self, turn: Turn) -> bool:
        """Preempt the youngest; False when that is `turn` itself, which then waits."""
        youngest = self.running[-1]
        self._preempt(youngest)
        return youngest is not turn

    def _preempt(self, turn: Turn) -> None:
        turn.lost_from = turn.sequence.chain.length
        turn.preemptions += 1
        self.preemptions += 1
        self._leave(turn)
        self.waiting.appendleft(turn)

    def _leave(self, turn: Turn, *, discard: bool = False) -> None:
        chain = turn.sequence.chain
        if discard:
            self._kv.discard(chain)
        else:
            self._kv.release(chain)
        self._dropped.append(SlotDrop(turn.slot, turn.slot_generation))
        self._free_slots.append(turn.slot)
        turn.slot = -1
        self.running.remove(turn)
        self._counts.pop(turn, None)

    def _admit(self, turn: Turn) -> bool:
        if self._refused == (turn, self._kv.releases):
            return False
        sequence = turn.sequence
        cached = self._kv.acquire(sequence.chain, sequence.log, headroom=len(self.running))
        if isinstance(cached, NoRoom):
            self._refused = (turn, self._kv.releases)
            return False
        self.waiting.popleft()
        self._take_slot(turn)
        if turn.started_at < 0:
            turn.started_at = self._clock.monotonic()
            turn.cached = cached
            self._admitted.append(turn)
        else:
            turn.recomputed += max(0, turn.lost_from - cached)
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
        self._added.append(
            SlotAdd(slot, turn.slot_generation, sampling, turn.prompt_length, history)
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
            log, start = turn.sequence.log, turn.sequence.chain.length
            last = start + count == len(log)
            rows.append(Row(turn.slot, start, count, last and turn.command.max_tokens > 0))
            tokens.extend(log[start : start + count])
        plan = StepPlan(
            step=self._step,
            dropped=self._dropped,
            added=self._added,
            appended=self._appended,
            copies=copies,
            rows=rows,
            tokens=tokens.tobytes(),
        )
        self._dropped, self._added, self._appended = [], [], []
        return Batch(plan, list(self._counts), self._admitted)
