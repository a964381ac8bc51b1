"""The process that compiles grammars: its limits, its ends, and turns that wait for it."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import text_models
from compiling import Compiling
from served import OPTIONS

from agentserve.config import EngineSettings
from agentserve.engine.compiler import CompilerProcess, compiler_environment
from agentserve.engine.jobs import Setup
from agentserve.engine.messages import Finished, Refused, Stats, Submit
from agentserve.engine.plan import pack
from agentserve.engine.thread import ThreadLink
from agentserve.model.prepare import prepare
from agentserve.sessions.grammar import response_tag

GOOD = response_tag({"type": "object", "properties": {"a": {"type": "integer"}}})
SLOW = response_tag({"type": "string", "pattern": "^(abc|[^x]){5000}$"})
WORKER = ["-m", "agentserve.model.grammar_worker"]


@pytest.fixture(scope="module")
def compiler():
    compiling = Compiling(text_models.smollm(), 49152)
    yield compiling
    compiling.close()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(reached, seconds=60.0):
    for _ in range(int(seconds * 100)):
        if reached():
            return
        time.sleep(0.01)
    raise AssertionError("not reached")


def test_it_imports_neither_torch_nor_transformers_and_opens_nothing(compiler):
    assert compiler.answer(GOOD).compiled is not None
    pid = compiler.process.pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "xgrammar" in maps
    assert "libtorch" not in maps
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert [line.split()[3:5] for line in limits.splitlines() if "open files" in line] == [
        ["0", "0"]
    ]
    secrets = {name for name in compiler_environment() if "KEY" in name or "TOKEN" in name}
    assert not secrets


def test_a_job_that_is_ended_takes_the_process_along_and_the_next_starts_another(compiler):
    assert compiler.answer(GOOD).compiled is not None
    pid = compiler.process.pid
    compiler.process.begin(900, SLOW)
    time.sleep(0.05)
    compiler.process.end()
    assert not compiler.process.ready
    assert compiler.answer(GOOD).compiled is not None
    assert compiler.process.pid != pid
    until(lambda: not is_running(pid))


def test_too_much_memory_ends_the_job_and_not_the_compiler():
    small = Compiling(text_models.smollm(), 49152, memory=128 << 20, cpu_s=60.0)
    try:
        words = "|".join(f"w{i}" for i in range(9000))
        answer = small.answer(response_tag({"type": "string", "pattern": f"^({words}){{9}}$"}))
        assert answer.compiled is None
        assert not answer.fault
        assert "memory" in answer.error
        assert small.answer(GOOD).compiled is not None
    finally:
        small.close()


def test_it_ends_with_the_pipe_also_in_the_middle_of_a_job(compiler):
    process = subprocess.Popen(
        [sys.executable, *WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=compiler_environment(),
    )
    with process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_compiler_that_is_closed_at_once_leaves_no_thread_in_a_library():
    before = set(threading.enumerate())
    process = Compiling(text_models.smollm(), 49152).process
    process.start()
    process.close()
    assert set(threading.enumerate()) <= before


def test_a_compiler_that_does_not_start_is_not_the_grammar_s_fault():
    process = CompilerProcess(
        ["-c", "raise SystemExit(3)"], lambda: Setup("{}", 1, 1.0), lambda data: None
    )
    answers = []
    process.begin(1, GOOD)
    until(lambda: answers.extend(process.poll()) or answers)
    assert [(answer.job, answer.fault) for answer in answers] == [(1, True)]
    process.end()


# The engine in a thread, with the real process


def submit(number, grammar=None, namespace="a", count=8):
    return Submit(number, number, 1, 0, pack([5, 6, number]), namespace, count, [], grammar=grammar)


class Turns:
    """Runs turns on an engine over the hash oracle with SmolLM2's real grammars."""

    def __init__(self, **settings):
        options = {**OPTIONS, "directory": str(prepare("smollm2-135m"))}
        limits = EngineSettings(check_invariants=True, **settings)
        self.link = ThreadLink("served_factories:oracle", options, limits)
        self.ends = {}
        self.stats = None

    async def until(self, *turns):
        while not set(turns) <= self.ends.keys():
            for event in await asyncio.wait_for(self.link.receive(), 120):
                if isinstance(event, Finished | Refused):
                    self.ends[event.turn] = event
                elif isinstance(event, Stats):
                    self.stats = event
        return [self.ends[turn] for turn in turns]


async def test_other_turns_run_while_a_grammar_is_compiled_and_only_that_turn_is_refused():
    turns = Turns(grammar_s=1.0)
    try:
        await turns.link.receive()
        turns.link.send(submit(1, SLOW))
        turns.link.send(submit(2, SLOW, namespace="b"))
        turns.link.send(submit(3, GOOD, namespace="c"))
        turns.link.send(submit(4))
        (plain,) = await turns.until(4)
        assert plain.reason == "length"
        assert not turns.ends.keys() & {1, 2, 3}
        first, second, good = await turns.until(1, 2, 3)
        assert (first.code, second.code) == ("bad_grammar", "bad_grammar")
        assert "longer than 1 s" in first.message
        assert good.reason == "length"
        assert (turns.stats.compilers_ended, turns.stats.grammars_compiled) == (1, 1)
        assert 0 < turns.stats.grammar_bytes <= turns.stats.grammar_limit
        turns.link.send(submit(5, SLOW))  # known by now
        turns.link.send(submit(6, GOOD))
        assert [type(end) for end in await turns.until(5, 6)] == [Refused, Finished]
        assert turns.stats.compilers_ended == 1
    finally:
        await turns.link.close()


async def test_an_engine_that_ends_takes_its_compiler_along():
    turns = Turns(grammar_s=60.0)
    await turns.link.receive()
    before = children()
    turns.link.send(submit(1, SLOW))
    turns.link.send(submit(2))
    await turns.until(2)
    until(lambda: children() - before)
    (pid,) = children() - before
    await turns.link.close()
    until(lambda: not is_running(pid))


def children():
    """Return the process ids of this process's compilers."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            words = (path.parent / "cmdline").read_text()
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and "grammar_worker" in words:
            found.add(int(path.parent.name))
    return found
