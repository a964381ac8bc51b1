"""The race against peers: equal work, its clock, its figures, and the pipe to its workers."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from served import served

from agentserve.client.aio import AsyncClient
from agentserve.config import ServerSettings
from agentserve.model.prepare import prepare
from agentserve.replay.generator import Workload, generate

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = Workload(sessions=2, turns=3, prompt=40, first=20, new=20, output=20, gap=0.01, seed=3)


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The package beside the other benchmarks can be imported."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    own = ("peers", "floor", "floor_rates", "circumstances")
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]


class Answering:
    """A system on a clock of the test's own: each turn takes 1 s, its first token 0.25 s."""

    name = "answering"

    def __init__(self, output):
        self.now = 0.0
        self.slept = []
        self._output = output

    async def turn(self, session, index, heard):
        from peers.system import Served

        self.now += 0.25
        heard()
        self.now += 0.75
        return Served(self._output)

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_the_races_have_the_sizes_that_they_are_known_by():
    from peers.workload import CASES, shared_prefix, token_turns

    small = msgspec.structs.replace(CASES["sixteen"].workload, sessions=2, turns=4)
    sessions = token_turns(small, prepare("smollm2-135m"))
    assert shared_prefix(sessions) == 1250
    assert {len(turn.new) for turns in sessions for turn in turns[1:]} <= {175, 176}
    assert {turn.output for turns in sessions for turn in turns} <= {32, 33}
    assert CASES["pressure"].workload == CASES["sixteen"].workload


def test_another_size_is_another_race():
    from peers.workload import CASES, sized

    case = CASES["sixteen"]
    assert sized(case, None, None).label == sized(case, 16, 20).label == "sixteen"
    assert sized(case, 2, 3).label == "sixteen-2x3"


def test_agentserve_computes_the_very_tokens_that_peers_are_sent():
    from peers.agents import Agents
    from peers.drive import play
    from peers.workload import token_turns

    sessions = token_turns(TINY, prepare("smollm2-135m"))

    async def race(port):
        async with AsyncClient(f"http://127.0.0.1:{port}") as client:
            agents = Agents(client, generate(TINY))
            await agents.warm_up()
            played = await play(agents, sessions)  # checks every length
            listed = (await client.sessions()).sessions
            opened = [await client.session(one.id, resume=True) for one in listed]
            return played, [(await one.transcript("tokens"))["tokens"] for one in opened]

    with served(ServerSettings(allow_force=True)) as server:
        played, logs = asyncio.run(race(server.port))
    assert len(played.turns) == TINY.sessions * TINY.turns
    for turns in sessions:
        prompt = turns[0].new
        (log,) = [log for log in logs if log[: len(prompt)] == prompt]
        end = 0
        for turn in turns:
            assert log[end : end + len(turn.new)] == turn.new
            end += len(turn.new) + turn.output
        assert end == len(log) + 1  # the last stop token is sampled and not logged


def test_a_turn_is_timed_from_its_request_and_a_session_waits_for_its_tools():
    from peers.drive import play
    from peers.workload import TokenTurn

    system = Answering(2)
    turns = [TokenTurn([1, 2], 2, 5.0), TokenTurn([3], 2, 7.0)]
    played = asyncio.run(play(system, [turns], lambda: system.now, system.sleep))
    assert [(turn.ttft_s, turn.turn_s) for turn in played.turns] == [(0.25, 1.0)] * 2
    assert system.slept == [5.0]
    figures = played.figures()
    assert figures["makespan_s"] == 7.0
    assert figures["turn_p50_s"] == 1.0
    assert "cached_share" not in figures


def test_less_work_than_the_others_did_is_a_failure():
    from peers.drive import play
    from peers.system import SystemFailed
    from peers.workload import TokenTurn

    system = Answering(1)
    with pytest.raises(SystemFailed, match="session 0, turn 0: 1 tokens instead of 2"):
        asyncio.run(play(system, [[TokenTurn([1], 2, 0.0)]], lambda: system.now, system.sleep))


def test_a_history_is_what_was_sent_and_what_was_sampled():
    from peers.system import Histories
    from peers.workload import TokenTurn

    histories = Histories([[TokenTurn([1, 2], 1, 0.0), TokenTurn([4], 1, 0.0)]])
    assert histories.prompt(0, 0) == [1, 2]
    histories.said(0, [3])
    assert histories.prompt(0, 1) == [1, 2, 3, 4]


def test_the_floor_is_of_the_tokens_that_are_computed():
    from peers.floors import turn_work
    from peers.workload import TokenTurn

    first, second = turn_work([TokenTurn([0] * 10, 3, 1.0), TokenTurn([0] * 5, 3, 0.0)], 4)
    assert (first.cached, first.new, first.output, first.gap_s) == (4, 6, 3, 1.0)
    assert (second.cached, second.new) == (12, 6)  # the last sampled token and five more
    assert second.cached + second.new == 10 + 3 + 5


def run(system, makespan, case="single", turn=1.0):
    figures = {"makespan_s": makespan, "ttft_p50_s": 0.5, "turn_p50_s": turn}
    return {"case": case, "system": system, "figures": figures}


def test_ratios_compare_medians_with_the_best_peer_of_each_figure():
    from peers.results import summarise

    runs = [
        *(run("agentserve", seconds) for seconds in (8.0, 9.0, 30.0)),
        *(run("openvino", seconds, turn=0.5) for seconds in (12.0, 18.0)),
        run("vllm", 20.0, turn=0.25),
        {"case": "single", "system": "llama.cpp", "failure": "no server"},
    ]
    single = summarise(runs, {"single": 4.0})["single"]
    assert single["agentserve"] == {
        "makespan_s": 9.0,
        "ttft_p50_s": 0.5,
        "turn_p50_s": 1.0,
        "runs": 3,
    }
    assert single["llama.cpp"] == {"runs": 0, "failure": "no server"}
    assert single["floor_s"] == 4.0
    assert single["best_peer"] == "openvino"
    ratio = single["ratio_to_best_peer"]["agentserve"]
    assert ratio == {"makespan_s": 0.6, "ttft_p50_s": 1.0, "turn_p50_s": 4.0}


def test_without_a_peer_there_is_no_ratio():
    from peers.results import summarise, table

    summary = summarise([run("agentserve", 8.0)], {})
    assert summary["single"]["ratio_to_best_peer"] is None
    assert summary["single"]["best_peer"] is None
    assert any(line.split()[:2] == ["agentserve", "8.00"] for line in table(summary))


def test_a_peer_that_was_stopped_counts_with_the_time_that_it_had():
    from peers.results import summarise, table

    stopped = {"case": "single", "system": "vllm", "failure": "not done", "limit_s": 32.0}
    broken = {"case": "single", "system": "openvino", "failure": "no room"}
    alone = summarise([run("agentserve", 8.0), stopped, broken], {})["single"]
    assert alone["vllm"]["makespan_at_least_s"] == 32.0
    assert alone["makespan_ratio_at_most"] == {"agentserve": 0.25}
    assert alone["ratio_to_best_peer"] is None
    summary = summarise([run("agentserve", 8.0), stopped, run("llama.cpp", 16.0)], {})
    assert summary["single"]["makespan_ratio_at_most"] == {"agentserve": 0.5}
    assert any("at most" in line for line in table(summary))
    finished = summarise([run("agentserve", 8.0), broken, run("llama.cpp", 16.0)], {})["single"]
    assert finished["makespan_ratio_at_most"] is None


def test_a_result_file_is_continued(tmp_path):
    from peers.results import Results

    path = tmp_path / "peers.json"
    first = Results(path, {"date": "monday"})
    first.add_floor("single", {"seconds": 4.0})
    first.add(run("agentserve", 8.0))
    second = Results(path, {"date": "tuesday"})
    second.add(run("vllm", 16.0))
    kept = json.loads(path.read_text())
    assert kept["date"] == "tuesday"
    assert [one["system"] for one in kept["runs"]] == ["agentserve", "vllm"]
    assert kept["summary"]["single"]["ratio_to_best_peer"]["agentserve"]["makespan_s"] == 0.5
    assert kept["summary"]["single"]["floor_s"] == 4.0


def test_the_pipe_puts_lines_together_and_keeps_prints_out(tmp_path):
    from peers.workers.protocol import Pipe

    ours, theirs = os.pipe()
    with open(ours, "rb") as source, open(tmp_path / "said", "wb") as target:
        pipe = Pipe(source, target)
        os.write(theirs, b'{"turn": 1}\n{"tu')
        assert pipe.messages(wait=True) == [{"turn": 1}]
        assert pipe.messages(wait=False) == []
        os.write(theirs, b'rn": 2}\n')
        assert pipe.message() == {"turn": 2}
        os.close(theirs)
        assert pipe.messages(wait=True) == []
        assert pipe.ended
        pipe.say(event="done", turn=2)
    assert (tmp_path / "said").read_bytes() == b'{"event": "done", "turn": 2}\n'


def places(root):
    from peers.system import Places

    (root / "models").mkdir()
    (root / "models" / "smollm2-bf16").symlink_to(prepare("smollm2-135m"))
    return Places(root, root / "logs", 2)


@pytest.mark.model
def test_a_worker_plays_stories_inside_its_process(tmp_path):
    from peers.agentserve_embedded import AgentserveEmbedded
    from peers.drive import play
    from peers.workload import Case, token_turns

    async def race():
        system = AgentserveEmbedded()
        case = Case("single", TINY, kv_tokens=2048, host_bytes=0)
        sessions = token_turns(TINY, prepare("smollm2-135m"))
        try:
            await system.start(case, sessions, places(tmp_path))
            return await play(system, sessions), system.about()
        finally:
            await system.stop()

    played, about = asyncio.run(race())
    assert [(turn.session, turn.index) for turn in played.turns] == [
        (session, index) for session in range(2) for index in range(3)
    ]
    assert all(0 < turn.ttft_s < turn.turn_s for turn in played.turns)
    assert all((turn.served.cached or 0) > 0 for turn in played.turns if turn.index)
    assert about["version"]


def test_a_worker_that_cannot_start_says_why(tmp_path):
    from peers.system import SystemFailed
    from peers.worker_link import WorkerLink

    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(SystemFailed, match="ended with status 1: no such model"):
        asyncio.run(WorkerLink.start(command, os.environ, tmp_path / "log"))


def check_for_a_while(child):
    for _ in range(500):
        child.check()
        time.sleep(0.02)


def test_a_server_that_ends_is_noticed_and_its_group_is_gone(tmp_path):
    from peers.system import Child, SystemFailed

    ends = Child([sys.executable, "-c", "print('no port')"], os.environ, tmp_path / "ends")
    stays = Child(
        [sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "stays"
    )

    with pytest.raises(SystemFailed, match="ended with status 0: no port"):
        check_for_a_while(ends)
    stays.check()
    asyncio.run(stays.stop())
    asyncio.run(ends.stop())
    with pytest.raises(SystemFailed, match="ended with status -15"):
        stays.check()


def test_weights_are_rounded_as_torch_rounds_them():
    from peers.weights import bfloat16_bits, rounded

    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    values[:3] = [0.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8]  # ties, to both sides
    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(bfloat16_bits(values), expected.view(torch.uint16).numpy())
    assert np.array_equal(rounded(values), expected.float().numpy())


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_gguf_is_copied_with_its_matrices_in_16_bits(tmp_path, dtype):
    from peers.weights import rounded, write_gguf

    source = np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "source.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tensor("token_embd.weight", source)
    writer.add_tensor("output_norm.weight", source[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_gguf(tmp_path / "source.gguf", tmp_path / "target.gguf", dtype)
    copied = GGUFReader(tmp_path / "target.gguf")
    assert copied.get_field("tokenizer.ggml.tokens").contents() == ["a", "b"]
    assert copied.get_field("llama.rope.freq_base").contents() == 10000.0
    found = {one.name: one for one in copied.tensors}
    matrix = found["token_embd.weight"]
    assert matrix.tensor_type.name.lower() == dtype
    assert np.array_equal(dequantize(matrix.data, matrix.tensor_type), rounded(source))
    assert np.array_equal(found["output_norm.weight"].data, source[0])
