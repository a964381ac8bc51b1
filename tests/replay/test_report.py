"""The report's arithmetic, on a list made by hand."""

import io
import json

import msgspec
import pytest
from rich.console import Console

from agentserve.replay.report import Report, TurnRecord, percentile, print_report, reuse


def record(index: int, session: int = 1, latency: float = 1.0) -> TurnRecord:
    """Turn `index` adds 60 tokens to a history of 100 a turn; 40 of those are output."""
    before = 100 * (index - 1)
    return TurnRecord(
        session=session,
        index=index,
        action="look()",
        input_tokens=before + 60,
        new_tokens=60,
        cached_tokens=before,
        output_tokens=40,
        ttft_s=latency / 4,
        latency_s=latency,
        queue_s=0.1,
        restore_s=0.05,
        model_s=0.6,
        tool_s=2.0,
    )


def test_tokens_are_summed_and_the_stateless_engine_computes_every_input_again():
    totals = Report("s", [record(index) for index in range(1, 11)], 30.0).totals()
    assert (totals.new_tokens, totals.prefill_computed) == (600, 600)
    assert totals.cached_tokens == 100 * 45
    assert totals.stateless_prefill == 600 + 100 * 45
    assert totals.output_tokens == 400


def test_the_time_of_a_turn_is_split_without_a_rest():
    turn = record(1)
    assert turn.server_s == pytest.approx(1.0 - 0.1 - 0.05 - 0.6)
    totals = Report("s", [turn, record(2)], 6.0).totals()
    parts = (totals.model_s, totals.queue_s, totals.restore_s, totals.server_s)
    assert sum(parts) == pytest.approx(2.0)
    assert totals.tools_s == 4.0


def test_rounded_phases_that_exceed_the_latency_leave_no_negative_server_time():
    assert record(1, latency=0.5).server_s == 0.0


def test_the_first_and_last_ten_turns_are_taken_from_every_session():
    records = [
        record(index, session, latency=float(index + 100 * session))
        for session in (1, 2)
        for index in range(1, 31)
    ]
    first, last = Report("s", records, 1.0).edges()
    assert sorted(first) == [*range(101, 111), *range(201, 211)]
    assert sorted(last) == [*range(121, 131), *range(221, 231)]


def test_percentiles_interpolate():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([float(value) for value in range(101)], 95) == 95.0
    assert percentile([7.0], 95) == 7.0


def test_the_json_has_a_list_of_turns_and_the_totals():
    document = json.loads(Report("s", [record(1), record(2)], 6.0, ["session 1: why"]).to_json())
    assert document["turns"][1]["prefill_computed"] == document["turns"][1]["new_tokens"] == 60
    assert {"cached_tokens", "ttft_s", "latency_s", "tool_s"} <= set(document["turns"][0])
    assert document["totals"]["turns"] == 2
    assert document["incomplete"] == ["session 1: why"]


def test_a_person_reads_what_was_not_measured_and_the_count_of_turns_last():
    text = io.StringIO()
    report = Report("s", [record(index) for index in range(1, 101)], 300.0, ["session 1: [x]"])
    print_report(report, Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert lines[-1] == "turns: 100"
    assert "ended early: session 1: [x]" in lines
    assert "computed from the token counts, not measured" in " ".join(text.getvalue().split())
    assert max(map(len, lines)) <= 80


def test_tokens_that_sessions_share_and_tokens_computed_again_are_explained():
    same = record(1)
    assert reuse([same]) == ["In every turn the engine computed the new tokens and no other."]
    shared = msgspec.structs.replace(same, cached_tokens=48)
    again = msgspec.structs.replace(record(2), cached_tokens=90, recomputed={"evicted": 10})
    assert reuse([same, shared, again]) == [
        "Computed less than new by 48 tokens: sessions shared a prefix.",
        "Computed again: 10 tokens (10 evicted).",
    ]
