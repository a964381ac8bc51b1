"""Over HTTP: a turn is announced before its body is read; where KV is can be seen."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from served import Served, served

from agentserve.config import ServerSettings
from agentserve.engine.messages import Command, Promote, Submit
from agentserve.sessions.recomputed import REASONS

BODY = b'{"input":"go","max_output_tokens":4}'
KEY = "the-key"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    settings = ServerSettings(api_keys=(KEY, "another"), max_body_bytes=4096, body_timeout_s=2.0)
    with served(settings, key=KEY) as running:
        yield running


@pytest.fixture
def sent(server: Served, monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """What the server has sent to its engine, which gets it too."""
    commands: list[Command] = []
    link = server.assembly.link
    send = link.send

    def record(command: Command) -> None:
        commands.append(command)
        send(command)

    monkeypatch.setattr(link, "send", record)
    return commands


@pytest.fixture
def session(server: Served) -> str:
    """A session with KV, that waits for its next turn."""
    name = server.create()
    server.turn(name)
    return name


def promotions(sent: list[Command]) -> list[bool]:
    return [command.begin for command in sent if isinstance(command, Promote)]


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def begin_request(server: Served, session: str, *headers: str, length: int = len(BODY)) -> Any:
    """Send the head of a turn's request, and nothing of its body."""
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    lines = [
        f"POST /sessions/{session}/turn HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {length}",
        *(headers or (f"x-api-key: {KEY}",)),
    ]
    peer.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    return peer


def status(peer: socket.socket) -> int:
    with peer.makefile("rb") as answer:
        return int(answer.readline().split()[1])


def test_a_turn_is_announced_before_its_body_is_there(
    server: Served, session: str, sent: list[Command]
) -> None:
    with begin_request(server, session) as peer:
        wait_for(lambda: promotions(sent) == [True])
        assert not [command for command in sent if isinstance(command, Submit)]
        peer.sendall(BODY)
        assert status(peer) == 200
    assert promotions(sent) == [True]
    kinds = [type(command) for command in sent if isinstance(command, Promote | Submit)]
    assert kinds == [Promote, Submit]


def leave(peer: socket.socket) -> None:
    peer.close()


def refuse(body: bytes, expected: int) -> Callable[[socket.socket], None]:
    def act(peer: socket.socket) -> None:
        peer.sendall(body)
        assert status(peer) == expected

    return act


@pytest.mark.parametrize(
    ("act", "length"),
    [
        (leave, len(BODY)),
        (refuse(b"{" * len(BODY), 400), len(BODY)),
        (refuse(b'{"input":[],"expect_head":"t_9"}', 409), 32),
        (refuse(b" " * 5000, 413), 5000),
        (refuse(b"{", 400), len(BODY)),  # the rest never comes
    ],
    ids=["the client leaves", "no JSON", "another head", "too large", "too slow"],
)
def test_a_turn_that_does_not_come_is_called_off(
    server: Served,
    session: str,
    sent: list[Command],
    act: Callable[[socket.socket], None],
    length: int,
) -> None:
    with begin_request(server, session, length=length) as peer:
        wait_for(lambda: promotions(sent) == [True])
        act(peer)
        wait_for(lambda: promotions(sent) == [True, False])
    assert not [command for command in sent if isinstance(command, Submit)]


def test_a_request_without_a_right_to_the_session_announces_nothing(
    server: Served, session: str, sent: list[Command]
) -> None:
    for key, expected in (("wrong", 401), ("another", 404)):
        with begin_request(server, session, f"x-api-key: {key}") as peer:
            peer.sendall(BODY)
            assert status(peer) == expected
    assert promotions(sent) == []


def test_a_replay_announces_nothing(server: Served, session: str, sent: list[Command]) -> None:
    for expected in (1, 1, 2):
        key = "first" if expected == 1 else "second"
        headers = {"Idempotency-Key": key}
        path = f"/sessions/{session}/turn"
        assert server.http.post(path, content=BODY, headers=headers).status_code == 200
        assert promotions(sent) == [True] * expected


def test_metrics_have_every_tier_and_reason_from_the_start(server: Served, session: str) -> None:
    lines = server.http.get("/metrics").text.splitlines()
    names = {line.split(" ")[0] for line in lines if not line.startswith("#")}
    for state in ("free", "cached", "locked"):
        assert f'agentserve_host_blocks{{state="{state}"}}' in names
    for kind in ("save", "load"):
        assert f'agentserve_copied_bytes_total{{kind="{kind}"}}' in names
        assert f'agentserve_copy_seconds_total{{kind="{kind}"}}' in names
    for name in (
        "host_evictions_total",
        "stale_completions_total",
        "stall_seconds_total",
        "copies_in_flight",
        "loading",
        "overdue",
        "restore_seconds_count",
        "turn_recomputed_tokens_count",
    ):
        assert f"agentserve_{name}" in names
    for source in ("device", "host", "computed"):
        assert f'agentserve_turn_input_tokens_count{{source="{source}"}}' in names
    reasons = {name for name in names if name.startswith("agentserve_recomputed_tokens_total")}
    assert reasons == {
        f'agentserve_recomputed_tokens_total{{reason="{reason}"}}' for reason in REASONS
    }


def test_kv_that_moved_between_tiers_is_seen_by_every_way_of_looking() -> None:
    with served(num_blocks=40, host_blocks=200) as small:
        names = [small.create() for _ in range(3)]
        for name in names:
            small.turn(name, f"{name} " + "word " * 350)

        def saved() -> int:
            info = small.http.get(f"/sessions/{names[0]}").json()
            return int(info["residency"]["saved_bytes"])

        wait_for(lambda: saved() > 0)
        turn = small.turn(names[0], "and more")
        # The request announced the turn: some or all of the KV was there when it began.
        assert turn["kv"]["host"] + turn["kv"]["device"] == turn["usage"]["cached_tokens"]
        assert turn["usage"]["recomputed"] == []
        times = turn["timing_ms"]
        phases = times["queue"] + times["restore"] + times["prefill"]
        assert phases <= times["ttft"] + 3 <= times["total"] + 3  # each is rounded
        info = small.http.get(f"/sessions/{names[0]}").json()
        assert info["residency"]["loaded_bytes"] > 0
        listed = small.http.get("/sessions?tier=host").json()["sessions"]
        assert {names[1], names[2]} <= {one["id"] for one in listed}
        assert small.http.get("/sessions?tier=none").json()["sessions"] == []
        lines = small.http.get("/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        for kind in ("save", "load"):
            assert float(values[f'agentserve_copied_bytes_total{{kind="{kind}"}}']) > 0
        assert float(values['agentserve_host_blocks{state="cached"}']) > 0
