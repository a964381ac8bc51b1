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
    from agentserve.doctor import Report


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
    as_json: Json = False,
) -> None:
    """Say whether MODEL runs on this machine, what it takes and what it leaves for KV.

    The first line is the verdict. Exits with 1 when the model does not run.
    """
    from agentserve.doctor import examine

    report = examine(model, dtype, kv_device, kv_host, show_progress)
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        typer.echo("\n".join([verdict(report), *_details(report)]))
    if not report.runs:
        raise typer.Exit(1)


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
