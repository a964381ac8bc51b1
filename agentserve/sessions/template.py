"""A model's chat template: sandboxed Jinja with the helpers that model authors rely on.

The helpers and the environment follow what the Hugging Face documentation of chat templates
promises, except that the clock is an argument.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.nodes import Node


class TemplateRefused(ValueError):
    """The template refuses or cannot render this conversation."""


class ChatTemplate:
    """Renders messages to text.

    `special` maps names such as bos_token to their text. Raises ValueError when the template
    is not valid Jinja.
    """

    def __init__(self, source: str, special: dict[str, str]) -> None:
        self.source = source
        self._special = special
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template is not valid: {error}") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        generation_prompt: bool = False,
        options: dict[str, Any] | None = None,
        now: float = 0.0,
    ) -> str:
        """Return the text of the conversation; `now` is the Unix time that the template sees.

        Raises TemplateRefused with the template's own message when it does not take it.
        """
        variables = {
            **self._special,
            **(options or {}),
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            "strftime_now": _clock(now),
        }
        try:
            return self._template.render(variables)
        except RecursionError:
            raise TemplateRefused("the conversation is nested too deeply") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise TemplateRefused(f"the model's chat template refuses this: {error}") from None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; serving renders its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Any) -> list[Node]:
        next(parser.stream)
        body: list[Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _clock(now: float) -> Callable[[str], str]:
    moment = datetime.fromtimestamp(now, UTC)
    return moment.strftime


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes (Jinja's own filter is made for web pages)."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
