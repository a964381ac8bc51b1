"""Closed-loop agents on the hash oracle with real sessions: what is counted with and without a host
tier."""

import io

import msgspec
import pytest
from rich.console import Console
from served import served

from agentserve.config import ServerSettings
from agentserve.replay.agents import AgentsRun, Tiers, play, read_counters
from agentserve.replay.compare import AGENTS, DEVICE_TOKENS, comparison, conclusion
from agentserve.replay.generator import Workload
from agentserve.replay.report import Report, TurnRecord

WORKLOAD = Workload(sessions=4, turns=5, prompt=40, first=120, new=20, output=16, gap=0.01)
BLOCK = 16
CELL = 8  # bytes of a token in the oracle's KV


class Count:
    """Counts the turns that it is shown."""

    turns = 0

    def heard(self, user: str) -> None:
        """Take what the user says."""

    def turn(self, record: TurnRecord) -> None:
        """Count a turn."""
        self.turns += 1


async def run(device: int, host: int = 0, workload: Workload = WORKLOAD) -> AgentsRun:
    """Let agents play on a server with room for so many tokens."""
    blocks = {"num_blocks": device // BLOCK, "host_blocks": host // BLOCK}
    with served(ServerSettings(allow_force=True), **blocks) as server:
        count = Count()
        result = await play(f"http://127.0.0.1:{server.port}", workload, count)
        assert count.turns == workload.sessions * workload.turns
        return result


async def test_with_room_for_all_nothing_is_computed_twice_and_nothing_moves():
    result = await run(device=16384)
    figures = result.figures()
    shared = figures.new_tokens - figures.prefill_computed
    assert figures.recomputed == figures.saved_bytes == figures.loaded_bytes == 0
    assert shared % BLOCK == 0  # of the prompt, in every session but the first
    assert 0 < result.working_set() < sum(r.input_tokens for r in result.report.records)
    assert 0 < figures.ttft_p50_s <= figures.turn_p50_s <= figures.turn_p95_s
    assert 0 < figures.tool_ttft_p50_s <= figures.tool_ttft_p95_s <= figures.makespan_s


async def test_without_a_host_tier_what_had_to_leave_is_computed_again():
    figures = (await run(device=640)).figures()
    assert figures.recomputed > 0
    assert figures.prefill_computed > figures.new_tokens
    assert figures.saved_bytes == figures.loaded_bytes == figures.restored_tokens == 0


async def test_with_a_host_tier_it_comes_back_and_only_the_new_is_computed():
    figures = (await run(device=640, host=16384)).figures()
    assert figures.recomputed == 0
    assert figures.prefill_computed <= figures.new_tokens
    assert figures.restored_tokens > 0
    # Whole blocks are moved, and more of them than turns use: a hit ends before the last token.
    assert figures.loaded_bytes >= figures.restored_tokens * CELL
    assert figures.saved_bytes > 0


async def test_the_second_demo_has_room_for_two_of_its_agents():
    workload = msgspec.structs.replace(AGENTS, gap=0.0)
    result = await run(device=16384, workload=workload)
    first = max(r.cached_tokens for r in result.report.records if r.index == 1)
    two = first + (result.working_set() - first) * 2 / workload.sessions
    assert two == pytest.approx(DEVICE_TOKENS, rel=0.1)


def test_samples_are_read_by_name_and_label_and_histograms_are_left_out():
    text = """\
# TYPE turns counter
turns_total{status="completed"} 3.0
# TYPE running gauge
running 2.0
# TYPE wait_seconds histogram
wait_seconds_bucket{le="+Inf"} 1.0
wait_seconds_count 1.0
wait_seconds_sum 0.5
"""
    assert read_counters(text) == {"turns_total{status=completed}": 3.0, "running": 2.0}


def test_tiers_are_given_to_the_server_in_bytes():
    assert Tiers("lru+host", 10, 40).options(token_bytes=100) == (
        *("--kv-policy", "lru+host", "--kv-device", "1000", "--kv-host", "4000"),
    )


def test_the_comparison_shows_both_runs_and_bytes_as_tokens():
    def figures(ttft: float, again: int, moved: int):
        records = [
            TurnRecord(1, index, "look()", 60, 60, 0, 16, ttft, 2.0, recomputed={"evicted": again})
            for index in (1, 2)
        ]
        counters = {
            "agentserve_tokens_total{kind=prefill}": 120.0 + 2 * again,
            "agentserve_copied_bytes_total{kind=save}": 2.0 * moved,
            "agentserve_copied_bytes_total{kind=load}": float(moved),
            "agentserve_copy_seconds_total{kind=save}": 0.5,
            "agentserve_copy_seconds_total{kind=load}": 0.25,
        }
        return AgentsRun(Report("s", records, 9.0), counters).figures()

    before, after = figures(1.5, 700, 0), figures(0.25, 0, 5000)
    assert after.copy_s == 0.75
    text = io.StringIO()
    Console(file=text, width=80).print(comparison(before, after, token_bytes=10))
    rows = [line.split("  ") for line in text.getvalue().splitlines()]
    shown = {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert shown["TTFT after a tool result, p50"] == ["1.50 s", "0.25 s"]
    assert shown["tokens computed in prefill"] == ["1,520", "120"]
    assert shown["of these, computed before"] == ["1,400", "0"]
    assert shown["tokens moved to the host tier"] == ["0", "1,000"]
    assert shown["tokens moved back"] == ["0", "500"]
    said = conclusion(before, after)
    assert f"{before.recomputed:,} tokens a second time, the default {after.recomputed:,}" in said
