"""From the sampling fields of a session and a turn to the engine's parameters."""

import random
from typing import Any

import msgspec
from msgspec import UNSET

from agentserve.engine.plan import SamplingParams
from agentserve.errors import InvalidRequest
from agentserve.wire import Sampling


def merge(session: Sampling, turn: Sampling) -> Sampling:
    """Return the session's sampling with what the turn sets."""
    own = {field: value for field, value in _fields(turn).items() if value is not UNSET}
    return msgspec.structs.replace(session, **own)


def sampling_params(sampling: Sampling, vocab_size: int, source: random.Random) -> SamplingParams:
    """Return the engine's parameters; a seed is drawn when one is needed and none was given.

    Raises InvalidRequest for a logit bias on a token id that the model does not have.
    """
    fields = {
        field: value
        for field, value in _fields(sampling).items()
        if value is not UNSET and field not in ("stop", "logit_bias")
    }
    if sampling.logit_bias is not UNSET:
        fields["logit_bias"] = _bias(sampling.logit_bias, vocab_size)
    if sampling.seed is UNSET and fields.get("temperature", 0.0) > 0:
        fields["seed"] = source.getrandbits(63)
    return SamplingParams(**fields)


def stop_strings(sampling: Sampling) -> tuple[str, ...]:
    """Return the stop strings."""
    return () if sampling.stop is UNSET else tuple(sampling.stop)


def check(sampling: Sampling, vocab_size: int) -> None:
    """Raise InvalidRequest for what the shape alone cannot refuse."""
    if sampling.logit_bias is not UNSET:
        _bias(sampling.logit_bias, vocab_size)


def _fields(sampling: Sampling) -> dict[str, Any]:
    return msgspec.structs.asdict(sampling)


def _bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias key {key!r} is not a token id below {vocab_size}",
                param="sampling.logit_bias",
            )
        out[int(key)] = value
    return out
