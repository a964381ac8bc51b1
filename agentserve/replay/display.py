"""Shows a running replay: a live bar on a terminal, a line per turn elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentserve.replay.report import TurnRecord


class Display:
    """Follows the turns of all sessions of one replay."""

    def __init__(self, console: Console, turns: int, sessions: int = 1) -> None:
        self._console = console
        self._turns = turns
        self._many = sessions > 1
        self._done = 0
        self._progress = Progress(
            TextColumn("turn"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=turns)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def heard(self, user: str) -> None:
        """Show what the user says."""
        self._console.print(f"[bold]user:[/bold] {escape(user)}", highlight=False, soft_wrap=True)

    def turn(self, record: TurnRecord) -> None:
        """Show a finished turn."""
        self._done += 1
        who = f"session {record.session}, turn {record.index}: " if self._many else ""
        if self._console.is_terminal:
            action = f"{who}{escape(record.action)}"
            self._progress.update(self._task, advance=1, description=action)
            return
        tokens = f"{record.prefill_computed} computed, {record.cached_tokens} cached, "
        if record.asked_tokens is not None:  # what an endpoint computes is not known
            tokens = f"{record.ttft_s:.2f} s to the first output, "
        self._console.print(
            f"{'' if self._many else 'turn '}{self._done:3d}/{self._turns} {who}{record.action}: "
            f"{tokens}{record.latency_s:.2f} s",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
