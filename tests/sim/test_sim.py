"""The seeded simulation, and that it notices when the engine is broken."""

import pytest
from counts import COUNTS

from agentserve.engine import sim
from agentserve.kv.blocks import BlockPool, Slot
from agentserve.kv.chains import KvCache
from agentserve.kv.copies import CopyQueue
from agentserve.kv.prefix import PrefixIndex

pytestmark = pytest.mark.sim
SEEDS = 200
COMPILING = (
    "grammars compiled",
    "compilers ended",
    "ended without a grammar",
    "cancelled without a grammar",
)


def test_200_seeds_give_the_reference_tokens_and_leave_nothing_locked():
    total = sim.run_seeds(0, SEEDS)
    COUNTS["simulation seeds"] += total["seeds"]
    assert total["seeds"] == SEEDS
    for what in (
        "evictions",
        "preemptions",
        "forks",
        "refusals",
        "cached",
        "ended by error",
        "log probabilities",
        *COMPILING,
    ):
        assert total[what] > 0, f"no seed reached {what}"
    assert total["discarded tokens"] > SEEDS, "no rows were in flight for turns that ended"


def test_a_seed_replays_exactly():
    assert sim.run_seeds(7, 1) == sim.run_seeds(7, 1)


def test_the_command_prints_its_counts(capsys):
    sim.main(["--seeds", "3", "--start", "11"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seeds: 3"
    assert any(line.startswith("preemptions: ") for line in lines)
    assert any(line.startswith("refusals: ") and "expected" in line for line in lines)
    assert lines[-1].startswith("3 seeds: every token right")


def lose_copies(self):
    copies, self._waiting = self._waiting, []
    self.settle([copy.ticket for copy in copies])
    return []


def match_any_parent(self, digest, parent, tokens, namespace):
    entries = self._entries.values()
    return next((e for e in entries if e.tokens == tokens and e.namespace == namespace), None)


def cut_without_a_copy(self, chain, keep):
    chain.length = min(chain.length, keep)
    for part in chain.groups:
        del part.blocks[-(-chain.length // self.block_size) :]


def leak_on_release(self, slot):
    if slot.locks > 1 or slot.number:
        unlock(self, slot)


unlock = BlockPool.unlock
evictable = property(lambda slot: slot.holder is not None and not slot.dependents)
any_leaf = property(lambda slot: slot.holder is not None and not slot.locks)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (CopyQueue, "take", lose_copies),
        (PrefixIndex, "_hit", match_any_parent),
        (KvCache, "cut", cut_without_a_copy),
        (BlockPool, "unlock", leak_on_release),
        (Slot, "evictable", evictable),
        (Slot, "evictable", any_leaf),
        (BlockPool, "rehang", lambda self, holder, parent: None),
    ],
)
def test_a_broken_engine_does_not_pass(monkeypatch, owner, name, broken):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any failure will do
        sim.run_seeds(0, SEEDS)
    assert "--start" in "".join(caught.value.__notes__)


class ReadyGrammars(sim.Simulation):
    """As it was when these seeds failed: nothing has to be compiled."""

    compiles = False


def test_a_turn_whose_block_has_an_equal_one_in_the_host_gets_to_run():
    # Its own copy was on the device, the entry in the index only in the host, and no slot was free.
    assert sim.run_seeds(35540, 1, ReadyGrammars)["seeds"] == 1


def test_a_full_host_is_not_asked_eight_times_for_each_block():
    # Eight turns that need room, copies that take thirty steps and get lost, a host of four blocks.
    simulation = ReadyGrammars(57307, depth=0)
    simulation.run()
    assert simulation.engine.steps < 2500
