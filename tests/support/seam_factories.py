"""Runner factories for tests of the engine seam, named by "seam_factories:..." also in a child."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from agentserve.engine.oracle import build_oracle
from agentserve.engine.plan import unpack

ORACLE = "agentserve.engine.oracle:build_oracle"
OPTIONS = {
    "vocab_size": 997,
    "block_size": 4,
    "num_blocks": 256,
    "max_context": 512,
    "max_slots": 8,
}


def _split(options: dict[str, Any], *own: str) -> tuple[dict[str, Any], list[Any]]:
    rest = {key: value for key, value in options.items() if key not in own}
    return rest, [options[key] for key in own]


class _Wrapped:
    """A runner with something to do before each launch."""

    def __init__(self, inner: Any, before: Any) -> None:
        self._inner = inner
        self._before = before
        self.info = inner.info

    def launch(self, plan: Any) -> Any:
        self._before(plan)
        return self._inner.launch(plan)

    def sample(self, handle: Any, masks: Any) -> None:
        self._inner.sample(handle, masks)

    def collect(self, handle: Any) -> Any:
        return self._inner.collect(handle)


def slow(options: dict[str, Any]) -> Any:
    """Each step takes `step_s` seconds."""
    rest, (step_s,) = _split(options, "step_s")
    runner, grammars = build_oracle(rest)
    return _Wrapped(runner, lambda plan: time.sleep(step_s)), grammars


def poisoned(options: dict[str, Any]) -> Any:
    """A plan that holds the token `poison` raises out of the step."""
    rest, (poison,) = _split(options, "poison")
    runner, grammars = build_oracle(rest)

    def check(plan: Any) -> None:
        if poison in unpack(plan.tokens):
            raise RuntimeError("the device fell off the bus")

    return _Wrapped(runner, check), grammars


def suicidal(options: dict[str, Any]) -> Any:
    """A plan that holds the token `poison` ends the process by SIGSEGV."""
    rest, (poison,) = _split(options, "poison")
    runner, grammars = build_oracle(rest)

    def check(plan: Any) -> None:
        if poison in unpack(plan.tokens):
            os.kill(os.getpid(), signal.SIGSEGV)

    return _Wrapped(runner, check), grammars


def broken(options: dict[str, Any]) -> Any:
    """Cannot be built, `failures` times; each try leaves a byte in the file `count`."""
    rest, (failures, count) = _split(options, "failures", "count")
    with Path(count).open("ab") as file:
        file.write(b".")
    if Path(count).stat().st_size <= failures:
        raise MemoryError("the weights do not fit")
    return build_oracle(rest)
