import threading
from collections.abc import Iterator

import httpx
import pytest
from served import Served, parse_events, served

from agentserve.config import ServerSettings


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    settings = ServerSettings(max_sessions=5, disconnect_grace_s=0.2)
    with served(settings, step_s=0.01) as running:
        yield running


@pytest.fixture
def session(server: Served) -> Iterator[str]:
    name = server.create()
    yield name
    server.http.delete(f"/sessions/{name}")


def keyed(server: Served, path: str, key: str, body: dict, method: str = "POST") -> httpx.Response:
    return server.http.request(method, path, json=body, headers={"Idempotency-Key": key})


def test_a_turn_sent_twice_runs_once(server: Served, session: str) -> None:
    path, body = f"/sessions/{session}/turn", {"input": "x", "max_output_tokens": 3}
    first, second = keyed(server, path, "a", body), keyed(server, path, "a", body)
    assert first.json() == second.json()
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert server.http.get(f"/sessions/{session}").json()["turns"] == 1


def test_a_streamed_turn_sent_twice_gives_the_same_events(server: Served, session: str) -> None:
    path = f"/sessions/{session}/turn"
    body = {"input": "x", "max_output_tokens": 3, "stream": True}
    first, second = keyed(server, path, "b", body), keyed(server, path, "b", body)
    assert parse_events(first.text) == parse_events(second.text)
    assert server.http.get(f"/sessions/{session}").json()["turns"] == 1


def test_a_second_request_joins_the_running_turn(server: Served, session: str) -> None:
    path = f"/sessions/{session}/turn"
    body = {"input": "x", "max_output_tokens": 40, "stream": True}
    headers = {"Idempotency-Key": "c"}
    joined: list[httpx.Response] = []

    def join() -> None:
        with server.client() as http:
            joined.append(http.post(path, json=body, headers=headers))

    with server.http.stream("POST", path, json=body, headers=headers) as response:
        chunks = response.iter_text()
        first = next(chunks)
        other = threading.Thread(target=join)
        other.start()
        text = first + "".join(chunks)
        other.join()
    assert parse_events(joined[0].text) == parse_events(text)
    assert joined[0].headers["idempotency-replayed"] == "true"
    assert server.http.get(f"/sessions/{session}").json()["turns"] == 1


def test_a_lost_connection_is_resumed_by_sending_again(server: Served, session: str) -> None:
    path = f"/sessions/{session}/turn"
    body = {"input": "x", "max_output_tokens": 30, "stream": True}
    with server.http.stream("POST", path, json=body, headers={"Idempotency-Key": "d"}) as response:
        next(response.iter_text())
    events = parse_events(keyed(server, path, "d", body).text)
    assert events[0]["seq"] == 1
    assert events[-1]["turn"]["usage"]["output_tokens"] == 30


def test_another_body_is_a_mismatch_on_post_and_put(server: Served, session: str) -> None:
    turn = {"input": "x", "max_output_tokens": 1}
    history = {"items": [{"type": "user", "content": "x"}]}
    for method, path, body, other in [
        ("POST", f"/sessions/{session}/turn", turn, turn | {"input": "y"}),
        ("PUT", f"/sessions/{session}/history", history, {"items": []}),
    ]:
        assert keyed(server, path, "e", body, method).status_code == 200
        answer = keyed(server, path, "e", other, method)
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] == "idempotency_mismatch"


def test_a_created_session_is_created_once(server: Served) -> None:
    first, second = (keyed(server, "/sessions", "f", {"metadata": {"n": 1}}) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    server.http.delete(f"/sessions/{first.json()['id']}")


def test_a_refusal_for_lack_of_room_is_not_remembered(server: Served) -> None:
    made = []
    while (answer := server.http.post("/sessions")).status_code == 201:
        made.append(answer.json()["id"])
    refused = keyed(server, "/sessions", "g", {})
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "quota_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    for name in made:
        server.http.delete(f"/sessions/{name}")
    again = keyed(server, "/sessions", "g", {})
    assert again.status_code == 201
    server.http.delete(f"/sessions/{again.json()['id']}")


@pytest.mark.parametrize("key", ["", "k" * 300])
def test_a_bad_key_is_refused(server: Served, key: str) -> None:
    assert keyed(server, "/sessions", key, {}).status_code == 400
