"""What a submit must satisfy before it changes anything."""

from array import array
from collections.abc import Sequence

from agentserve.config import EngineSettings
from agentserve.engine.grammars import Compiled, NotCompiled
from agentserve.engine.messages import Fork, Submit
from agentserve.engine.plan import RunnerInfo, unpack
from agentserve.engine.sequence import Matcher
from agentserve.kv.chains import KvCache


class Refusal(Exception):
    """A command that changes nothing; becomes a Refused event."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def unknown_sequence(command: Submit | Fork) -> Refusal:
    """Return the refusal of a command about tokens that the engine does not have."""
    return Refusal(
        "unknown_sequence",
        f"no sequence {command.sequence} of generation {command.generation} "
        f"with {command.keep} tokens",
    )


def grammar_refusal(error: NotCompiled) -> Refusal:
    """Return the refusal of a turn whose grammar cannot be had."""
    return Refusal("no_compiler" if error.fault else "bad_grammar", str(error))


def new_matcher(
    compiled: Compiled | None, said: Sequence[int] = (), *, anew: bool = False
) -> Matcher | None:
    """Return a matcher of a compiled grammar after what was `said`, None without one.

    `anew`: a new one if what was said does not fit.
    """
    try:
        matcher = compiled.matcher() if compiled is not None else None
        if matcher is not None:
            for token in said:
                matcher.accept(token)
            if said and anew and matcher.broken and compiled is not None:
                return compiled.matcher()
        return matcher
    except Exception as error:  # a third party's library must not stop the engine
        raise Refusal("bad_grammar", str(error) or type(error).__name__) from error


class SubmitRules:
    """The limits of one engine. What breaks them raises Refusal."""

    def __init__(
        self,
        info: RunnerInfo,
        settings: EngineSettings,
        kv: KvCache,
    ) -> None:
        self._info = info
        self._settings = settings
        self._kv = kv

    def ids(self, data: bytes) -> "array[int]":
        """Return token ids of this vocabulary."""
        try:
            ids = unpack(data)
        except ValueError:
            raise Refusal("invalid", "token ids are not packed int32") from None
        if ids and not (min(ids) >= 0 and max(ids) < self._info.vocab_size):
            raise Refusal(
                "invalid", f"a token id is outside the vocabulary of {self._info.vocab_size}"
            )
        return ids

    def admissible(self, command: Submit, prompt: int, waiting: int) -> None:
        """Let a turn over `prompt` tokens pass, with `waiting` turns ahead of it."""
        if prompt == 0 or command.max_tokens < 0:
            raise Refusal("invalid", "a turn needs at least one token and no negative max_tokens")
        if not 0 <= command.said <= prompt:
            raise Refusal("invalid", "only tokens of the prompt have been said")
        if command.background and command.max_tokens:
            raise Refusal("invalid", "a background turn only prefills: max_tokens is 0")
        if prompt + 1 > self._info.max_context:
            raise Refusal(
                "context_full",
                f"{prompt} tokens leave no room in a context of {self._info.max_context}",
            )
        if not self.fits_pool(prompt + 1):
            capacity = self._kv.num_blocks * self._kv.block_size
            raise Refusal(
                "exceeds_kv_capacity", f"{prompt} tokens never fit a KV cache of {capacity}"
            )
        if waiting >= self._settings.max_waiting:
            raise Refusal("overloaded", f"{self._settings.max_waiting} turns are waiting already")

    def fits_pool(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens fits the empty device tier."""
        return self._kv.blocks_for(tokens) <= self._kv.num_blocks

    def limit(self, command: Submit, prompt: int) -> int:
        """Return the length of the log at which a turn over `prompt` tokens ends."""
        capacity = self._kv.num_blocks * self._kv.block_size
        return min(prompt + command.max_tokens, self._info.max_context, capacity + 1)
