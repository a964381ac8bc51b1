"""`agentserve launch claude | codex`: an installed coding agent, started on a running server."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, NoReturn

import httpx
import msgspec
import typer

from agentserve.cli.options import DEFAULT_URL, KEY_VARIABLE, ApiKeyOption, CommandFailed, no_answer

NO_KEY = "none"  # the tools insist on one
MODEL_CONTEXTS = {
    "Qwen2.5": 32_768,
    "Mistral 7B v0.3": 32_768,
    "Qwen3": 40_960,
    "Llama 3.1, 3.2 or 3.3": 131_072,
}


class Target(msgspec.Struct, frozen=True):
    """The server and its model; `context` in tokens."""

    url: str
    key: str
    model: str
    context: int


class Tool(msgspec.Struct, frozen=True):
    """A coding agent: the least context that it can work in, how to have it, how to tell it of us.

    `settings` returns variables (None: must not be set) and arguments that go before the user's.
    """

    least_context: int
    install: str
    settings: Callable[[Target], tuple[dict[str, str | None], list[str]]]


def _claude(target: Target) -> tuple[dict[str, str | None], list[str]]:
    models = ("FABLE", "OPUS", "SONNET", "HAIKU")
    return {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_API_KEY": None,  # would be taken instead of the token
        "ANTHROPIC_MODEL": target.model,
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": target.model for name in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.context // 8),
        # Both would change the beginning of the prompt, and with it all KV, from turn to turn.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }, []


def _codex(target: Target) -> tuple[dict[str, str | None], list[str]]:
    provider = "model_providers.agentserve"
    values: dict[str, str | int | bool] = {
        "model_provider": "agentserve",
        "model": target.model,
        "model_context_window": target.context,
        f"{provider}.name": "agentserve",
        f"{provider}.base_url": f"{target.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": KEY_VARIABLE,
        f"{provider}.requires_openai_auth": False,
    }
    overrides = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    arguments = [part for override in overrides for part in ("-c", override)]
    return {KEY_VARIABLE: target.key}, arguments


# Where a template lists the tools in full, the first request of Claude Code 2.1.332 is about 21,000
# tokens, that of Codex 0.171 about 7,000.
TOOLS = {
    "claude": Tool(40_960, "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Tool(32_768, "npm install -g @openai/codex", _codex),
}


def launch(
    tool: Annotated[Literal["claude", "codex"], typer.Argument(help="Claude Code or Codex.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="What the tool itself is given.")
    ] = None,
    url: Annotated[str, typer.Option(help="The server's address.")] = DEFAULT_URL,
    api_key: ApiKeyOption = None,
) -> None:
    """Start Claude Code or Codex on a running server; it has to be installed.

    Nothing is written: the tool's own configuration stays as it is, and what it is told here holds
    for this run. Its model must have the context that the tool needs.
    """
    chosen = TOOLS[tool]
    program = shutil.which(tool)
    if program is None:
        raise CommandFailed(
            f"{tool} is not installed, or not on the PATH; to have it: {chosen.install}"
        )
    target = look(url, api_key)
    require_context(tool, target)
    variables, first = chosen.settings(target)
    _become(program, [*first, *(arguments or ())], variables)


def look(url: str, api_key: str | None) -> Target:
    """Ask a server what it serves. Raises CommandFailed when no agentserve server answers."""
    url = url.rstrip("/")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_answer(url, error) from None
    if answer.status_code == 401:
        raise CommandFailed(f"{url} wants a key: --api-key, or {KEY_VARIABLE}")
    if answer.status_code == 503:
        raise CommandFailed(f"{url} is not ready: {url}/ready says why")
    try:
        listed = msgspec.json.decode(answer.content, type=_Models).data[0]
    except (msgspec.DecodeError, IndexError):
        raise CommandFailed(
            f"{url} answered {answer.status_code} and is not an agentserve server: look at --url"
        ) from None
    return Target(url, api_key or NO_KEY, listed.id, listed.max_model_len)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


def require_context(tool: str, target: Target) -> None:
    """Raise CommandFailed when the model's context is too small for the tool."""
    least = TOOLS[tool].least_context
    if target.context >= least:
        return
    fitting = [name for name, size in MODEL_CONTEXTS.items() if size >= least]
    raise CommandFailed(
        f"{tool} needs a context of {least} tokens, and {target.model} has "
        f"{target.context}; serve a model that fits: {', '.join(fitting)}"
    )


def _become(
    program: str, arguments: Sequence[str], variables: Mapping[str, str | None]
) -> NoReturn:
    environment = dict(os.environ)
    for name, value in variables.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    sys.stdout.flush()
    os.execve(program, [program, *arguments], environment)
