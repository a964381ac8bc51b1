"""What it costs to forget while a tool runs: the same agents on two residency policies, measured.

The device's KV holds two of the six agents. Under "device-lru" what an agent loses is computed
again; under the default policy it is copied to the host tier and back.
"""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentserve.replay.agents import Figures, Tiers, run_agents, token_bytes
from agentserve.replay.generator import Workload
from agentserve.replay.report import TurnRecord

AGENTS = Workload(sessions=6, turns=6, prompt=40, first=150, new=16, output=16, gap=1.0, seed=2)
DEVICE_TOKENS = 928  # two agents, which end with 520 tokens each, 128 of them shared
HOST_TOKENS = 8192  # all of them
FORGETS = Tiers("device-lru", DEVICE_TOKENS)
KEEPS = Tiers("tool-aware", DEVICE_TOKENS, HOST_TOKENS)


def compare(model: str, console: Console) -> None:
    """Run the agents on a server without a host tier, then on one with it, and print both.

    Raises OSError when a server does not start, ReplayError when an agent does not get to its end.
    """
    with Bar(console, AGENTS.sessions * AGENTS.turns) as bar:
        forgets, keeps = (
            run_agents(model, AGENTS, tiers, bar.run(f"{tiers.policy} ..."))
            for tiers in (FORGETS, KEEPS)
        )
    before, after = forgets.figures(), keeps.figures()
    console.print(comparison(before, after, token_bytes(model)))
    console.print(conclusion(before, after), highlight=False, soft_wrap=True)


class Bar(Progress):
    """Follows the turns of one run after the other, on a terminal."""

    def __init__(self, console: Console, turns: int) -> None:
        """Make a bar for runs of so many turns each."""
        columns = (TextColumn("   {task.description:16}"), MofNCompleteColumn())
        super().__init__(
            *columns,
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._each = turns

    def run(self, what: str) -> "Bar":
        """Begin the next run and return its observer."""
        self._task = self.add_task(what, total=self._each)
        return self

    def heard(self, user: str) -> None:
        """Show nothing: the words are made up."""

    def turn(self, record: TurnRecord) -> None:
        """Count a finished turn."""
        self.advance(self._task)


def conclusion(forgets: Figures, keeps: Figures) -> str:
    """Return what the two runs show, in a sentence."""
    return (
        f"   The work was the same: {FORGETS.policy} computed {forgets.recomputed:,} tokens a "
        f"second time, the default {keeps.recomputed:,},\n"
        "   because it moved KV out of the way and back; the agents were done in "
        f"{keeps.makespan_s:.0f} s instead of {forgets.makespan_s:.0f} s."
    )


def comparison(forgets: Figures, keeps: Figures, token_bytes: int) -> Table:
    """Return both runs side by side; bytes between the tiers are shown as tokens of KV."""
    table = Table(box=None, min_width=66)
    table.add_column("")
    for title in (FORGETS.policy, f"{KEEPS.policy} (default)"):
        table.add_column(title, justify="right", no_wrap=True)
    both = (forgets, keeps)
    table.add_row("all agents done after", *(f"{one.makespan_s:.1f} s" for one in both))
    table.add_row(
        "TTFT after a tool result, p50", *(f"{one.tool_ttft_p50_s:.2f} s" for one in both)
    )
    table.add_row("the same, p95", *(f"{one.tool_ttft_p95_s:.2f} s" for one in both))
    table.add_row("tokens computed in prefill", *(f"{one.prefill_computed:,}" for one in both))
    table.add_row("of these, computed before", *(f"{one.recomputed:,}" for one in both))
    table.add_row(
        "tokens moved to the host tier", *(f"{one.saved_bytes // token_bytes:,}" for one in both)
    )
    table.add_row("tokens moved back", *(f"{one.loaded_bytes // token_bytes:,}" for one in both))
    return table
