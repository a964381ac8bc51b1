"""`agentserve report`: two reports of the same work, side by side."""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentserve.replay.report import ENDED_EARLY, Played, Run

Number = float | None


class Totals(msgspec.Struct, frozen=True):
    """The totals that are compared; None where the server did not report it."""

    makespan_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    turn_p50_s: float
    turn_p95_s: float
    turns: int
    stateless_prefill: int | None  # tokens of all prompts
    cached_tokens: int | None
    output_tokens: int | None


class Saved(msgspec.Struct, frozen=True):
    """A report as `--json` wrote it."""

    scenario: str
    totals: Totals
    turns: list[dict[str, Any]] = []
    run: Run = Run()
    work: Played | None = None
    incomplete: list[str] = []


class Row(msgspec.Struct, frozen=True):
    """A figure of both runs; `ratio` is the second by the first."""

    name: str
    first: Number
    second: Number
    ratio: Number
    unit: str = ""


def load_report(path: Path) -> Saved:
    """Read a report. Raises ValueError naming the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Saved)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a report of `agentserve replay --json`: {error}") from None


def output_lengths(path: Path) -> dict[tuple[int, int], int]:
    """Return the tokens that each turn of a saved report put out, by session and turn.

    Raises ValueError naming the file.
    """
    try:
        found = {
            (int(turn["session"]), int(turn["index"])): int(turn["output_tokens"])
            for turn in load_report(path).turns
        }
    except (KeyError, TypeError):
        found = {}
    if not found:
        raise ValueError(f"{path}: the report has no output tokens of its turns")
    return found


def differences(first: Saved, second: Saved) -> list[str]:
    """Say why the two cannot be compared as equal work; nothing when they can."""
    reasons = []
    for name, saved in (("the first", first), ("the second", second)):
        if saved.work is None:
            reasons.append(f"{name} does not say what was played")
        if saved.incomplete:
            reasons.append(f"{len(saved.incomplete)} sessions of {name} ended early")
    if first.work is None or second.work is None:
        return reasons
    one, other = first.work, second.work
    if one.digest != other.digest:
        sizes = (f"{work.sessions} sessions, {work.turns} turns" for work in (one, other))
        reasons.append("they played other workloads ({} and {})".format(*sizes))
    if one.speed != other.speed:
        reasons.append(f"tool waits ran at speed {_speed(one)} and {_speed(other)}")
    if one.free != other.free:
        reasons.append("in one of them the model answered for itself")
    return reasons


def uneven(first: Saved, second: Saved) -> list[str]:
    """Say that the outputs differ in length, where that explains a part of the times."""
    one, other = first.totals.output_tokens, second.totals.output_tokens
    if one is None or other is None or min(one, other) >= ENDED_EARLY * max(one, other):
        return []
    return [
        "the outputs are of other lengths (replay with --lengths, and have the endpoint go on "
        "after its own end)"
    ]


def rows(first: Saved, second: Saved) -> list[Row]:
    """Return the figures in the order in which they are read."""
    one, other = first.totals, second.totals
    return [
        _row("makespan", one.makespan_s, other.makespan_s, "s"),
        _row("TTFT p50", one.ttft_p50_s, other.ttft_p50_s, "s"),
        _row("TTFT p95", one.ttft_p95_s, other.ttft_p95_s, "s"),
        _row("turn p50", one.turn_p50_s, other.turn_p50_s, "s"),
        _row("turn p95", one.turn_p95_s, other.turn_p95_s, "s"),
        _row("turns", one.turns, other.turns),
        _row("tokens of the prompts", one.stateless_prefill, other.stateless_prefill),
        _row("of these from a cache", one.cached_tokens, other.cached_tokens),
        _row("tokens of output", one.output_tokens, other.output_tokens),
        _row("output tokens/s", _rate(one), _rate(other)),
    ]


def compare_reports(
    paths: tuple[Path, Path], anyway: bool, as_json: bool, console: Console
) -> None:
    """Print two saved reports side by side, or the same as one JSON document.

    Raises ValueError when one cannot be read, and, unless `anyway`, when they are not of equal
    work.
    """
    first, second = (load_report(path) for path in paths)
    reasons = differences(first, second)
    if reasons and not anyway:
        raise ValueError(f"not comparable: {'; '.join(reasons)} (--anyway compares them)")
    reasons += uneven(first, second)
    if as_json:
        figures = [msgspec.to_builtins(row) for row in rows(first, second)]
        document = {"files": [str(path) for path in paths], "rows": figures, "differ": reasons}
        console.print_json(data=document)
        return
    console.print(_table(paths, rows(first, second)))
    for path, saved in zip(paths, (first, second), strict=True):
        run = saved.run
        line = f"{path}: {saved.scenario}, {run.dialect} dialect, {run.url} {run.model}".rstrip()
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for reason in reasons:
        console.print(f"Careful: {reason}.", markup=False, highlight=False, soft_wrap=True)


def _table(paths: tuple[Path, Path], figures: list[Row]) -> Table:
    table = Table(box=None, min_width=66)
    table.add_column("")
    names = [path.stem for path in paths] if paths[0].stem != paths[1].stem else map(str, paths)
    for name in (*names, "second / first"):
        table.add_column(escape(name), justify="right")
    for row in figures:
        cells = (_shown(value, row.unit) for value in (row.first, row.second))
        table.add_row(row.name, *cells, "" if row.ratio is None else f"{row.ratio:.2f}")
    return table


def _row(name: str, first: Number, second: Number, unit: str = "") -> Row:
    ratio = second / first if first and second is not None else None
    return Row(name, first, second, ratio, unit)


def _rate(totals: Totals) -> Number:
    return totals.output_tokens / totals.makespan_s if totals.output_tokens is not None else None


def _shown(value: Number, unit: str) -> str:
    if value is None:
        return "not reported"
    if unit == "s":
        return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _speed(work: Played) -> str:
    return "unbounded" if work.speed is None else f"{work.speed:g}"
