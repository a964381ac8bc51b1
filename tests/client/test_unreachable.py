"""What the user of a client sees when no server is there."""

import asyncio
import socket
import traceback

import pytest

from agentserve import AsyncClient, Client
from agentserve.client.core import Retry, Unreachable

ONCE = Retry(attempts=1)


@pytest.fixture
def nobody():
    """Return an address that refuses connections: bound, not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_the_error_names_the_address_and_what_to_do_in_a_short_traceback(nobody):
    with Client(nobody, retry=ONCE) as client, pytest.raises(Unreachable) as caught:
        client.session()
    assert nobody in str(caught.value)
    assert "is `agentserve serve` running there?" in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert "httpcore" not in shown
    assert shown.count("Traceback") == 1


def test_the_async_client_says_the_same(nobody):
    async def connect():
        async with AsyncClient(nobody, retry=ONCE) as client:
            await client.session()

    with pytest.raises(Unreachable, match="is `agentserve serve` running there"):
        asyncio.run(connect())


@pytest.mark.parametrize("url", ["localhost:8000", "127.0.0.1", "ftp://host", "http://"])
def test_what_is_no_address_is_refused_at_once(url):
    with pytest.raises(ValueError, match="no address such as http://"):
        Client(url)
