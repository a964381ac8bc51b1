"""The engine of scripted answers: steps and KV as ever, but no model, and no torch.

The server dictates every token (`sessions.script`). Sequences, batches, block tables and copies are
real; a KV cell holds a token id where a model would have keys and values.
"""

from typing import Any

from agentserve.engine.oracle import build_oracle
from agentserve.engine.plan import Runner
from agentserve.engine.rules import GrammarFactory


def build_scripted(options: dict[str, Any]) -> tuple[Runner, GrammarFactory]:
    """Return the runner and its grammars; `options` are the fields of OracleSettings."""
    runner, _ = build_oracle(options)
    return runner, AnyOutput()


class AnyOutput:
    """A GrammarFactory without constraints: what a script says is what the model says."""

    def compile(self, spec: str) -> "AnyOutput":
        """Return a matcher."""
        return self

    def mask(self) -> None:
        """Allow every token."""

    def accept(self, token: int) -> None:
        """Take a token."""
