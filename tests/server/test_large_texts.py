from typing import Any

import pytest
from served import Served, served

TEXT = " " * 7_000_000
BODIES: dict[str, dict[str, Any]] = {
    "turn": {"input": TEXT},
    "turn of many": {"input": [{"type": "user", "content": "x"}] * 50_000},
    "count": {"input": [{"type": "user", "content": TEXT}]},
    "history": {
        "items": [{"type": "user", "content": "a"}, {"type": "assistant", "content": TEXT}]
    },
}


@pytest.fixture(scope="module")
def server():
    with served() as running:
        yield running


@pytest.mark.parametrize("route", BODIES)
def test_text_that_no_tokens_of_the_context_could_hold_is_refused(
    server: Served, route: str
) -> None:
    session = server.create()
    method = "PUT" if route == "history" else "POST"
    answer = server.http.request(
        method, f"/sessions/{session}/{route.split()[0]}", json=BODIES[route]
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_full"
    assert "bytes of text" in error["message"]
    assert error["details"]["over"] == error["details"]["input"] - error["details"]["limit"] > 0
    assert server.turn(session)["status"] == "incomplete"


def test_a_system_text_that_never_fits_is_refused_with_each_turn(server: Served) -> None:
    session = server.create(system=TEXT)
    answer = server.http.post(f"/sessions/{session}/turn", json={"input": "go"})
    assert answer.json()["error"]["code"] == "context_full"
