from collections.abc import Iterator

import httpx
import pytest
from served import Served, served

from agentserve.config import ServerSettings

TURN = {"input": "x", "max_output_tokens": 1}
ITEMS = {"items": [{"type": "user", "content": "x"}]}
RESULTS = {"results": [{"type": "tool_result", "call_id": "c", "output": "x"}]}
OWNED = [
    ("GET", "/sessions/{id}", None),
    ("GET", "/sessions/{id}/turns", None),
    ("GET", "/sessions/{id}/turns/t_1", None),
    ("GET", "/sessions/{id}/turns/t_1/events", None),
    ("GET", "/sessions/{id}/transcript", None),
    ("POST", "/sessions/{id}/turn", TURN),
    ("POST", "/sessions/{id}/turn", TURN | {"stream": True}),
    ("POST", "/sessions/{id}/tool_results", RESULTS),
    ("POST", "/sessions/{id}/hints", {}),
    ("POST", "/sessions/{id}/fork", {}),
    ("POST", "/sessions/{id}/rollback", {"to": "t_1"}),
    ("PUT", "/sessions/{id}/history", ITEMS),
    ("POST", "/sessions/{id}/count", {"input": "x"}),
    ("POST", "/sessions/{id}/cancel", {"turn": "t_1"}),
    ("PATCH", "/sessions/{id}", {"metadata": {}}),
    ("DELETE", "/sessions/{id}", None),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ServerSettings(api_keys=("owner", "other")), key="owner") as running:
        yield running


def ask(http: httpx.Client, method: str, path: str, body: dict | None) -> httpx.Response:
    return http.request(method, path) if body is None else http.request(method, path, json=body)


def routes(server: Served) -> set[tuple[str, str]]:
    return {
        (method, route.path)
        for route in server.assembly.app.routes
        for method in route.methods - {"HEAD"}
    }


def test_the_matrix_names_every_route_of_a_session(server: Served) -> None:
    named = {(method, path.replace("t_1", "{turn}")) for method, path, _ in OWNED}
    assert named == {
        (method, path) for method, path in routes(server) if path.startswith("/sessions/")
    }


@pytest.mark.parametrize(("method", "path", "body"), OWNED)
def test_only_the_owner_reaches_a_session_and_others_cannot_tell_it_exists(
    server: Served, method: str, path: str, body: dict | None
) -> None:
    session = server.create()
    server.turn(session)
    with server.client(x_api_key="other") as other:
        foreign = ask(other, method, path.format(id=session), body)
        absent = ask(other, method, path.format(id="s_absent"), body)
    assert foreign.status_code == absent.status_code == 404
    assert foreign.text.replace(session, "*") == absent.text.replace("s_absent", "*")
    assert foreign.json()["error"]["code"] == "session_not_found"
    owner = ask(server.http, method, path.format(id=session), body)
    assert owner.status_code != 404
    server.http.delete(f"/sessions/{session}")


def test_every_route_but_health_needs_a_key(server: Served) -> None:
    for method, path in routes(server):
        for headers in ({}, {"x-api-key": "revoked"}, {"Authorization": "Bearer x"}):
            with server.client(**headers) as nobody:
                answer = nobody.request(
                    method, path.replace(":path", "").format(id="a", turn="t_1")
                )
            if path == "/health":
                assert answer.status_code == 200
            else:
                assert answer.status_code == 401
                error = answer.json()["error"]
                native = "unauthorized" if "code" in error else "authentication_error"
                assert error.get("code", error.get("type")) == native


def test_a_list_shows_only_ones_own(server: Served) -> None:
    session = server.create()
    with server.client(Authorization="Bearer other") as other:
        assert other.get("/sessions?limit=1000").json()["sessions"] == []
    listed = server.http.get("/sessions?limit=1000").json()["sessions"]
    assert session in {one["id"] for one in listed}


def test_the_same_id_names_another_session_for_another_key(server: Served) -> None:
    server.create(id="mine", metadata={"of": "owner"})
    with server.client(x_api_key="other") as other:
        answer = other.post("/sessions", json={"id": "mine", "metadata": {"of": "other"}})
        assert answer.status_code == 201
        other.delete("/sessions/mine")
    assert server.http.get("/sessions/mine").json()["metadata"] == {"of": "owner"}


def test_the_same_idempotency_key_is_another_one_for_another_key(server: Served) -> None:
    headers = {"Idempotency-Key": "shared"}
    mine = server.http.post("/sessions", json={}, headers=headers).json()["id"]
    with server.client(x_api_key="other") as other:
        theirs = other.post("/sessions", json={"metadata": {"a": 1}}, headers=headers)
        assert theirs.status_code == 201
        assert theirs.json()["id"] != mine
        other.delete(f"/sessions/{theirs.json()['id']}")


@pytest.mark.parametrize(
    "headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}]
)
def test_rebound_names_and_foreign_pages_are_refused(
    server: Served, headers: dict[str, str]
) -> None:
    for path in ("/health", "/sessions"):
        answer = server.http.get(path, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "forbidden"
