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


def check(attack: Attack, answer: tuple[int, bytes] | None) -> str:
    if answer is None:
        assert attack.kind in ("framing", "header"), attack
        return "closed"
    status, body = answer
    about = (attack.kind, status, body[:500], attack.raw[:2000])
    assert status < 500, about
    assert status >= 400 or attack.may_succeed, about
    assert not LEAKS.search(body), about
    if status < 400:
        return "taken"
    if body.startswith(b"{"):
        error = json.loads(body)["error"]
        assert CATALOGUE[error["code"]].status == status, about
        return str(error["code"])
    assert attack.kind in ("framing", "header", "method", "path"), about
    return "not http"


def canary(server: Served, session: str) -> str:
    return json.dumps([item["text"] for item in server.turn(session, "sing")["output"]])


def test_the_bodies_name_every_field_of_their_shapes() -> None:
    for call in CALLS:
        assert set(call.body) == set(call.shape.__struct_fields__), call.path


def test_the_same_seed_gives_the_same_requests() -> None:
    assert list(attacks(3, 50, "s")) == list(attacks(3, 50, "s"))
    assert list(attacks(3, 50, "s")) != list(attacks(4, 50, "s"))


def test_malformed_requests_are_refused_and_harm_nobody(server: Served) -> None:
    victim = server.create(id="victim")
    server.turn(victim)
    untouched = server.create()
    golden = [canary(server, untouched) for _ in range(COUNT // CANARY_EVERY)]
    watched = server.create()
    outcomes: Counter[str] = Counter()
    songs = []
    for number, attack in enumerate(attacks(SEED, COUNT, victim), start=1):
        outcomes[check(attack, send(server, attack))] += 1
        if number % CANARY_EVERY == 0:
            songs.append(canary(server, watched))
            assert server.http.get("/ready").status_code == 200
    print(f"{COUNT} requests, seed {SEED}: {dict(outcomes.most_common())}")
    assert songs == golden
    assert outcomes["invalid_request"] > COUNT // 3
    assert "engine_error" not in outcomes
