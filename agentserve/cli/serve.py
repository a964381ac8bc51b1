"""`agentserve serve`."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentserve.cli.options import (
    DEFAULT_MODEL,
    KEY_VARIABLE,
    DeviceOption,
    DtypeOption,
    KvDeviceOption,
    KvHostOption,
    KvPolicyOption,
    show_progress,
)
from agentserve.config import EngineSettings, ModelSettings, ServerSettings


def serve(  # noqa: PLR0913 - one argument per command line option
    model: Annotated[
        str,
        typer.Argument(
            help="smollm2-135m (built in), a .gguf file, a directory with config.json and "
            "safetensors, or a hub id."
        ),
    ] = DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option(help="Address to bind. One that others can reach needs --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            help="Key that clients must send as a bearer token; repeat it for several. Each key "
            "sees only its own sessions. On a shared machine set the variable instead: "
            "command lines are public.",
        ),
    ] = None,
    max_sessions: Annotated[
        int, typer.Option(min=1, help="Sessions that each key may have at once.")
    ] = 1000,
    device: DeviceOption = "auto",
    kv_device: KvDeviceOption = 0,
    kv_host: KvHostOption = None,
    kv_policy: KvPolicyOption = "tool-aware",
    dtype: DtypeOption = "auto",
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads of the engine; 0 takes every core.")
    ] = 0,
    cuda_graphs: Annotated[
        bool,
        typer.Option(help="Capture decode steps as CUDA graphs; without a GPU it means nothing."),
    ] = True,
    reserve_output: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens of the context kept free, for example for a summary of the session."
        ),
    ] = 0,
    tool_format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the model writes tool calls, where its chat template does not tell; "
            "`agentserve doctor --families` lists the names.",
        ),
    ] = "auto",
    strict_model: Annotated[
        bool,
        typer.Option(
            "--strict-model",
            help="Refuse requests to /v1/... that name another model; else any name is served.",
        ),
    ] = False,
    allow_force: Annotated[
        bool,
        typer.Option(
            "--allow-force",
            help="Accept turns whose output is dictated by the client (replay and demo).",
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            metavar="process|thread|scripted:FILE|thread+scripted:FILE",
            help="Where the engine runs: in a process of its own, or in a thread. A scripted one "
            "runs no model: it says what FILE says, for tests of agents.",
        ),
    ] = "process",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Log on stderr; info has one line for each turn."),
    ] = "info",
) -> None:
    """Serve MODEL over HTTP until SIGINT or SIGTERM.

    Prints one line when it is ready. A first signal drains: new turns are refused, running ones
    get 5 seconds. A second one stops at once.
    """
    keys = tuple(api_key or ())
    check_exposure(host, keys)
    check_tool_format(tool_format)
    form, script = engine_choice(engine)
    # Imported here, because the other commands and `--help` need none of it.
    from agentserve.assembly import assemble, scripted_backend, torch_backend
    from agentserve.cli.serving import listen, run
    from agentserve.model.prepare import prepare

    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=keys,
        model_name=served_name(model),
        max_sessions=max_sessions,
        reserve_output=reserve_output,
        tool_format=tool_format,
        strict_model=strict_model,
        allow_force=allow_force,
    )
    with listen(host, port) as listener:
        directory = prepare(model, FirstStart(model), weights=script is None)
        if script is not None:
            scripted = scripted_backend(directory, script, in_process=form == "thread")
            run(assemble(directory, scripted, settings), listener, announce)
            return
        memory = ModelSettings(
            directory=str(directory),
            device=device,
            dtype=dtype,
            kv_bytes=kv_device,
            host_bytes=host_memory(kv_policy, kv_host),
            threads=threads,
            cuda_graphs=cuda_graphs,
        )
        backend = torch_backend(memory, in_process=form == "thread")
        limits = EngineSettings(kv_policy=kv_policy)
        run(assemble(directory, backend, settings, limits), listener, announce)


def engine_choice(engine: str) -> tuple[str, Path | None]:
    """Return where the engine runs, and the script that it follows. Raises typer.BadParameter."""
    name, _, path = engine.partition(":")
    form, _, kind = name.rpartition("+")
    if kind == "scripted" and path and form in ("", "process", "thread"):
        return form or "process", Path(path)
    if engine in ("process", "thread"):
        return engine, None
    raise typer.BadParameter(
        f"{engine!r} is not one of process, thread, scripted:FILE and thread+scripted:FILE",
        param_hint="--engine",
    )


def check_tool_format(name: str) -> None:
    """Raise typer.BadParameter for a tool format that there is not."""
    from agentserve.sessions.toolformat import choose

    try:
        choose(name, "")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--tool-format") from None


def host_memory(policy: str, asked: int | None) -> int | None:
    """Return ModelSettings.host_bytes under a KV policy: none where it has no host tier.

    Raises typer.BadParameter where memory is asked for that the policy would not use.
    """
    from agentserve.kv.policy import make_policy

    if make_policy(policy).uses_host:
        return asked
    if asked:
        raise typer.BadParameter(
            f"--kv-policy {policy} has no host tier: leave --kv-host out", param_hint="--kv-host"
        )
    return 0


class FirstStart:
    """Progress of a conversion, after one line on stderr that says why this start takes long."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._said = False

    def __call__(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` bytes are converted, now those of `what`."""
        if not self._said:
            self._said = True
            sys.stderr.write(
                f"first start: converting {self._model} and compiling kernels may take a minute\n"
            )
        show_progress(done, total, what)


def announce(ready: str) -> None:
    """Print the line that programs wait for, and to a person also how to stop."""
    typer.echo(ready)
    if sys.stdout.isatty():
        typer.echo("Ctrl-C stops it.")


def check_exposure(host: str, keys: Sequence[str]) -> None:
    """Raise typer.BadParameter when others could use the server without a key."""
    from agentserve.server.auth import is_loopback

    if not keys and not is_loopback(host):
        raise typer.BadParameter(
            f"{host} can be reached from other machines: set --api-key (or {KEY_VARIABLE}), "
            "or bind 127.0.0.1",
            param_hint="--host",
        )
    if any(not key.strip() for key in keys):
        raise typer.BadParameter("a key may not be empty", param_hint="--api-key")


def served_name(model: str) -> str:
    """Return the name that clients see: a hub id as it is, of a path its last part."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model
