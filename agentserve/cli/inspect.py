"""`agentserve doctor | version`: look, change nothing."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from agentserve.cli.options import (
    DEFAULT_MODEL,
    DtypeOption,
    Json,
    KvDeviceOption,
    KvHostOption,
    format_size,
    show_progress,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentserve.doctor import Report
    from agentserve.families import Family


def version(as_json: Json = False) -> None:
    """Print the versions of agentserve and of what it stands on."""
    from agentserve.doctor import versions

    found = versions()
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        typer.echo("\n".join(f"{name} {number}" for name, number in found.items()))


def doctor(
    model: Annotated[
        str, typer.Argument(help="As for `serve`; it is fetched and converted as serving would.")
    ] = DEFAULT_MODEL,
    dtype: DtypeOption = "auto",
    kv_device: KvDeviceOption = 0,
    kv_host: KvHostOption = None,
    families: Annotated[
        bool,
        typer.Option(
            "--families",
            help="Say instead what the chat template does to an agent's history, for this model "
            "and for every family of tool calls.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say whether MODEL runs on this machine, what it takes and what it leaves for KV.

    The first line is the verdict. Exits with 1 when the model does not run.
    """
    if families:
        _families(model, as_json=as_json)
        return
    from agentserve.doctor import examine

    report = examine(model, dtype, kv_device, kv_host, show_progress)
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        typer.echo("\n".join([verdict(report), *_details(report)]))
    if not report.runs:
        raise typer.Exit(1)


def _families(model: str, *, as_json: bool) -> None:
    from agentserve.families import examine_families, examine_model

    found = examine_families(examine_model(model, show_progress))
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        typer.echo("\n".join(family_lines(found)))


def family_lines(families: "Sequence[Family]") -> list[str]:
    """Return the report as text, a paragraph a template."""
    lines: list[str] = []
    for family in families:
        if not family.tested:
            reason = family.refused or "no template here; `pip install --no-deps trl` has some"
            lines.append(f"{family.format}: not tested ({reason})")
            continue
        lines.append(f"{family.format}: {family.template}")
        facts = [
            ("tool result", _appends(family.on_result, family.recomputed_on_result)),
            ("user turn", _appends(family.on_user, family.recomputed_on_user)),
            ("calls", f"{family.calls_per_message} a message"),
            ("results", f"name their call: {family.results_name}"),
            ("survives", ", ".join(family.survives)),
            ("round trip", _ROUND_TRIP[family.round_trip]),
        ]
        facts += [("refuses", family.refused)] if family.refused else []
        lines += [f"  {name:<11} {value}" for name, value in facts]
    return lines


_ROUND_TRIP = {
    True: "calls that the template writes are read as the same",
    False: "calls that the template writes are read otherwise",
    None: "the template writes no calls",
}


def _appends(only: bool | None, share: float | None) -> str:
    if only is None or share is None:
        return "not tested"
    return "only adds" if only else f"rewrites: {share:.0%} of the loop's log is computed again"


def verdict(report: "Report") -> str:
    """Return the one line that answers whether the model runs."""
    figures = report.figures
    sizes = ""
    if figures is not None:
        sizes = (
            f"weights {format_size(figures.weight_bytes)} ({figures.weight_bytes} bytes, "
            f"{figures.dtype}), KV left for {figures.kv_tokens} tokens"
        )
    if report.runs:
        return f"runs: {report.model}: {sizes}"
    return f"does not run: {report.model}: {report.reason}" + (sizes and f" ({sizes})")


def _details(report: "Report") -> list[str]:
    machine, figures = report.machine, report.figures
    lines: list[tuple[str, str]] = []
    if figures is not None:
        million = figures.parameters / 1e6
        lines += [
            ("model", f"{figures.architecture}, {million:.1f} million parameters"),
            (
                "context",
                f"{figures.max_context} tokens, {figures.kv_token_bytes} bytes of KV per token",
            ),
            (
                "KV",
                f"{figures.kv_tokens} tokens on the device, {figures.host_tokens} in host memory "
                "(on a CPU the same DRAM)",
            ),
        ]
    if report.tool_format is not None:
        lines.append(("tool calls", report.tool_format))
    lines += [("warning", text) for text in report.warnings]
    lines += [
        ("cpu", f"{machine.cpu}, {machine.cores} cores, {' '.join(machine.abilities)}"),
        ("memory", f"{format_size(machine.memory_free)} free of {format_size(machine.memory)}"),
        ("cache", machine.cache_directory),
        ("versions", ", ".join(f"{name} {number}" for name, number in machine.versions.items())),
    ]
    return [f"  {name:<11} {value}" for name, value in lines]
