"""What arrives from the client: a bounded body, and the news that it has left."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from agentserve.errors import BodyTooLarge, InvalidRequest

T = TypeVar("T")


async def read_body(request: Request, limit: int, deadline_s: float) -> bytes:
    """Return the request body, counted while it arrives.

    An oversized body is read on (and dropped) up to twice the limit, because closing a connection
    with unread data would lose the answer. Raises BodyTooLarge above `limit` bytes,
    InvalidRequest when the whole body takes longer than `deadline_s`, ClientDisconnect.
    """
    too_large = BodyTooLarge(f"the body is larger than {limit} bytes", limit=limit)
    if _declared_length(request) > 2 * limit:
        raise too_large
    body = bytearray()
    size = 0
    try:
        async with asyncio.timeout(deadline_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > 2 * limit:
                    raise too_large
                if size <= limit:
                    body += chunk
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {deadline_s:g} s") from None
    if size > limit:
        raise too_large
    return bytes(body)


def _declared_length(request: Request) -> int:
    value = request.headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else 0


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result; cancel it and raise ClientDisconnect if the client leaves.

    The request body must have been read or be of no interest: what still arrives is dropped.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
