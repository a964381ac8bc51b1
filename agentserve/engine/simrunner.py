"""The simulation on the simulated device: `python -m agentserve.engine.simrunner --seeds N`.

Rows and copies run late, in any order that their events allow; the copier that makes these events
is the one of the real runners. Every slot that the pools free is poisoned. Completions are lost
until they are asked for again, or come twice.
"""

import random
from array import array
from dataclasses import dataclass, field
from typing import Any

from agentserve.engine.copier import Copier
from agentserve.engine.oracle import OracleRunner, OracleStep, oracle_next
from agentserve.engine.plan import Copy, Row, SlotAdd, StepPlan, StepResult, Traffic, unpack
from agentserve.engine.sim import Simulation, main
from agentserve.engine.simdevice import Event, Place, SimDevice
from agentserve.engine.simworld import World

_CELL = 8  # bytes: token and position, int32 each
_PACE = (0, 1, 4, 40)  # operations that run while the host does something else


class StaleReadError(Exception):
    """A row read a cell that does not hold what belongs at its position."""


@dataclass(slots=True)
class SimStep(OracleStep):
    """A step in flight: its event, and what it will give."""

    event: Event = field(default_factory=Event)


class SimRunner(OracleRunner):
    """A Runner whose `rng` decides each order, delay, loss and fault. Any call may find a race."""

    def __init__(self, world: World, rng: random.Random) -> None:
        super().__init__(**world.oracle())
        self.device = SimDevice(
            [_CELL] * len(self.info.groups),
            world.block_size,
            world.num_blocks,
            world.host_blocks,
            rng,
            host_orders=rng.random() < 0.5,
        )
        self._copier = Copier(self.device)
        self._rng = rng
        self._world = world
        self._tables: dict[int, tuple[SlotAdd, list[list[int]]]] = {}

    def launch(self, plan: StepPlan) -> SimStep:
        """Queue the plan's copies and rows."""
        self._update_tables(plan)
        moves: list[Copy] = []
        for copy in plan.copies:
            if copy.kind == "device":
                self.device.copy("compute", copy)
            else:
                moves.append(copy)
        self._copier.submit(moves)
        for move in moves:
            self._moved[move.kind] += 1
        adds = [self._tables[row.slot][0] for row in plan.rows]
        step = SimStep(plan, adds, [None] * len(plan.rows), [])
        tokens, offset = unpack(plan.tokens), 0
        for number, row in enumerate(plan.rows):
            self._queue_row(step, number, tokens[offset : offset + row.count])
            offset += row.count
        self._pass_time()
        return step

    def sample(self, handle: OracleStep, masks: dict[int, Any]) -> None:
        """Queue the sampling behind the rows."""
        if not isinstance(handle, SimStep):
            raise TypeError("this is not a step of a SimRunner")
        name, draw = f"sampling of step {handle.plan.step}", super().sample
        self.device.queue("compute", name, (), (), lambda: draw(handle, masks))
        handle.event = self.device.record("compute")

    def collect(self, handle: OracleStep) -> StepResult:
        """Wait for the step; return its tokens and what is told of copies that have ended."""
        if not isinstance(handle, SimStep):
            raise TypeError("this is not a step of a SimRunner")
        plan = handle.plan
        self.device.finish(handle.event)
        if plan.wait:
            self._copier.wait(1.0)
        self._pass_time()
        tickets = [copy.ticket for copy in plan.copies if copy.kind == "device"]
        tickets += self._copier.again(plan.overdue)
        for ticket in self._copier.poll():
            lost = self._rng.random() < self._world.trouble_rate
            twice = self._rng.random() < self._world.trouble_rate
            tickets += [ticket] * (0 if lost else 1 + twice)
        size = self.info.groups[0].block_bytes
        moved = Traffic(self._moved["save"] * size, 0.0, self._moved["load"] * size, 0.0)
        return StepResult(plan.step, handle.tokens, handle.finite, tickets, moved, handle.logprobs)

    def _queue_row(self, step: SimStep, number: int, tokens: "array[int]") -> None:
        row = step.plan.rows[number]
        size = self.info.block_size
        blocks = -(-(row.start + row.count) // size)
        tables = [table[:blocks] for table in self._tables[row.slot][1]]
        reads = [Place("device", group, b) for group, t in enumerate(tables) for b in t]
        first = row.start // size
        writes = [Place("device", group, b) for group, t in enumerate(tables) for b in t[first:]]
        fails = self._rng.random() < self._world.fault_rate
        step.finite.append(not fails)

        def compute() -> None:
            given = self.inputs(step.plan, row, tokens)
            for group, table in enumerate(tables):
                self._put_cells(group, table, row.start, given)
            if row.sample:
                read = [self._held_tokens(group, table, row) for group, table in enumerate(tables)]
                step.draws[number] = oracle_next(read[0], self.info.vocab_size)
            if fails:
                for group, table in enumerate(tables):
                    self._put_cells(group, table, row.start, array("i", [-7]) * row.count)

        self.device.queue("compute", f"step {step.plan.step}, {row}", reads, writes, compute)

    def _update_tables(self, plan: StepPlan) -> None:
        for drop in plan.dropped:
            if self._tables.pop(drop.slot)[0].generation != drop.generation:
                raise ValueError(f"slot {drop.slot} is dropped under a stale generation")
        for add in plan.added:
            if add.slot in self._tables:
                raise ValueError(f"slot {add.slot} is added twice")
            self._tables[add.slot] = (add, [[] for _ in self.info.groups])
        for append in plan.appended:
            self._tables[append.slot][1][append.group].extend(append.blocks)

    def _pass_time(self) -> None:
        self.device.advance(self._rng.choice(_PACE))

    def _put_cells(self, group: int, table: list[int], start: int, tokens: "array[int]") -> None:
        size, end = self.info.block_size, start + len(tokens)
        cells = array("i", bytes(len(tokens) * _CELL))
        cells[0::2], cells[1::2] = tokens, array("i", range(start, end))
        data = cells.tobytes()
        for number in range(start // size, -(-end // size)):
            low, high = max(start, number * size), min(end, (number + 1) * size)
            memory = self.device.bytes(Place("device", group, table[number]))
            place = slice((low - number * size) * _CELL, (high - number * size) * _CELL)
            memory[place] = data[(low - start) * _CELL : (high - start) * _CELL]

    def _held_tokens(self, group: int, table: list[int], row: Row) -> "array[int]":
        """Return the tokens in front of and in `row`. Raises StaleReadError."""
        end = row.start + row.count
        data = b"".join(self.device.bytes(Place("device", group, block)) for block in table)
        cells = unpack(data[: end * _CELL])
        if cells[1::2] != array("i", range(end)):
            wrong = next(i for i, position in enumerate(cells[1::2]) if position != i)
            block = table[wrong // self.info.block_size]
            raise StaleReadError(f"{row}: block {block} does not hold position {wrong}")
        return cells[0::2]


class DeviceSimulation(Simulation):
    """One seed's world on the simulated device."""

    command = "python -m agentserve.engine.simrunner"

    def make_runner(self, rng: random.Random) -> SimRunner:
        """Return a runner on the simulated device."""
        self._device_runner = SimRunner(self.world, rng)
        self._free: set[Place] = set()
        return self._device_runner

    def step(self) -> None:
        """Step, and poison what was freed."""
        super().step()
        free = {
            Place(pool.tier, group, slot)
            for pools in (self.kv.pools, self.kv.host_pools)
            for group, pool in enumerate(pools)
            for slot in pool.free_slots
        }
        for place in sorted(free - self._free):
            self._device_runner.device.free(place)
        self._free = free


if __name__ == "__main__":
    main(make=DeviceSimulation)
