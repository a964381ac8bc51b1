"""What clients may fill as they like: schemas, metadata, arguments and outputs."""

from collections.abc import Iterator

import pytest
from served import Served, served

from agentserve.config import ServerSettings

LARGE = [2**63, -(2**63) - 1, 2**64, 10**30]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ServerSettings(allow_force=True)) as running:
        yield running


def tool(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "function", "name": "add", "parameters": schema}


@pytest.mark.parametrize("number", LARGE)
def test_integers_of_any_size_come_back_as_they_were_sent(server: Served, number: int) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "default": number}}}
    body = {"tools": [tool(schema)], "metadata": {"n": number}, "id": f"n{number % 9973}"}
    session = server.create(**body)
    assert server.http.post("/sessions", json=body).status_code == 200
    call = {"type": "tool_call", "name": "add", "arguments": {"n": number}}
    turn = server.turn(
        session, max_output_tokens=900, metadata={"n": number}, debug={"force": [call]}
    )
    assert turn["output"][0]["arguments"] == {"n": number}
    result = {
        "type": "tool_result",
        "call_id": turn["pending_calls"][0]["call_id"],
        "output": number,
    }
    for _ in range(2):
        staged = server.http.post(f"/sessions/{session}/tool_results", json={"results": [result]})
        assert staged.status_code == 200, staged.text
    assert server.turn(session, input=[])["status"] == "incomplete"
    assert server.http.get(f"/sessions/{session}/turns/{turn['id']}").json() == turn
    assert server.http.get(f"/sessions/{session}").json()["metadata"] == {"n": number}
    items = [{"type": "tool_result", "call_id": result["call_id"], "output": number}]
    history = [{"ref": turn["id"]}, *items]
    moved = server.http.put(f"/sessions/{session}/history", json={"items": history})
    assert moved.status_code == 200, moved.text
    changed = server.http.patch(f"/sessions/{session}", json={"metadata": {"m": number}})
    assert changed.status_code == 200, changed.text
    server.http.delete(f"/sessions/{session}")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}},
        {"type": "object", "properties": {"a": {"enum": ["x" * 60_000]}}},
    ],
    ids=["parts", "bytes"],
)
def test_tools_that_take_long_to_check_are_refused(server: Served, schema: dict) -> None:
    tools = [tool(schema) | {"name": f"t{i}"} for i in range(12)]
    refused = server.http.post("/sessions", json={"tools": tools})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "bad_tool_schema"
    session = server.create()
    refused = server.http.patch(f"/sessions/{session}", json={"tools": tools})
    assert refused.status_code == 400
    assert server.turn(session)["status"] == "incomplete"
