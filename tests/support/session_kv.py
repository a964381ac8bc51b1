"""Sessions that wait for two calls, and sessions whose KV does not fit the device together."""

from typing import Any

from session_rig import ME, TOOLS, Rig, calls

from agentserve import wire

TWO = (("read", {"q": "a"}), ("write", {"command": "cd /src && make -j4", "q": "b"}))
TIMED: list[dict[str, Any]] = [
    tool | {"expected_ms": expected} if expected else tool
    for tool, expected in zip(TOOLS, (None, 2_000, 30_000), strict=True)
]


async def waiting(
    r: Rig, tools: list[dict[str, Any]] = TIMED, **fields: Any
) -> tuple[str, list[str]]:
    """Return a session that waits for two calls, and their ids."""
    s = await r.create(tools=tools)
    return s, calls(await r.forced(s, "go", *TWO, **fields))


async def hinted(r: Rig, s: str, **hints: Any) -> None:
    await r.service.hints(ME, s, wire.Hints(**hints))


async def crowded(r: Rig, count: int = 3) -> list[str]:
    """Return sessions that have each had a turn of more than half the device KV."""
    names = [await r.create(tools=TOOLS) for _ in range(count)]
    for name in names:
        await r.turn(name, f"{name} " + "word " * 350)
        await r.settle(400)
    return names
