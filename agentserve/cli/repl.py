"""The conversation of `agentserve chat`: messages, commands, and Ctrl-C that ends only a turn."""

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

from agentserve.cli.terminal import Lines, Questions, Screen
from agentserve.errors import AgentserveError

if TYPE_CHECKING:
    from agentserve import AsyncSession
    from agentserve.cli.agent import Agent
    from agentserve.client.loop import RunEvent

HELP = """\
/help      this list
/tools     the model's tools
/rollback  take back the last message and everything after it
/fork      go on in a copy of the session; this one stays as it is
/quit      leave (or Ctrl-D); Ctrl-C cancels what runs"""


class Chat:
    """One conversation at a terminal, or from piped lines."""

    def __init__(self, agent: "Agent", max_turns: int) -> None:
        self._agent = agent
        self._max_turns = max_turns
        self._screen = Screen(sys.stdout, sys.stdout, statistics=True)
        self._begun: list[str] = []  # the first turn after each message
        self._running: asyncio.Task[Any] | None = None

    async def talk(self, name: str | None, options: dict[str, Any]) -> None:
        """Read lines until the end or /quit."""
        self._lines = Lines()
        self._approve = self._agent.approve(lambda: Questions(self._lines, sys.stdout))
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        async with self._agent.client as client:
            self._session: AsyncSession = await client.session(
                name, resume=name is not None, tools=self._agent.executor, **options
            )
            self._agent.tell_left_out()
            self._screen.note(f"session {self._session.id}; /help lists the commands")
            while (line := await self._lines.next("> ")) is not None:
                if line.strip() == "/quit":
                    return
                await self._guarded(line.strip())

    def _interrupt(self) -> None:
        if self._running is not None:
            self._running.cancel()
        else:
            self._screen.note("/quit or Ctrl-D leaves")
            self._lines.prompt_again()

    async def _guarded(self, line: str) -> None:
        """Do what a line says; what goes wrong is told, and the conversation goes on."""
        work = self._command(line) if line.startswith("/") else self._message(line)
        self._running = asyncio.create_task(work)
        await asyncio.wait({self._running})
        task, self._running = self._running, None
        if task.cancelled():
            self._screen.note("[cancelled]")
        elif (error := task.exception()) is not None:
            if not isinstance(error, AgentserveError | ConnectionError | ValueError):
                raise error
            self._screen.note(f"[{error}]")

    async def _message(self, text: str) -> None:
        if not text:
            return
        executor = self._agent.executor
        if await asyncio.to_thread(executor.toolbox.refresh):
            answer = await self._session.update(tools=executor)
            self._agent.tell_left_out()
            self._screen.note(f"[the tools changed: {answer.new_tokens} tokens are new]")
        first = True

        def on_event(event: "RunEvent") -> None:
            nonlocal first
            turn = getattr(event, "turn", None)
            if first and turn is not None and turn.status in ("completed", "incomplete"):
                self._begun.append(turn.id)
                first = False
            self._screen.on_event(event)

        # Calls that a cancelled message left open are told to the model as cancelled.
        await self._session.run(
            text,
            max_turns=self._max_turns,
            on_event=on_event,
            approve=self._approve,
            on_pending="cancel",
        )

    async def _command(self, line: str) -> None:
        match line:
            case "/help":
                self._screen.note(HELP)
            case "/tools":
                for spec in self._agent.executor.toolbox.specs:
                    reads = " (changes nothing)" if spec.read_only else ""
                    first = spec.description.partition("\n")[0]
                    self._screen.note(f"{spec.name}{reads}: {first}")
            case "/rollback":
                await self._roll_back()
            case "/fork":
                self._session = await self._session.fork()
                self._screen.note(f"[now in {self._session.id}]")
            case _:
                self._screen.note(f"no command {line}; /help lists them")

    async def _roll_back(self) -> None:
        if not self._begun:
            self._screen.note("[there is no message to take back]")
            return
        await self._session.rollback(before=self._begun[-1])
        self._begun.pop()
        self._screen.note(f"[back at {self._session.head or 'the beginning'}]")
