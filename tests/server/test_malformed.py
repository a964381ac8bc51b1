import http.client
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator

import pytest
from malformed import CALLS, Attack, attacks
from served import Served, served

from agentserve.config import ServerSettings
from agentserve.errors import CATALOGUE

SEED = int(os.environ.get("SEED", "1"))
COUNT = int(os.environ.get("COUNT", "2000"))
CANARY_EVERY = 100
LEAKS = re.compile(
    rb"Traceback|object at| at 0x|0x[0-9a-f]{6}|/home/|/root/|site-packages|\.py\b|msgspec|asyncio"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    settings = ServerSettings(
        allow_force=True,
        max_body_bytes=1 << 20,
        default_max_output_tokens=4,
        disconnect_grace_s=0.05,
        body_timeout_s=2.0,
    )
    with served(settings) as running:
        yield running


def send(server: Served, attack: Attack) -> tuple[int, bytes] | None:
    """Return status and body, or None when the connection was closed without an answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as peer:
        try:
            peer.sendall(attack.raw)
            if attack.hang_up:
                peer.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(
                peer, method=attack.raw.split(b" ", 1)[0].decode("latin-1")
            )
            response.begin()
            return response.status, response.read()
        except (http.client.HTTPException, ConnectionError):
            return None


def judge(attack: Attack, answer: tuple[int, bytes] | None) -> tuple[str, bool]:
    """Return a name for the outcome and whether it is allowed."""
    raw_http = attack.kind in ("framing", "header", "method", "path")
    if answer is None:
        return "closed", raw_http
    status, body = answer
    if status >= 500 or LEAKS.search(body):
        return f"{status} or leak", False
    if status < 400:
        return "taken", attack.may_succeed
    if not body.startswith(b"{"):
        return "not http", raw_http
    error = json.loads(body)["error"]
    return error["code"], CATALOGUE[error["code"]].status == status


def new_victim(server: Served) -> str:
    server.http.delete("/sessions/victim")
    session = server.create(id="victim")
    server.turn(session)
    return session


def canary(server: Served, session: str) -> str:
    return json.dumps([item["text"] for item in server.turn(session, "sing")["output"]])


def test_the_bodies_name_every_field_of_their_shapes() -> None:
    for call in CALLS:
        assert set(call.body) == set(call.shape.__struct_fields__), call.path


def test_the_same_seed_gives_the_same_requests() -> None:
    assert list(attacks(3, 50, "s")) == list(attacks(3, 50, "s"))
    assert list(attacks(3, 50, "s")) != list(attacks(4, 50, "s"))


def test_malformed_requests_are_refused_and_harm_nobody(server: Served) -> None:
    victim = new_victim(server)
    untouched = server.create()
    golden = [canary(server, untouched) for _ in range(COUNT // CANARY_EVERY)]
    watched = server.create()
    outcomes: Counter[str] = Counter()
    songs, wrong = [], []
    for number, attack in enumerate(attacks(SEED, COUNT, victim), start=1):
        answer = send(server, attack)
        outcome, allowed = judge(attack, answer)
        outcomes[outcome] += 1
        if outcome == "session_closed":  # a hint may close it
            new_victim(server)
        if not allowed:
            wrong.append((outcome, answer, attack.raw[:1000]))
        if number % CANARY_EVERY == 0:
            songs.append(canary(server, watched))
            assert server.http.get("/ready").status_code == 200
    print(f"{COUNT} requests, seed {SEED}: {dict(outcomes.most_common())}")
    assert wrong[:5] == []
    assert songs == golden
    assert outcomes["invalid_request"] > COUNT // 3
    assert "engine_error" not in outcomes
