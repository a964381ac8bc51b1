"""Worker: agentserve embedded in this process; turns are named by session and index."""

import asyncio
from typing import Any

import msgspec
from peers.agents import Agents
from peers.workers.protocol import Message, Pipe

import agentserve
from agentserve.client.aio import AsyncClient
from agentserve.config import ServerSettings
from agentserve.replay.generator import Workload, generate


async def serve(pipe: Pipe) -> None:
    """Answer until the input ends."""
    options = pipe.message()
    memory: dict[str, Any] = {name: options[name] for name in ("kv_bytes", "host_bytes")}
    client = AsyncClient.embedded(
        options["model"], server=ServerSettings(allow_force=True), **memory
    )
    async with client:
        workload = msgspec.convert(options["workload"], Workload)
        agents = Agents(client, generate(workload))
        await agents.warm_up()
        pipe.say(event="ready", version=agentserve.__version__, options=memory)
        async with asyncio.TaskGroup() as group:
            while not pipe.ended:
                for message in await asyncio.to_thread(pipe.messages, wait=True):
                    group.create_task(_turn(pipe, agents, message))


async def _turn(pipe: Pipe, agents: Agents, message: Message) -> None:
    number = message["turn"]
    try:
        served = await agents.turn(
            message["session"],
            message["index"],
            lambda: pipe.say(event="first", turn=number),
        )
    except Exception as error:
        pipe.say(event="failed", turn=number, error=f"{type(error).__name__}: {error}")
    else:
        pipe.say(event="done", turn=number, **msgspec.to_builtins(served))


if __name__ == "__main__":
    asyncio.run(serve(Pipe.standard()))
