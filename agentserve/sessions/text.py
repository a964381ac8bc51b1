"""The text side of one model, as sessions use it."""

from dataclasses import dataclass

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
