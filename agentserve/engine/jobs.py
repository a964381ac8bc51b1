"""What crosses between an engine and the process that compiles its grammars, as `frames`."""

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from agentserve.engine.frames import FrameDecoder

_READ_BYTES = 1024 * 1024


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first frame down: all that the process will ever know beside the jobs."""

    tokenizer: str
    memory: int  # bytes that it may take
    cpu_s: float  # processor time for one job


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Compile this."""

    number: int
    spec: str


class Up(msgspec.Struct, frozen=True, tag="up"):
    """The first frame up: the process can compile."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A compiled grammar, serialised."""

    grammar: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """There is no such grammar; the message says why."""

    message: str


Down = Setup | Job
Reply = Up | Done | Failed


def read_frames(descriptor: int, shape: Any) -> Iterator[Any]:
    """Yield the frames of a pipe. Raises EOFError at its end, FrameError for anything else."""
    decoder: FrameDecoder[Any] = FrameDecoder(shape)
    while data := os.read(descriptor, _READ_BYTES):
        yield from decoder.feed(data)
    raise EOFError("the pipe was closed")
