"""The text side of one model, as sessions use it."""

import random
from dataclasses import dataclass

import msgspec

from agentserve.sessions.compose import Composer
from agentserve.sessions.tokenizer import Tokenizer
from agentserve.sessions.toolformat import ToolFormat


@dataclass(frozen=True)
class ModelText:
    """Everything between text and token ids for the model called `name`."""

    name: str
    tokenizer: Tokenizer
    composer: Composer
    format: ToolFormat


def model_text(
    name: str,
    tokenizer: Tokenizer,
    format: ToolFormat,
    *,
    check_rate: float = 0.01,
    source: random.Random | None = None,
) -> ModelText:
    """Put the parts together; the template decides how many calls a message has.

    Raises ValueError when the template is not usable.
    """
    source = source or random.Random()
    composer = Composer(tokenizer, format, check_rate=check_rate, random=source)
    survival = composer.survival
    if survival.calls:
        format = msgspec.structs.replace(format, one_call=survival.one_call)
    return ModelText(name, tokenizer, composer, format)
