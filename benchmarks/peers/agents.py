"""agentserve's side of the race: stories played turn by turn with its own client.

A turn sends only what is new and forces the story's answer (`serve --allow-force`), which is
decoded token by token as if sampled. The first token is heard of by the event that reports the
prefill done: the engine sends it with the step that samples that token, while the output of a tool
call is shown only once it is known to be one.
"""

from collections.abc import Sequence

from peers.system import Heard, Served, SystemFailed

from agentserve import wire
from agentserve.client.aio import AsyncClient, AsyncSession
from agentserve.replay.scenario import Scenario

WARM_UP = "time year people way day man thing woman life child world school state family " * 20


class Agents:
    """The sessions of one run on a server that is up."""

    def __init__(self, client: AsyncClient, stories: Sequence[Scenario]) -> None:
        self._client = client
        self._stories = stories
        self._sessions: dict[int, AsyncSession] = {}
        self._calls: dict[int, list[str]] = {}

    async def warm_up(self) -> None:
        """Run a turn that has nothing in common with the stories."""
        session = await self._client.session(system="Warm up.")
        await session.step(WARM_UP, max_output_tokens=4)
        await session.delete()

    async def turn(self, number: int, index: int, heard: Heard) -> Served:
        """Play one turn; the first creates the session. Raises SystemFailed."""
        story = self._stories[number]
        turn = story.turns[index]
        if not index:
            self._sessions[number] = await self._client.session(
                system=story.system, tools=[tool.declared() for tool in story.tools]
            )
        feed = self._feed(story, number, index)
        force = wire.Debug(force=turn.forced())
        async with self._sessions[number].stream(feed, debug=force) as events:
            async for event in events:
                if isinstance(event, wire.TurnProgress) and event.done == event.total:
                    heard()
        if events.turn is None or events.turn.wire.status != "completed":
            raise SystemFailed(f"session {number}, turn {index} did not complete")
        answer = events.turn.wire
        self._calls[number] = [
            item.call_id for item in answer.output if isinstance(item, wire.ToolCallOut)
        ]
        usage = answer.usage
        # The stop token is sampled and not counted.
        return Served(usage.output_tokens + 1, usage.input_tokens, usage.cached_tokens)

    def _feed(self, story: Scenario, number: int, index: int) -> list[wire.Item]:
        if not index:
            return [wire.UserItem(content=story.turns[0].user or "")]
        results = [call.result for call in story.turns[index - 1].calls]
        return [
            wire.ToolResultItem(call_id=call, output=result)
            for call, result in zip(self._calls[number], results, strict=True)
        ]
