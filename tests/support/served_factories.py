"""Engines for tests of the whole server, named by "served_factories:..."."""

import time
from typing import Any

from agentserve.config import GRAMMAR_CPU_S
from agentserve.engine.oracle import build_oracle
from agentserve.engine.plan import StepPlan
from agentserve.model.grammar import grammar_compiler


def oracle(options: dict[str, Any]) -> Any:
    """Return the hash oracle with real grammars; each step takes at least `step_s` seconds."""
    own = dict(options)
    directory, step_s = own.pop("directory"), own.pop("step_s", 0.0)
    cpu_s = own.pop("grammar_cpu_s", GRAMMAR_CPU_S)
    runner, _ = build_oracle(own)
    compiler = grammar_compiler(directory, own["vocab_size"], cpu_s=cpu_s)
    return (_Slow(runner, step_s) if step_s else runner), compiler


class _Slow:
    def __init__(self, inner: Any, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s
        self.info = inner.info
        self.sample = inner.sample
        self.collect = inner.collect

    def launch(self, plan: StepPlan) -> Any:
        time.sleep(self._step_s)
        return self._inner.launch(plan)
