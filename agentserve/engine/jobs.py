"""What crosses between an engine and the process that compiles its grammars, as `frames`."""

import msgspec


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

    number: int
    grammar: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """There is no such grammar; the message says why."""

    number: int
    message: str


Down = Setup | Job
Reply = Up | Done | Failed
