"""The copier on a simulated device: every order that its events allow is right, and a missing
event is found, whatever order happened to come about."""

import random
from array import array
from collections import Counter

import pytest
from counts import COUNTS

from agentserve.engine.copier import Copier
from agentserve.engine.plan import Copy
from agentserve.engine.simdevice import Event, Place, RaceError, SimDevice, StuckError

pytestmark = pytest.mark.sim
SEEDS = 200
BLOCKS = 5  # of each tier
CELL = 4  # bytes of a token


def device_slot(number):
    return Place("device", 0, number)


def host_slot(number):
    return Place("host", 0, number)


class Deaf(SimDevice):
    """Ignores waits of one stream for events of another: a copier that forgot them."""

    def __init__(self, *arguments, forgotten, **options):
        super().__init__(*arguments, **options)
        self._forgotten = forgotten
        self._recorded = {}

    def record(self, stream):
        event = super().record(stream)
        self._recorded[event] = stream
        return event

    def wait(self, stream, event):
        if (stream, self._recorded[event]) not in self._forgotten:
            super().wait(stream, event)


class Hasty(Copier):
    """Reports every copy as soon as it is queued."""

    def poll(self):
        flights = [flight for queue in self._flights.values() for flight in queue]
        super().poll()
        for queue in self._flights.values():
            queue.clear()
        return [flight.copy.ticket for flight in flights]


class Schedule:
    """Rows, saves and loads on shared slots, one step launched ahead of the one collected.

    It keeps to the rules of the engine loop: a slot that a copy fills is used when its ticket has
    come back, what a save reads is not written until then, and a slot that no copy uses may get
    other content at any time, whoever still computes with it. It goes further for host slots: they
    are loaded from and refilled while the copy before is on its way.
    """

    def __init__(self, seed, *, forgotten=(), copier=Copier, host_orders=False):
        self.rng = random.Random(seed)
        self.device = Deaf(
            [CELL], 1, BLOCKS, BLOCKS, self.rng, host_orders=host_orders, forgotten=forgotten
        )
        self.copier = copier(self.device)
        self.content = {"device": [None] * BLOCKS, "host": [None] * BLOCKS}
        self.open = {}  # ticket -> copy
        self.steps = []  # compute events of the steps in flight
        self.written = 0
        self.tickets = 0
        self.counts = Counter()

    def run(self, steps):
        for _ in range(steps):
            self.free_some()
            self.copier.submit(self.choose_copies())
            for _ in range(self.rng.randint(0, 2)):
                self.queue_row()
            self.steps.append(self.device.record("compute"))
            self.device.advance(self.rng.choice((0, 1, 3, 30)))
            if len(self.steps) > 1:
                self.device.finish(self.steps.pop(0))
            if self.rng.random() < 0.2:
                self.copier.wait(1.0)
            self.settle()
        self.device.finish()
        self.settle()
        assert not self.open
        for tier, contents in self.content.items():
            for slot, value in enumerate(contents):
                if value is not None:
                    assert self.held(Place(tier, 0, slot)) == value

    def settle(self):
        for ticket in self.copier.poll():
            del self.open[ticket]

    def in_flight(self, kind, end):
        return {getattr(copy, end) for copy in self.open.values() if copy.kind == kind}

    def free_some(self):
        copied = self.in_flight("save", "source") | self.in_flight("load", "target")
        for slot in set(range(BLOCKS)) - copied:
            if self.content["device"][slot] is not None and self.rng.random() < 0.2:
                self.content["device"][slot] = None
                self.device.free(device_slot(slot))
        loading = self.in_flight("load", "source")
        for slot in set(range(BLOCKS)) - self.in_flight("save", "target"):
            if self.content["host"][slot] is not None and self.rng.random() < 0.2:
                self.content["host"][slot] = None
                if slot not in loading:  # else the next save must wait for that load
                    self.device.free(host_slot(slot))

    def choose_copies(self):
        copies = []
        arriving = self.in_flight("load", "target")
        freed = [slot for slot, value in enumerate(self.content["host"]) if value is None]
        for slot, value in enumerate(self.content["device"]):
            if value is not None and slot not in arriving and freed and self.rng.random() < 0.3:
                copies.append(self.copy("save", slot, freed.pop()))
        saved = {copy.target for copy in copies}
        for slot, value in enumerate(self.content["device"]):
            full = [s for s, v in enumerate(self.content["host"]) if v is not None]
            sources = sorted(set(full) - saved)
            if value is None and sources and self.rng.random() < 0.3:
                copies.append(self.copy("load", self.rng.choice(sources), slot))
        return copies

    def copy(self, kind, source, target):
        self.tickets += 1
        self.counts[kind] += 1
        copy = Copy(self.tickets, 0, source, target, 1, kind)
        ends = ("device", "host") if kind == "save" else ("host", "device")
        self.content[ends[1]][target] = self.content[ends[0]][source]
        self.open[copy.ticket] = copy
        return copy

    def queue_row(self):
        arriving, saving = self.in_flight("load", "target"), self.in_flight("save", "source")
        usable = sorted(set(range(BLOCKS)) - arriving)
        reads = {s: v for s in usable if (v := self.content["device"][s]) is not None}
        writes = [slot for slot in usable if slot not in saving and self.rng.random() < 0.4]
        values = {}
        for slot in writes:
            self.written += 1
            values[slot] = self.content["device"][slot] = self.written

        def compute():
            for slot, value in reads.items():
                assert self.held(device_slot(slot)) == value
            for slot, value in values.items():
                self.device.bytes(device_slot(slot))[:] = array("i", [value]).tobytes()

        self.counts["row"] += 1
        places = [device_slot(s) for s in reads], [device_slot(s) for s in values]
        self.device.queue("compute", f"row {self.counts['row']}", *places, compute)

    def held(self, place):
        return array("i", bytes(self.device.bytes(place)))[0]


class Rule:
    """One order that the copier must keep: small steps, and what is where in the end.

    `forgotten` is the wait, (stream, of what it waits for), that keeps it.
    """

    forgotten = ("", "")
    slots = (device_slot(0), device_slot(1), host_slot(0))
    after = (1, 2, 1)  # content of `slots` in the end; 1 and 2 are written to begin with

    def __init__(self, seed, forgotten=()):
        self.device = Deaf(
            [CELL], 1, 2, 1, random.Random(seed), host_orders=False, forgotten=forgotten
        )
        self.copier = Copier(self.device)
        self.tickets = 0
        self.compute(write={0: 1, 1: 2})

    def run(self):
        self.play()
        self.device.finish()
        for place, value in zip(self.slots, self.after, strict=True):
            assert self.device.bytes(place) == array("i", [value]).tobytes()

    def compute(self, write=(), read=()):
        def row():
            for slot, value in dict(write).items():
                self.device.bytes(device_slot(slot))[:] = array("i", [value]).tobytes()

        places = [device_slot(s) for s in read], [device_slot(s) for s in write]
        self.device.queue("compute", f"row of {places}", *places, row)

    def submit(self, kind, source, target):
        self.tickets += 1
        self.copier.submit([Copy(self.tickets, 0, source, target, 1, kind)])

    def land(self):
        while not self.copier.poll():
            self.copier.wait(1.0)


class SaveWaitsForCompute(Rule):
    forgotten = ("save", "compute")

    def play(self):
        self.submit("save", 0, 0)


class LoadWaitsForTheLastReader(Rule):
    forgotten = ("load", "compute")
    after = (1, 1, 1)

    def play(self):
        self.submit("save", 0, 0)
        self.land()
        self.compute(read=[1])  # still in flight when its sequence lost the slot
        self.submit("load", 0, 1)


class ComputeWaitsForTheLoad(Rule):
    forgotten = ("compute", "load")
    after = (1, 1, 1)

    def play(self):
        self.submit("save", 0, 0)
        self.submit("load", 0, 1)
        while len(self.copier.again([1, 2])) < 2:
            self.copier.poll()
            self.copier.wait(1.0)
        self.compute(read=[1])


class ComputeWaitsForTheSave(Rule):
    forgotten = ("compute", "save")
    after = (3, 2, 1)

    def play(self):
        self.submit("save", 0, 0)
        self.land()
        self.compute(write={0: 3})


class LoadWaitsForTheSaveOfItsSource(Rule):
    forgotten = ("load", "save")
    after = (1, 1, 1)

    def play(self):
        self.submit("save", 0, 0)
        self.submit("load", 0, 1)


class HostSlotIsReusedAfterItsReader(Rule):
    forgotten = ("save", "load")
    after = (2, 1, 2)
    slots = (device_slot(1), device_slot(0), host_slot(0))

    def play(self):
        self.submit("save", 0, 0)
        self.submit("load", 0, 0)
        self.submit("save", 1, 0)


RULES = Rule.__subclasses__()


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_holds_in_every_order(rule):
    for seed in range(50):
        rule(seed).run()


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_without_its_wait_is_found_broken_in_every_order(rule):
    for seed in range(50):
        with pytest.raises(RaceError):
            rule(seed, forgotten=[rule.forgotten]).run()


def test_no_schedule_of_two_steps_in_flight_has_a_race_or_wrong_content():
    done = Counter()
    for seed in range(SEEDS):
        schedule = Schedule(seed, host_orders=seed % 4 == 0)
        schedule.run(30)
        done.update(schedule.counts)
        COUNTS["schedules of copies"] += 1
    assert min(done["row"], done["save"], done["load"]) > SEEDS


@pytest.mark.parametrize("rule", RULES)
def test_random_schedules_notice_a_forgotten_wait(rule):
    found = 0
    for seed in range(20):
        try:
            Schedule(seed, forgotten=[rule.forgotten]).run(30)
        except (RaceError, AssertionError):
            found += 1
    assert found >= 10


def test_random_schedules_notice_a_completion_that_is_told_too_early():
    waits = [("compute", "load"), ("compute", "save")]
    with pytest.raises(RaceError):
        Schedule(0, forgotten=waits, copier=Hasty).run(30)


def test_what_nobody_orders_is_found_and_named():
    device = SimDevice([CELL], 1, 1, 0, random.Random(0))
    for stream in ("compute", "save"):
        device.queue(stream, f"work on {stream}", [], [device_slot(0)], lambda: None)
    with pytest.raises(RaceError, match=r"device slot 0 .*work on .*work on "):
        device.finish()


def test_two_reads_need_no_order_and_what_the_host_saw_is_an_order_if_wanted():
    for host_orders in (True, False):
        device = SimDevice([CELL], 1, 1, 0, random.Random(0), host_orders=host_orders)
        for stream in ("compute", "save"):
            device.queue(stream, "read", [device_slot(0)], [], lambda: None)
        for event in (device.record("compute"), device.record("save")):
            device.finish(event)
        device.queue("compute", "write", [], [device_slot(0)], lambda: None)
        if host_orders:
            device.finish()
        else:
            with pytest.raises(RaceError):
                device.finish()


def test_streams_that_wait_for_each_other_are_reported():
    device = SimDevice([CELL], 1, 1, 0, random.Random(0))
    device.wait("save", Event())
    with pytest.raises(StuckError, match="save"):
        device.finish()


def test_what_is_freed_or_arriving_is_poison():
    device = SimDevice([CELL], 1, 1, 1, random.Random(0))
    device.bytes(device_slot(0))[:] = array("i", [1]).tobytes()
    device.copy("save", Copy(1, 0, 0, 0, 1, "save"))
    device.advance(1)
    assert device.bytes(host_slot(0)) == b"\xff" * CELL
    device.finish()
    assert device.bytes(host_slot(0)) == array("i", [1]).tobytes()
    device.free(host_slot(0))
    device.finish()
    assert device.bytes(host_slot(0)) == b"\xff" * CELL
