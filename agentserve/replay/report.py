"""What a replay measured: a record per turn, totals, and the text that a person reads."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

EDGE = 10  # turns at each end of a session that are compared
ENDED_EARLY = 0.9  # of the tokens asked for: with fewer the endpoint did less work


class Played(msgspec.Struct, frozen=True):
    """The work of a replay: two replays of equal work can be compared."""

    digest: str  # of every session's content
    sessions: int
    turns: int
    speed: float | None  # tool waits were divided by it; None: not waited for
    free: bool = False  # the model answered for itself


class Run(msgspec.Struct, frozen=True):
    """Who did the work."""

    dialect: str = "session"
    url: str = ""
    model: str = ""


class TurnRecord(msgspec.Struct, frozen=True):
    """One turn as the client saw it (`_s`: seconds) and as the server counted it (tokens)."""

    session: int
    index: int  # in its session, from 1
    action: str  # what the model did, in one line
    input_tokens: int
    new_tokens: int  # in the chat dialect: what the prompt grew by since the turn before
    cached_tokens: int
    output_tokens: int
    ttft_s: float  # request sent to first event of the output
    latency_s: float  # request sent to turn done
    queue_s: float = 0.0  # before its own prefill: no place yet, or a step of others was running
    restore_s: float = 0.0
    model_s: float = 0.0  # prefill and decode
    tool_s: float = 0.0  # the tools that this turn called
    recomputed: dict[str, int] = {}  # tokens computed again, by reason
    restored_tokens: int = 0  # cached tokens whose KV came back from the host tier
    asked_tokens: int | None = None  # output that was asked for, where it cannot be forced

    @property
    def prefill_computed(self) -> int:
        """Input tokens that the engine computed."""
        return self.input_tokens - self.cached_tokens

    @property
    def server_s(self) -> float:
        """What is left of the latency: HTTP, templates, tokenizing, parsing."""
        return max(self.latency_s - self.queue_s - self.restore_s - self.model_s, 0.0)


class Totals(msgspec.Struct, frozen=True):
    """A whole replay. Seconds of phases are sums over turns; sessions overlap in `makespan_s`."""

    sessions: int
    turns: int
    makespan_s: float
    turn_p50_s: float
    turn_p95_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    first_turns_p50_s: float
    last_turns_p50_s: float
    model_s: float
    tools_s: float
    queue_s: float
    restore_s: float
    server_s: float
    new_tokens: int
    prefill_computed: int
    cached_tokens: int
    output_tokens: int
    stateless_prefill: int  # computed from the token counts, not measured


class Report(msgspec.Struct, frozen=True):
    """A finished replay; `incomplete` says why sessions ended before their story."""

    scenario: str
    records: list[TurnRecord]
    makespan_s: float
    incomplete: list[str] = []
    work: Played | None = None
    run: Run = Run()
    unknown: frozenset[str] = frozenset()  # fields of records that the server does not report

    def totals(self) -> Totals:
        """Return the sums and percentiles over all turns. Needs at least one record."""
        records = self.records
        latencies = [record.latency_s for record in records]
        first, last = self.edges()
        return Totals(
            sessions=len({record.session for record in records}),
            turns=len(records),
            makespan_s=self.makespan_s,
            turn_p50_s=percentile(latencies, 50),
            turn_p95_s=percentile(latencies, 95),
            ttft_p50_s=percentile([record.ttft_s for record in records], 50),
            ttft_p95_s=percentile([record.ttft_s for record in records], 95),
            first_turns_p50_s=percentile(first, 50),
            last_turns_p50_s=percentile(last, 50),
            model_s=sum(record.model_s for record in records),
            tools_s=sum(record.tool_s for record in records),
            queue_s=sum(record.queue_s for record in records),
            restore_s=sum(record.restore_s for record in records),
            server_s=sum(record.server_s for record in records),
            new_tokens=sum(record.new_tokens for record in records),
            prefill_computed=sum(record.prefill_computed for record in records),
            cached_tokens=sum(record.cached_tokens for record in records),
            output_tokens=sum(record.output_tokens for record in records),
            stateless_prefill=sum(record.input_tokens for record in records),
        )

    def edges(self) -> tuple[list[float], list[float]]:
        """Return the latencies of the first and of the last ten turns of every session."""
        first, last = [], []
        for session in {record.session for record in self.records}:
            turns = [record.latency_s for record in self.records if record.session == session]
            first += turns[:EDGE]
            last += turns[-EDGE:]
        return first, last

    def to_json(self) -> bytes:
        """Return {scenario, run, work, turns: [...], totals: {...}, incomplete} as indented JSON.

        What is not known is null.
        """
        turns = [
            msgspec.to_builtins(record)
            | {"prefill_computed": record.prefill_computed, "server_s": record.server_s}
            for record in self.records
        ]
        document = {
            "scenario": self.scenario,
            "run": self.run,
            "work": self.work,
            "turns": [self._known(turn) for turn in turns],
            "totals": self._known(msgspec.to_builtins(self.totals())),
            "incomplete": self.incomplete,
        }
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"

    def _known(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: None if name in self.unknown else value for name, value in fields.items()}


def percentile(values: list[float], percent: float) -> float:
    """Return the linearly interpolated percentile of at least one value."""
    return float(np.percentile(values, percent))


def print_report(report: Report, console: Console) -> None:
    """Print the report for a person. The last line is `turns: N`."""
    totals = report.totals()
    tables = [_speed_table(totals)]
    if report.run.dialect == "session":
        tables += [_time_table(totals), _token_table(totals)]
        remarks = ["* computed from the token counts, not measured", "", *reuse(report.records)]
    else:
        tables += [_outside_table(report)]
        remarks = ["", *shortfall(report.records)]
    for table in tables:
        console.print()
        console.print(table)
    for line in remarks:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in report.incomplete:
        console.print(f"ended early: {line}", markup=False, highlight=False)
    console.print(f"turns: {totals.turns}", markup=False, highlight=False)


def reuse(records: list[TurnRecord]) -> list[str]:
    """Say how the tokens that the engine computed differ from the new ones, and why."""
    shared = sum(max(record.new_tokens - record.prefill_computed, 0) for record in records)
    again: Counter[str] = Counter()
    for record in records:
        again.update(record.recomputed)
    lines = []
    if shared:
        lines.append(f"Computed less than new by {shared:,} tokens: sessions shared a prefix.")
    if again:
        reasons = ", ".join(f"{tokens:,} {reason}" for reason, tokens in again.items())
        lines.append(f"Computed again: {again.total():,} tokens ({reasons}).")
    return lines or ["In every turn the engine computed the new tokens and no other."]


def shortfall(records: list[TurnRecord]) -> list[str]:
    """Say how far the outputs are from the tokens asked for, where the work was less than that."""
    asked = sum(record.asked_tokens or 0 for record in records)
    made = sum(record.output_tokens for record in records)
    if not made or made >= ENDED_EARLY * asked:
        return []
    return [
        f"The endpoint made {made:,} tokens of {asked:,} asked for, so it did less work than the "
        "log says: make it go on after its own end, with --extra '{\"ignore_eos\": true}' where it "
        "knows that."
    ]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, min_width=66)
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _speed_table(totals: Totals) -> Table:
    table = _table("How fast", "", "p50", "p95")
    table.add_row("a turn, request to answer", _s(totals.turn_p50_s), _s(totals.turn_p95_s))
    table.add_row("until its first output (TTFT)", _s(totals.ttft_p50_s), _s(totals.ttft_p95_s))
    table.add_row(f"first {EDGE} turns of a session", _s(totals.first_turns_p50_s), "")
    table.add_row(f"last {EDGE} turns of a session", _s(totals.last_turns_p50_s), "")
    return table


def _time_table(totals: Totals) -> Table:
    parts = (
        ("model: prefill and decode", totals.model_s),
        ("tools", totals.tools_s),
        ("waiting: queue, steps of other sessions", totals.queue_s),
        ("restore: saved KV copied back", totals.restore_s),
        ("server and client: HTTP, templates, text", totals.server_s),
    )
    whole = sum(seconds for _, seconds in parts)
    name = "session" if totals.sessions == 1 else f"sum of {totals.sessions} sessions"
    table = _table(
        f"Where the time went ({name}, {totals.makespan_s:.1f} s by the clock)",
        "",
        "seconds",
        "share",
    )
    for label, seconds in parts:
        table.add_row(label, f"{seconds:.2f}", f"{seconds / whole:.1%}" if whole else "")
    return table


def _outside_table(report: Report) -> Table:
    """Return what is seen of an endpoint that says nothing of its phases."""
    totals, records = report.totals(), report.records
    waits = f"{sum(record.latency_s for record in records):.1f} s"
    table = _table(f"The work ({totals.makespan_s:.1f} s by the clock)", "", "")
    table.add_row("waiting for the endpoint, sum", waits)
    table.add_row("tools, sum", f"{totals.tools_s:.1f} s")
    for label, field, count in (
        ("tokens of the prompts", "input_tokens", totals.stateless_prefill),
        ("of these from a cache", "cached_tokens", totals.cached_tokens),
        ("tokens of output", "output_tokens", totals.output_tokens),
    ):
        table.add_row(label, "not reported" if field in report.unknown else f"{count:,}")
    return table


def _token_table(totals: Totals) -> Table:
    table = _table("Tokens of input", "", "tokens")
    table.add_row("new in these turns", f"{totals.new_tokens:,}")
    table.add_row("computed by the engine (prefill)", f"{totals.prefill_computed:,}")
    table.add_row("taken from the sessions' KV cache", f"{totals.cached_tokens:,}")
    table.add_row("an engine that keeps nothing would compute *", f"{totals.stateless_prefill:,}")
    ratio = totals.stateless_prefill / totals.prefill_computed if totals.prefill_computed else 0.0
    table.add_row("times the prefill of this engine *", f"{ratio:.1f}")
    return table


def _s(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"
