"""What only a process can do: be killed, be orphaned, be idle."""

import asyncio
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from seam_factories import OPTIONS, ORACLE
from seam_play import down, play, ready, submit, tokens_of, until

from agentserve.clock import VirtualClock
from agentserve.config import EngineSettings, kernel_cache
from agentserve.engine.drive import EngineSpec
from agentserve.engine.frames import encode_frame
from agentserve.engine.messages import Tokens
from agentserve.engine.process import ProcessLink, engine_environment, usable_cores

SETTINGS = EngineSettings()


@pytest.fixture
async def open_link():
    links = []

    def start(factory=ORACLE, clock=None, **options):
        link = ProcessLink(factory, OPTIONS | options, SETTINGS, clock)
        links.append(link)
        return link

    yield start
    for link in links:
        await link.close()


@pytest.fixture
def child():
    """An engine process with our end of its socket, spec not yet sent."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "agentserve.engine", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
    )
    theirs.close()
    ours.settimeout(60)
    yield process, ours
    ours.close()
    process.kill()
    process.wait()
    process.stderr.close()


async def test_a_process_killed_in_the_middle_of_a_turn_is_replaced_and_gives_the_same_tokens(
    open_link,
):
    prompt = list(range(2, 30))
    twin = open_link()
    await ready(twin)
    expected = await tokens_of(twin, submit(1, 1, prompt, max_tokens=20, stop_ids=[]))

    clock = VirtualClock()
    link = open_link("seam_factories:slow", clock, step_s=0.01)
    await ready(link)
    first = link.pid
    link.send(submit(1, 1, prompt, max_tokens=400, stop_ids=[]))
    await until(link, lambda event: isinstance(event, Tokens))
    link.kill()
    assert (await down(link)).reason == "the engine process was killed by SIGKILL"
    assert link.pid is None
    clock.advance(10)
    assert (await ready(link)).incarnation == 2
    assert link.pid not in (None, first)
    (refused,) = await play(link, [submit(2, 1, [9], keep=28)])
    assert refused.code == "unknown_sequence"
    assert await tokens_of(link, submit(3, 1, prompt, max_tokens=20, stop_ids=[])) == expected


async def test_a_segmentation_fault_is_a_death_with_its_signal(open_link):
    link = open_link("seam_factories:suicidal", VirtualClock(), poison=77)
    await ready(link)
    link.send(submit(1, 1, [77]))
    assert (await down(link)).reason == "the engine process was killed by SIGSEGV"


async def test_closing_the_link_ends_the_process_even_in_the_middle_of_a_step(open_link):
    link = open_link("seam_factories:slow", step_s=3600)
    await ready(link)
    link.send(submit(1, 1, [2, 3]))
    pid = link.pid
    await link.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
async def test_the_signals_that_a_terminal_sends_to_all_are_left_to_the_parent(open_link, number):
    import signal

    link = open_link()
    await ready(link)
    os.kill(link.pid, getattr(signal, number))
    assert len(await tokens_of(link, submit(1, 1, [2, 3], max_tokens=3, stop_ids=[]))) == 3
    assert (link.info is not None, link.failure) == (True, None)


def test_a_child_whose_parent_goes_away_exits_by_itself(child):
    process, ours = child
    ours.sendall(encode_frame(EngineSpec(ORACLE, OPTIONS, SETTINGS)))
    assert ours.recv(4)
    ours.close()
    assert process.wait(60) == 0


def test_a_child_whose_parent_goes_away_before_the_spec_exits_too(child):
    process, ours = child
    ours.close()
    assert process.wait(60) == 0


@pytest.mark.parametrize("junk", [struct.pack("<I", 2**32 - 1), struct.pack("<I", 3) + b"abc"])
def test_a_malformed_frame_ends_the_child(child, junk):
    process, ours = child
    ours.sendall(encode_frame(EngineSpec(ORACLE, OPTIONS, SETTINGS)))
    ours.sendall(junk)
    assert process.wait(60) == 2
    assert b"frame" in process.stderr.read()


def test_an_idle_child_sleeps(child):
    process, ours = child
    ours.sendall(encode_frame(EngineSpec(ORACLE, OPTIONS, SETTINGS)))
    assert ours.recv(65536)  # Ready
    before = _cpu_seconds(process.pid)
    time.sleep(1.5)
    assert _cpu_seconds(process.pid) - before < 0.5


def _cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_the_engine_goes_on_while_the_parent_reads_nothing(open_link):
    link = open_link()
    await ready(link)
    link.send(submit(1, 1, [2, 3], max_tokens=300, stop_ids=[]))
    await asyncio.sleep(1.0)
    assert len(await tokens_of(link, submit(2, 2, [4, 5], max_tokens=2, stop_ids=[]))) >= 2


def test_the_environment_is_set_for_libraries_that_read_it_when_they_load(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTSERVE_CACHE", str(tmp_path))
    environment = engine_environment({"HOME": "/h", "PYTHONPATH": "/own"}, 0)
    assert environment["OMP_NUM_THREADS"] == str(usable_cores())
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert int(environment["GOMP_SPINCOUNT"]) > 0
    assert environment["NUMBA_THREADING_LAYER"] == "omp"
    assert Path(environment["NUMBA_CACHE_DIR"]).parent == tmp_path / "numba"
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["HOME"] == "/h"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == "/own"


def test_compiled_kernels_are_kept_apart_for_each_text_of_the_kernels(tmp_path, monkeypatch):
    spec = find_spec("agentserve_kernels")
    copy = tmp_path / "kernels"
    shutil.copytree(spec.submodule_search_locations[0], copy)
    before = kernel_cache()
    spec = SimpleNamespace(submodule_search_locations=[str(copy)])
    monkeypatch.setattr("agentserve.config.find_spec", lambda _name: spec)
    assert kernel_cache() == before
    source = copy / "tiles.py"
    source.write_text(source.read_text() + "\n")
    assert kernel_cache() != before


def test_the_users_own_thread_count_wins_over_the_default_and_an_option_over_both():
    assert engine_environment({"OMP_NUM_THREADS": "3"}, 0)["OMP_NUM_THREADS"] == "3"
    assert engine_environment({"OMP_NUM_THREADS": "3"}, 1)["OMP_NUM_THREADS"] == "1"


def test_an_engine_child_on_the_oracle_and_its_parent_never_import_torch(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "from agentserve.config import EngineSettings\n"
        "from agentserve.engine.process import ProcessLink\n"
        "from seam_factories import OPTIONS, ORACLE\n"
        "from seam_play import ready, submit, tokens_of\n"
        "async def main():\n"
        "    link = ProcessLink(ORACLE, OPTIONS, EngineSettings())\n"
        "    await ready(link)\n"
        "    print(len(await tokens_of(link, submit(1, 1, [2, 3], stop_ids=[]))))\n"
        "    await link.close()\n"
        "asyncio.run(main())\n"
        "print('torch' in sys.modules)\n"
    )
    out = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.split() == ["6", "False"]
