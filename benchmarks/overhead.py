"""What the server adds to a turn, by the tokens of history: p50, and the slope over the history.

The whole of `agentserve serve` with SmolLM2's tokenizer and template, on a runner that samples the
same call every turn, in steps of 2 ms of sleep. Agents grow by turns of 180 tokens (and steps of no
time) to each length and are then measured over a few equal turns, a tool's result of 24 words in
and a call out. The overhead of a turn is

    last byte of the request received -> first step launched      submitting
    + first step ended -> first event sent                        answering
    + last step ended -> last byte sent                           ending

by the clock of the machine that all processes share. Left out are the steps, what happens between
the first token and the last, and the client, which sleeps until the turn is over and takes no CPU.
What is in it: HTTP, JSON, template, tokenizing, both ways through the socket between server and
engine, the engine's planning, grammar and KV bookkeeping, parsing the call, the commit.

    PYTHONPATH=benchmarks python benchmarks/overhead.py [--rounds 5] [--json]
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
from circumstances import circumstances
from least_squares import Line, fit_line
from overhead_server import STEP_HEADER, Stamps

from agentserve.replay.generator import TOOL, WORDS
from agentserve.replay.server import READY

RESULT = Path("benchmarks/results/overhead.json")
LEVELS = (100, 1_000, 3_000, 10_000, 30_000)  # tokens of history
MEASURED = 5  # turns of each agent
GROWTH, RESULT_WORDS = 150, 24
PAUSE_S = 0.02  # a tool, and what the server does when nobody waits
STEP_S = 0.002
ASLEEP_STEPS = 70  # longer than a turn
GOAL_MS = 3.0


class Sample(msgspec.Struct, frozen=True):
    """One measured turn, in milliseconds."""

    level: int
    history: int  # tokens of the log before the turn
    overhead: float  # submitting + answering + ending
    submitting: float  # request received -> first step launched
    answering: float  # first step ended -> first event sent
    ending: float  # last step ended -> last byte sent
    reading: float  # the application called -> request received; not in the overhead
    streaming: float  # first token -> last token; not in the overhead


class Agent:
    """A client in a tool loop."""

    def __init__(self, http: HTTPConnection, source: random.Random) -> None:
        body = {"system": "Answer.", "tools": [msgspec.to_builtins(TOOL.declared())]}
        self.history = 0
        self._path = f"/sessions/{json.loads(ask(http, 'POST', '/sessions', body))['id']}"
        self._http = http
        self._source = source
        self._call = ""

    def turn(self, words: int, step_s: float = 0.0) -> None:
        """Give the result of the last call, or a first message; sleep until the turn is over."""
        text = self._words(words)
        item: dict[str, Any] = {"type": "user", "content": text}
        if self._call:
            item = {"type": "tool_result", "call_id": self._call, "output": text}
        body = {"input": [item], "stream": True}
        answer = ask(self._http, "POST", f"{self._path}/turn", body, step_s)
        turn = json.loads(answer.rpartition(b"\ndata: ")[2])["turn"]
        self.history = turn["context"]["used"]
        self._call = turn["pending_calls"][0]["call_id"]

    def end(self) -> None:
        """Delete the session."""
        ask(self._http, "DELETE", self._path)

    def _words(self, count: int) -> str:
        return " ".join(self._source.choices(WORDS, k=count))


def ask(
    http: HTTPConnection, method: str, path: str, body: Any = None, step_s: float = 0.0
) -> bytes:
    """Return the answer's body, read only after a while: a client that sleeps takes no CPU."""
    data = b"" if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", STEP_HEADER.decode(): str(step_s)}
    http.request(method, path, data, headers)
    time.sleep(ASLEEP_STEPS * step_s)
    answer = http.getresponse()
    text = answer.read()
    if answer.status >= 400:
        raise SystemExit(f"{method} {path}: {answer.status} {text.decode()}")
    return text


@contextmanager
def server() -> Iterator[tuple[str, Path]]:
    """Run the server; yield its address and the file of its stamps."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(__file__).with_name("overhead_server.py")
        path = filter(None, (str(script.parent), os.environ.get("PYTHONPATH")))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        process = subprocess.Popen(
            [sys.executable, str(script), place],
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=environment,
        )
        try:
            assert process.stdout is not None
            ready = next(filter(None, map(READY.search, process.stdout)), None)
            if ready is None:
                raise SystemExit("the server did not start")
            yield ready[1].removeprefix("http://"), Path(place) / "stamps"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


def play(http: HTTPConnection, levels: list[int], rounds: int) -> list[tuple[int, int]]:
    """Run all turns; return (level, history) of each, level 0 where it only grows."""
    turns: list[tuple[int, int]] = []
    for number in range(rounds):
        for level in levels:
            agent = Agent(http, random.Random(f"{number}/{level}"))
            while not agent.history or agent.history < level - GROWTH:
                turns.append((0, agent.history))
                agent.turn(GROWTH if agent.history else RESULT_WORDS)
            for _ in range(MEASURED):
                time.sleep(PAUSE_S)
                # The first round compiles grammars and fills caches.
                turns.append((level if number else 0, agent.history))
                agent.turn(RESULT_WORDS, STEP_S)
            agent.end()
    return turns


def sample_of(level: int, history: int, stamps: Stamps) -> Sample:
    """Return the turn's times from its stamps."""
    steps = stamps.steps
    parts = {
        "submitting": steps.first_launch - stamps.received,
        "answering": stamps.first_event - steps.first_collected,
        "ending": stamps.last_byte - steps.last_collected,
        "reading": stamps.received - stamps.called,
        "streaming": steps.last_collected - steps.first_collected,
    }
    ms = {name: seconds * 1000 for name, seconds in parts.items()}
    overhead = ms["submitting"] + ms["answering"] + ms["ending"]
    return Sample(level=level, history=history, overhead=overhead, **ms)


PARTS = ("overhead", "submitting", "answering", "ending")


def summarised(samples: list[Sample]) -> dict[str, Any]:
    """Return p50 and p95 by level, and each part's line over the history."""
    levels = {}
    for level in dict.fromkeys(sample.level for sample in samples):
        own = [sample for sample in samples if sample.level == level]
        times = sorted(sample.overhead for sample in own)
        levels[str(level)] = {
            "history": statistics.median(sample.history for sample in own),
            "p95_ms": times[int(0.95 * (len(times) - 1))],
        } | {f"{part}_p50_ms": statistics.median(getattr(s, part) for s in own) for part in PARTS}
    lines = {part: line_of(samples, part) for part in PARTS}
    return {
        "p50_ms": statistics.median(sample.overhead for sample in samples),
        "ms_per_1000_tokens": {part: line.slope * 1000 for part, line in lines.items()},
        "ms_per_1000_tokens_error": {p: line.slope_error * 1000 for p, line in lines.items()},
        "levels": levels,
    }


def line_of(samples: list[Sample], part: str) -> Line:
    """Return the line of a part over the tokens of history."""
    xs = [float(sample.history) for sample in samples]
    return fit_line(xs, [getattr(sample, part) for sample in samples])


def lines_of(summary: dict[str, Any]) -> list[str]:
    """Return the summary as a table."""
    lines = [f"{'history':>8}" + "".join(f"{part:>12}" for part in PARTS) + f"{'p95':>8}   (ms)"]
    for row in summary["levels"].values():
        cells = "".join(f"{row[f'{part}_p50_ms']:12.2f}" for part in PARTS)
        lines.append(f"{row['history']:8,.0f}{cells}{row['p95_ms']:8.2f}")
    slopes, errors = summary["ms_per_1000_tokens"], summary["ms_per_1000_tokens_error"]
    lines.append("ms per 1,000 tokens of history, two standard errors:")
    lines += [f"  {part:<12}{slopes[part]:+.4f} +- {2 * errors[part]:.4f}" for part in PARTS]
    return [*lines, f"p50 {summary['p50_ms']:.2f} ms; the goal is {GOAL_MS:g} ms and flat"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="after one that only warms")
    parser.add_argument("--levels", type=int, nargs="+", default=list(LEVELS))
    parser.add_argument("--json", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    head = circumstances("overhead")
    with server() as (address, file), closing(HTTPConnection(address, timeout=60)) as http:
        turns = play(http, args.levels, args.rounds + 1)
        stamps = [msgspec.json.decode(row, type=Stamps) for row in file.read_bytes().splitlines()]
    pairs = zip(turns, stamps, strict=True)
    samples = [sample_of(level, history, one) for (level, history), one in pairs if level]
    summary = summarised(samples)
    print(*lines_of(summary), sep="\n")
    if args.json:
        result = head | {"summary": summary, "goal_ms": GOAL_MS, "rounds": args.rounds}
        RESULT.write_text(json.dumps(result | {"turns": msgspec.to_builtins(samples)}) + "\n")


if __name__ == "__main__":
    main()
