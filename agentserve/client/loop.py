"""The tool loop as a flow: turns, the calls of each at the same time, their results, until none."""

from collections.abc import Callable, Container
from typing import Any, TypeAlias

from agentserve_tools import Approve, ToolOutput

from agentserve import wire
from agentserve.client.core import Flow, Notify, StartTool, StopTools, WaitTools
from agentserve.client.models import ToolCall, ToolDone, ToolStarted, Turn, TurnOptions
from agentserve.client.session import Input, SessionCore

RunEvent: TypeAlias = wire.Event | ToolStarted | ToolDone
OnEvent: TypeAlias = Callable[[RunEvent], Any]

_UNKNOWN_FATE = "the program that made this call ended; whether the call had an effect is not known"


class ToolLoop:
    """One `run` of a session."""

    def __init__(
        self,
        session: SessionCore,
        options: TurnOptions,
        on_event: OnEvent | None = None,
        approve: Approve | None = None,
    ) -> None:
        self._session = session
        self._options = options
        self._on_event = on_event
        self._approve = approve

    def run(self, given: Input, max_turns: int) -> Flow[Turn]:
        """Step until the model calls no tool; without input first answer what is pending.

        Returns the last turn: after `max_turns`, or when a tool is called that the session has
        without a function here, that is one with unanswered calls. A tool that nobody has is
        answered with an error.
        """
        if max_turns < 1:
            raise ValueError("max_turns must be at least 1")
        waiting = (yield from self._session.pending_turn()) if given is None else None
        if waiting is not None:
            if self._calls_elsewhere(waiting):
                return waiting
            given = yield from self._answers(waiting.tool_calls, {})
        for number in range(1, max_turns + 1):
            last = number == max_turns
            # Who stops here may go on later, and a call that was begun and stopped would be lost.
            turn, started = yield from self._turn(given, () if last else self._early)
            if not (turn.tool_calls or turn.malformed_calls):
                break
            if last or self._calls_elsewhere(turn):
                yield StopTools(list(started.values()))
                break
            given = yield from self._answers(turn.tool_calls, started)
        return turn

    def _calls_elsewhere(self, turn: Turn) -> bool:
        return any(map(self._session.tools.runs_elsewhere, turn.tool_calls))

    @property
    def _early(self) -> Container[str]:
        return self._session.tools.read_only

    def _turn(self, given: Input, early: Container[str]) -> Flow[tuple[Turn, dict[str, Any]]]:
        """Stream one turn; calls of `early` tools start as soon as they are complete."""
        stream = yield from self._session.open_stream(given, self._options)
        started: dict[str, Any] = {}
        try:
            while (event := (yield from stream.next_event())) is not None:
                yield from self._tell(event)
                if isinstance(event, wire.ItemDone) and isinstance(event.item, wire.ToolCallOut):
                    call = ToolCall(event.item.call_id, event.item.name, event.item.arguments)
                    if call.name in early:
                        started[call.call_id] = yield from self._start(call)
        except GeneratorExit:
            raise
        except BaseException:
            yield StopTools(list(started.values()))
            yield from self._session.end_stream(stream, self._options)
            raise
        assert stream.turn is not None
        return stream.turn, started

    def _answers(
        self, calls: list[ToolCall], started: dict[str, Any]
    ) -> Flow[list[wire.ToolResultItem]]:
        """Run the calls that are not `started` and return the last results.

        Results that come while other calls still run are staged, so that the server can prefill
        them meanwhile.
        """
        results = [self._lost(call) for call in calls if self._is_lost(call)]
        running: dict[str, Any] = {}
        by_id = {call.call_id: call for call in calls if not self._is_lost(call)}
        try:
            for call in by_id.values():
                running[call.call_id] = started.get(call.call_id) or (yield from self._start(call))
            while running:
                if results:
                    yield from self._session.tool_results(results)
                results = []
                outputs: list[ToolOutput | None] = yield WaitTools(list(running.values()))
                for call_id, output in zip(list(running), outputs, strict=True):
                    if output is not None:
                        del running[call_id]
                        results.append(_result(by_id[call_id], output))
                        yield from self._tell(ToolDone(by_id[call_id], output))
        except GeneratorExit:
            raise
        except BaseException:
            yield StopTools(list((started | running).values()))
            raise
        return results

    def _is_lost(self, call: ToolCall) -> bool:
        """Whether somebody else may have run the call, which is not to run twice."""
        tools = self._session.tools
        taken_up = call.call_id in self._session.taken_up and not tools.has_run(call.call_id)
        return taken_up and call.name not in tools.read_only

    def _lost(self, call: ToolCall) -> wire.ToolResultItem:
        return _result(call, ToolOutput(_UNKNOWN_FATE, "cancelled"))

    def _start(self, call: ToolCall) -> Flow[Any]:
        yield from self._tell(ToolStarted(call))
        return (yield StartTool(self._session.tools.starter(call, self._approve)))

    def _tell(self, event: RunEvent) -> Flow[None]:
        if self._on_event is not None:
            yield Notify(self._on_event, event)


def _result(call: ToolCall, output: ToolOutput) -> wire.ToolResultItem:
    duration_ms = output.duration_ms or None
    return call.result(output.output, status=output.status, duration_ms=duration_ms)
