"""Schemas that are meant to harm the grammar compiler, against an engine with neighbours."""

import asyncio
import sys
from pathlib import Path

import pytest
from served import OPTIONS

from agentserve.config import EngineSettings
from agentserve.engine.thread import ThreadLink
from agentserve.model.prepare import prepare

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COUNT = 48
CACHE = 4 << 20


@pytest.fixture
def grammar_attack(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import grammar_attack

    return grammar_attack


async def test_each_is_compiled_or_refused_and_the_neighbours_get_the_right_tokens(grammar_attack):
    options = {**OPTIONS, "directory": str(prepare("smollm2-135m")), "grammar_cpu_s": 0.25}
    settings = EngineSettings(check_invariants=True, grammar_cache_bytes=CACHE)
    link = ThreadLink("served_factories:oracle", options, settings)
    player = grammar_attack.Player(link)
    pump = asyncio.create_task(player.pump())
    try:
        await asyncio.wait_for(player.ready.wait(), 120)
        cases = list(sys.modules["hostile_schemas"].schemas(2, COUNT))
        found = await grammar_attack.attack(player, cases)
        assert [kind for kind, _ in found["outcomes"]] == [kind for kind, _ in cases]
        outcomes = [outcome for _, outcome in found["outcomes"]]
        assert set(outcomes) <= {
            "compiled",
            "without a value",
            "refused at the edge",
            "refused by the compiler",
            "over the time limit",
            "over the memory limit",
        }
        assert outcomes.count("compiled") > COUNT // 4
        assert "over the time limit" in outcomes
        assert found["neighbours"].keys() == {"right"}
        assert player.stats.compiling == 0
        assert 0 < player.stats.grammar_bytes <= CACHE
        assert player.stats.compilers_ended > 0
    finally:
        pump.cancel()
        await link.close()
