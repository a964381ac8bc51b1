"""What reuse saves, counted on the engine itself: equal turns, with and without a kept session.

The engine runs on the hash oracle, so that only the counting is exercised. The numbers are the
engine's own prefill counter, in units of one turn's tokens.
"""

import msgspec
from rich.console import Console
from rich.table import Table

from agentserve.clock import VirtualClock
from agentserve.config import EngineSettings
from agentserve.engine.loop import Engine
from agentserve.engine.messages import Close, Finished, Refused, Submit
from agentserve.engine.oracle import OracleRunner
from agentserve.engine.plan import pack

UNIT = 16  # tokens of one turn
BLOCK = 16  # tokens of a KV block
VOCABULARY = 1024


class Accounting(msgspec.Struct, frozen=True):
    """Units of prefill that `turns` equal turns cost."""

    turns: int
    without_reuse: int
    with_reuse: int


def account(turns: int) -> Accounting:
    """Run `turns` equal turns twice and count the prefill: every turn anew, and as a session."""
    return Accounting(turns, _prefill(turns, keep=False), _prefill(turns, keep=True))


def _prefill(turns: int, keep: bool) -> int:
    """Return the units that the engine prefilled.

    Without `keep` each turn is a stateless request: the whole history, in a namespace of its own
    so that the prefix cache cannot help.
    """
    engine = _engine(turns)
    history: list[int] = []
    for turn in range(turns):
        new = [(turn * UNIT + offset) % VOCABULARY for offset in range(UNIT)]
        _run(
            engine,
            Submit(
                turn=turn,
                sequence=0 if keep else turn,
                generation=0,
                keep=len(history) if keep else 0,
                tokens=pack(new if keep else history + new),
                namespace="session" if keep else f"request-{turn}",
                max_tokens=0,
                stop_ids=[],
            ),
        )
        if not keep:
            engine.apply(Close(sequence=turn))
        history += new
    tokens = engine.stats().prefill_tokens
    if tokens % UNIT:
        raise ArithmeticError(f"{tokens} prefilled tokens are not whole turns of {UNIT}")
    return tokens // UNIT


def _engine(turns: int) -> Engine:
    context = turns * UNIT + BLOCK
    runner = OracleRunner(
        vocab_size=VOCABULARY,
        block_size=BLOCK,
        num_blocks=2 * (context // BLOCK + 1),
        max_context=context,
        max_slots=2,
    )
    return Engine(runner, VirtualClock(), EngineSettings())


def _run(engine: Engine, submit: Submit) -> None:
    """Step the engine until the turn has ended."""
    engine.apply(submit)
    while True:
        for event in engine.step():
            match event:
                case Refused():
                    raise RuntimeError(f"turn {event.turn} was refused: {event.message}")
                case Finished():
                    return


def print_accounting(counted: list[Accounting], console: Console) -> None:
    """Print the table of `agentserve replay --accounting`."""
    console.print(
        "Prefill tokens of N equal turns, in units of the first turn, counted by the engine:",
        highlight=False,
        soft_wrap=True,
    )
    table = Table()
    table.add_column("N", justify="right")
    table.add_column("without reuse", justify="right")
    table.add_column("with a session", justify="right")
    for row in counted:
        table.add_row(f"{row.turns}", f"{row.without_reuse:,}", f"{row.with_reuse:,}")
    console.print(table)
