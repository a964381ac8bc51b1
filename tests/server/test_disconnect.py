import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served import Served, served

from agentserve.config import ServerSettings

GRACE_S = 0.3


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    settings = ServerSettings(disconnect_grace_s=GRACE_S, send_timeout_s=1.0)
    with served(settings, step_s=0.02) as running:
        yield running


def wait_for_end(server: Served, session: str) -> dict[str, Any]:
    """Return the first turn once it has ended."""
    for _ in range(1500):
        turn: dict[str, Any] = server.http.get(f"/sessions/{session}/turns/t_1").json()
        if turn.get("status") not in ("running", "queued", None):
            return turn
        time.sleep(0.01)
    raise AssertionError(turn)


def open_turn(server: Served, session: str, fields: str) -> socket.socket:
    """Send a long turn over a bare socket."""
    body = b'{"input":"go","max_output_tokens":900' + fields.encode() + b"}"
    peer = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /sessions/{session}/turn HTTP/1.1\r\nHost: localhost\r\n"
    peer.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return peer


def wait_until_running(server: Served, session: str) -> None:
    while server.http.get(f"/sessions/{session}").json()["state"] != "running":
        time.sleep(0.005)


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def half_close(peer: socket.socket) -> None:
    peer.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [socket.socket.close, reset, half_close])
@pytest.mark.parametrize("fields", ["", ',"stream":true'])
def test_a_client_that_leaves_cancels_its_turn_after_the_grace(
    server: Served, leave: Any, fields: str
) -> None:
    session = server.create()
    with open_turn(server, session, fields) as peer:
        wait_until_running(server, session)
        leave(peer)
        turn = wait_for_end(server, session)
    assert turn["status"] == "cancelled"
    assert server.http.get(f"/sessions/{session}").json()["head"] is None
    assert server.turn(session)["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("fields", ["", ',"stream":true'])
def test_a_turn_that_is_to_continue_runs_on_without_readers(server: Served, fields: str) -> None:
    session = server.create()
    body = f',"max_output_tokens":60,"on_disconnect":"continue"{fields}'
    # The later of two equal keys counts.
    with open_turn(server, session, body):
        wait_until_running(server, session)
    turn = wait_for_end(server, session)
    assert turn["usage"]["output_tokens"] == 60


def test_a_follower_keeps_the_turn_alive(server: Served) -> None:
    session = server.create()
    path = f"/sessions/{session}/turns/t_1/events"
    with open_turn(server, session, ',"stream":true,"max_output_tokens":80') as peer:
        wait_until_running(server, session)
        with server.client() as http, http.stream("GET", path) as follower:
            chunks = follower.iter_text()
            next(chunks)
            peer.close()
            for _ in chunks:
                pass
    assert wait_for_end(server, session)["usage"]["output_tokens"] == 80


def test_returning_within_the_grace_keeps_the_turn(server: Served) -> None:
    session = server.create()
    with open_turn(server, session, ',"stream":true,"max_output_tokens":60') as peer:
        wait_until_running(server, session)
        peer.close()
    events = server.http.get(f"/sessions/{session}/turns/t_1/events?after=1")
    assert "turn.done" in events.text
    assert wait_for_end(server, session)["status"] != "cancelled"


def test_a_turn_is_cancelled_by_request_while_it_streams(server: Served) -> None:
    session = server.create()
    body = {"input": "go", "max_output_tokens": 900, "stream": True}
    with (
        server.client() as http,
        http.stream("POST", f"/sessions/{session}/turn", json=body) as response,
    ):
        chunks = response.iter_text()
        next(chunks)
        cancelled = server.http.post(f"/sessions/{session}/cancel", json={})
        text = "".join(chunks)
    assert cancelled.json()["status"] == "cancelled"
    assert text.count("event: turn.done") == 1


def test_the_engine_is_idle_after_all_have_left(server: Served) -> None:
    sessions = [server.create() for _ in range(4)]
    peers = [open_turn(server, session, ',"stream":true') for session in sessions]
    for session in sessions:
        wait_until_running(server, session)
    for peer in peers:
        peer.close()
    assert {wait_for_end(server, session)["status"] for session in sessions} == {"cancelled"}
    states = {server.http.get(f"/sessions/{session}").json()["state"] for session in sessions}
    assert states == {"idle"}


def test_a_shutdown_while_a_client_streams_ends_in_time() -> None:
    with served(ServerSettings(), step_s=0.02) as server:
        session = server.create()
        peer = open_turn(server, session, ',"stream":true')
        wait_until_running(server, session)
    with peer, server.client() as http, pytest.raises(httpx.ConnectError):
        http.get("/health")
