"""500 schemas that are meant to harm the grammar compiler, against a live engine with neighbours.

Each schema is a tool's: it is refused with a 400 at the edge or by the compiler, or compiled within
its limits and used. Meanwhile two neighbours generate: their tokens must be those that they get
alone, and the longest time between two steps of theirs is what the attack costs them.

    python benchmarks/grammar_attack.py [--count 500] [--seed 1] [--json FILE]
"""

import argparse
import asyncio
import itertools
import json
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from circumstances import circumstances
from hostile_schemas import schemas

from agentserve import wire
from agentserve.assembly import TORCH_FACTORY
from agentserve.config import EngineSettings, ModelSettings
from agentserve.engine.messages import (
    NOTHING_FITS,
    Close,
    EngineLink,
    Event,
    Finished,
    Ready,
    Refused,
    Stats,
    Submit,
    Tokens,
)
from agentserve.engine.plan import pack
from agentserve.engine.process import ProcessLink
from agentserve.errors import BadToolSchema
from agentserve.model.prepare import prepare
from agentserve.sessions.grammar import structural_tag
from agentserve.sessions.schemas import validate_schema
from agentserve.sessions.toolformat import JSON

PROMPTS = (tuple(range(200, 240)), tuple(range(900, 1000)))
NEIGHBOUR_TOKENS = 200
ATTACKERS = 4  # turns at once, each of a principal of its own
ATTACK_TOKENS = 24
WAIT_S = 120.0


class Player:
    """Submits turns to an engine and waits for their ends; notes when steps gave tokens."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self.stats: Stats | None = None
        self.gaps: list[float] = []  # between batches that gave a neighbour tokens
        self._numbers = itertools.count(1)
        self._ends: dict[int, asyncio.Future[Finished | Refused]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._watched: set[int] = set()
        self._last = 0.0
        self.ready = asyncio.Event()

    async def pump(self) -> None:
        """Take events for as long as the engine is there."""
        try:
            while True:
                self._take(await self.link.receive())
        except Exception as error:
            for end in self._ends.values():
                end.set_exception(error)

    def _take(self, batch: list[Event]) -> None:
        now = time.perf_counter()
        for event in batch:
            if isinstance(event, Tokens):
                self._tokens[event.turn] += event.tokens
                if event.turn in self._watched:
                    self.gaps += [now - self._last] if self._last else []
                    self._last = now
            elif isinstance(event, Finished | Refused):
                self._ends[event.turn].set_result(event)
            elif isinstance(event, Stats):
                self.stats = event
            elif isinstance(event, Ready):
                self.ready.set()

    async def run(
        self,
        tokens: Sequence[int],
        namespace: str,
        count: int,
        grammar: str | None = None,
        *,
        watched: bool = False,
    ) -> tuple[Finished | Refused, list[int]]:
        """Run one turn in a sequence of its own."""
        number = next(self._numbers)
        self._ends[number] = asyncio.get_running_loop().create_future()
        self._tokens[number] = []
        if watched:
            self._watched.add(number)
            self._last = 0.0
        packed = pack(array("i", tokens))
        self.link.send(Submit(number, number, 1, 0, packed, namespace, count, [2], grammar=grammar))
        end = await asyncio.wait_for(self._ends[number], WAIT_S)
        self.link.send(Close(number))
        del self._ends[number]
        return end, self._tokens.pop(number)


async def attack(player: Player, cases: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Try every schema while neighbours run; return what came of each, and of the neighbours."""
    alone = [(await player.run(p, "a", NEIGHBOUR_TOKENS, watched=True))[1] for p in PROMPTS]
    quiet, player.gaps = player.gaps, []
    over = asyncio.Event()
    neighbours: Counter[str] = Counter()

    async def neighbour(prompt: Sequence[int], wanted: list[int]) -> None:
        while not over.is_set():
            end, tokens = await player.run(
                prompt, "a", NEIGHBOUR_TOKENS, watched=prompt is PROMPTS[0]
            )
            right = isinstance(end, Finished) and tokens == wanted
            neighbours["right" if right else f"wrong: {end}"] += 1

    waiting = list(enumerate(cases))[::-1]
    outcomes: list[tuple[str, str]] = [("", "")] * len(cases)

    async def attacker(name: str) -> None:
        while waiting:
            number, (kind, schema) = waiting.pop()
            outcomes[number] = kind, await attempt(player, name, schema)

    running = [asyncio.create_task(neighbour(p, w)) for p, w in zip(PROMPTS, alone, strict=True)]
    await asyncio.gather(*(attacker(f"attacker {i}") for i in range(ATTACKERS)))
    over.set()
    await asyncio.gather(*running)
    return {
        "outcomes": outcomes,
        "neighbours": dict(neighbours),
        "quiet": quiet,
        "gaps": player.gaps,
    }


async def attempt(player: Player, namespace: str, schema: dict[str, Any]) -> str:
    """Return what became of one schema."""
    tool = wire.Tool("t", schema)
    try:
        validate_schema(tool)
    except BadToolSchema:
        return "refused at the edge"
    spec = structural_tag([tool], "required", JSON)
    end, _ = await player.run(PROMPTS[1], namespace, ATTACK_TOKENS, spec)
    if isinstance(end, Finished):
        if end.message == NOTHING_FITS:
            return "without a value"
        good = end.reason in ("length", "stop")
        return "compiled" if good else f"broken: {end.reason} {end.message}"
    if end.code != "bad_grammar":
        return f"broken: {end.code} {end.message}"
    if "too much time" in end.message or "longer than" in end.message:
        return "over the time limit"
    return "over the memory limit" if "memory" in end.message else "refused by the compiler"


def resident(pid: int) -> int:
    """Return the bytes of memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


async def measure(seed: int, count: int) -> dict[str, Any]:
    settings = EngineSettings()
    model = ModelSettings(
        str(prepare("smollm2-135m")), dtype="float32", kv_bytes=1 << 28, host_bytes=0
    )
    link = ProcessLink(TORCH_FACTORY, msgspec.to_builtins(model), settings)
    player = Player(link)
    pump = asyncio.create_task(player.pump())
    try:
        await player.ready.wait()
        await player.run(PROMPTS[0], "a", 8)
        assert link.pid is not None
        before, begun = resident(link.pid), time.perf_counter()
        found = await attack(player, list(schemas(seed, count)))
        seconds, after = time.perf_counter() - begun, resident(link.pid)
    finally:
        pump.cancel()
        await link.close()
    by_kind: dict[str, Counter[str]] = {}
    for kind, outcome in found["outcomes"]:
        by_kind.setdefault(kind, Counter())[outcome] += 1
    return {
        "seed": seed,
        "schemas": count,
        "seconds": seconds,
        "outcomes": Counter(outcome for _, outcome in found["outcomes"]),
        "by_kind": by_kind,
        "neighbour_turns": found["neighbours"],
        "step_gap_ms": {name: spread(found[name]) for name in ("quiet", "gaps")},
        "engine_resident_bytes": {"before": before, "after": after},
        "grammar_cache": msgspec.to_builtins(player.stats),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the longest, in milliseconds."""
    ordered = sorted(seconds)
    places = {
        "p50": len(ordered) // 2,
        "p99": len(ordered) * 99 // 100,
        "longest": len(ordered) - 1,
    }
    return {name: round(ordered[place] * 1e3, 1) for name, place in places.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    head = circumstances("grammar_attack")
    result = {"measured": head, **asyncio.run(measure(args.seed, args.count))}
    print(
        json.dumps(
            {k: v for k, v in result.items() if k not in ("measured", "grammar_cache")}, indent=2
        )
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
