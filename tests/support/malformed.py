"""A seeded generator of malformed native requests: raw HTTP bytes, as a hostile client sends them.

Bodies start from valid requests that name every field of their shape; one place in each is then
replaced by a hostile value, removed or doubled, or some bytes are flipped. Paths, methods, headers
and framing are attacked the same way.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from agentserve import wire

TOOL = {
    "type": "function",
    "name": "grep",
    "description": "Search files.",
    "parameters": {"type": "object", "properties": {"pattern": {"type": "string"}}},
    "strict": False,
    "read_only": True,
    "examples": [{"pattern": "x"}],
    "expected_ms": 5,
}
SAMPLING = {
    "temperature": 0.0,
    "top_k": 4,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": -1.0},
    "seed": 7,
    "stop": ["zz"],
}
HINTS = {"expected_ms": {"call_x": 5}, "resume_in_ms": 5, "kv": "auto", "close": False}
HISTORY = [
    {"type": "system", "content": "Be brief."},
    {"type": "user", "content": [{"type": "text", "text": "hello"}]},
    {
        "type": "assistant",
        "content": [
            {"type": "reasoning", "text": "hm"},
            {"type": "text", "text": "hi"},
            {"type": "tool_call", "name": "grep", "arguments": {"pattern": "x"}, "call_id": "c1"},
        ],
    },
    {
        "type": "tool_result",
        "call_id": "c1",
        "output": "none",
        "status": "ok",
        "reason": "r",
        "duration_ms": 3,
    },
]


@dataclass(frozen=True)
class Call:
    """A valid request of one route. `{id}` in the path is the victim session."""

    method: str
    path: str
    shape: type[msgspec.Struct]
    body: dict[str, Any]


CALLS = [
    Call(
        "POST", "/sessions", wire.CreateRequest,
        {
            "id": "made", "model": "smollm2-135m", "system": "s", "tools": [TOOL],
            "history": HISTORY, "sampling": SAMPLING, "on_template_rewrite": "keep",
            "template_options": {}, "ttl_ms": 1000, "metadata": {"a": 1},
        },
    ),
    Call(
        "POST", "/sessions/{id}/turn", wire.TurnRequest,
        {
            "input": [{"type": "user", "content": "go"}], "expect_head": None, "stream": False,
            "max_output_tokens": 2, "sampling": SAMPLING, "tool_choice": {"name": "grep"},
            "tools_allowed": ["grep"], "parallel_tool_calls": True,
            "response_format": {"type": "json_schema", "schema": {"type": "object"}},
            "on_pending": "cancel", "when_busy": "queue", "on_disconnect": "cancel",
            "hints": HINTS, "metadata": {}, "debug": {"force": [{"type": "text", "text": "x"}]},
        },
    ),
    Call(
        "POST", "/sessions/{id}/tool_results", wire.ToolResultsRequest,
        {"results": [HISTORY[3]]},
    ),
    Call("POST", "/sessions/{id}/hints", wire.Hints, HINTS),
    Call(
        "POST", "/sessions/{id}/fork", wire.ForkRequest,
        {"at": "t_1", "id": "forked", "n": 1, "tools_allowed": ["grep"]},
    ),
    Call(
        "POST", "/sessions/{id}/rollback", wire.RollbackRequest,
        {"to": "t_1", "before": "t_2", "expect_head": None},
    ),
    Call(
        "PUT", "/sessions/{id}/history", wire.HistoryRequest,
        {"items": [{"ref": "t_1"}, *HISTORY], "expect_head": None, "prefill": True},
    ),
    Call("POST", "/sessions/{id}/count", wire.CountRequest, {"input": HISTORY}),
    Call(
        "POST", "/sessions/{id}/cancel", wire.CancelRequest, {"turn": "t_1", "keep": "partial"}
    ),
    Call(
        "PATCH", "/sessions/{id}", wire.PatchRequest,
        {"metadata": {}, "ttl_ms": None, "tools": [TOOL]},
    ),
]  # fmt: skip

HOSTILE = [
    "null", "true", "0", "-1", "1", "-0", "1.5", "2147483648", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "123456789012345678901234567890", "1e308",
    "1e999", "5e-324", "NaN", "Infinity", "-Infinity", '""', '"a\\u0000b"', '"\\u0000"',
    '"\\ud800"', '"\\udc00x"', '"\\ud83d\\ude00"', '"<|im_start|>system"', '"../../etc/passwd"',
    '"\ufdd0\uffff"', "[]", "{}", "[{}]", "[null]", '{"":""}',
    '{"type":"text"}', '{"ref":"t_9..t_1"}',
    '[{"type":"user"}]', '{"$ref":"#"}', '{"type":"object","properties":{"a":{"$ref":"#"}}}',
    '{"pattern":"(a+)+$"}', '{"type":["string",5]}', "[" * 10_000 + "]" * 10_000,
    "[" * 400 + "]" * 400,
    '{"a":' * 400 + "1" + "}" * 400,
    '{"properties":{"a":' * 300 + "{}" + "}}" * 300,
    '"' + "x" * 70_000 + '"',
    '"' + "\\n" * 20_000 + '"',
    "[" + "1," * 20_000 + "1]",
    '{"type":"object","enum":[' + "1," * 3_000 + "1]}",
]  # fmt: skip

PATHS = [
    "/", "//", "/sessions/", "/sessions//turn", "/sessions/%00", "/sessions/%FF%FE/turns",
    "/sessions/..%2F..%2Fetc%2Fpasswd", "/sessions/" + "a" * 5_000,
    "/sessions/{id}/", "/sessions/{id}/nope",
    "/sessions/{id}/turns/", "/sessions/{id}/turns/t_999999999", "/sessions/{id}/turns/%00/events",
    "/sessions/{id}/turns/t_1/events?after=-1", "/sessions/{id}/turns/t_1/events?after=x",
    "/sessions/{id}/turns/t_1/events?after=99999999999999999999",
    "/sessions/{id}/turns/t_999/events?after=0", "/sessions/absent",
    "/sessions/{id}/transcript?format=xml",
    "/sessions?limit=0", "/sessions?limit=-5", "/sessions?limit=1e9", "/sessions?limit=abc",
    "/sessions?limit=5&limit=6", "/sessions?state=odd", "/sessions?tier=tape",
    "/sessions?after=%00",
    "/sessions?after=nobody", "/sessions?bogus=1", "/v1/models/../../x", "/metrics/x", "/%", "/%zz",
]  # fmt: skip

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "FOO", "get"]

HEADERS = [
    b"Content-Length: -1", b"Content-Length: 1\r\nContent-Length: 2", b"Content-Length: abc",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5", b"Transfer-Encoding: gzip",
    b"Host: evil.example", b"Host:", b"Origin: http://evil.example", b"Origin: null",
    b"Idempotency-Key: ", b"Idempotency-Key: " + b"k" * 300, b"Last-Event-ID: x",
    b"Authorization: Bearer \xff\xfe", b"X-Big: " + b"x" * 100_000, b"X\x00Y: 1", b": novalue",
    b"Content-Encoding: gzip", b"Content-Type: multipart/form-data; boundary=",
    b"Expect: nonsense",
    b"Upgrade: websocket\r\nConnection: Upgrade",
    b"\r\n".join(b"X-%d: 1" % n for n in range(2_000)),
]  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """One request: its bytes, whether the client hangs up at once, and if it may be valid."""

    kind: str
    raw: bytes
    hang_up: bool = False
    may_succeed: bool = False


def attacks(seed: int, count: int, session: str) -> Iterator[Attack]:
    """Yield `count` requests, the same for the same seed."""
    rng = random.Random(seed)
    makers = [(_field, 55), (_flips, 15), (_path, 10), (_method, 8), (_header, 7), (_framing, 5)]
    for _ in range(count):
        (maker,) = rng.choices([m for m, _ in makers], [weight for _, weight in makers])
        yield maker(rng, session)


def _field(rng: random.Random, session: str) -> Attack:
    call = rng.choice(CALLS)
    body = json.loads(json.dumps(_thinned(rng, call)))
    holder, key = rng.choice(list(_places(body)))
    action = rng.random()
    raw = rng.choice(HOSTILE)
    text = None
    if action < 0.12 and isinstance(holder, dict):
        del holder[key]
    elif action < 0.2 and isinstance(holder, dict):
        holder["unknown_field"] = 1
    else:
        old, holder[key] = holder[key], "@@RAW@@"
        if action < 0.3 and isinstance(key, str):
            raw = f"{json.dumps(old)},{json.dumps(key)}:{raw}"
        text = json.dumps(body).replace('"@@RAW@@"', raw)
    data = (text or json.dumps(body)).encode("utf-8", "surrogatepass")
    return Attack("field", _http(call, session, data), may_succeed=_is_valid(call, data))


def _thinned(rng: random.Random, call: Call) -> dict[str, Any]:
    """Leave out some optional fields: a broken field must not always hide behind another."""
    keep = rng.random()
    required = {field.name for field in msgspec.structs.fields(call.shape) if field.required}
    return {
        name: value for name, value in call.body.items() if name in required or rng.random() < keep
    } or dict(call.body)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield value, key
            yield from _places(inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield value, index
            yield from _places(inner)


def _flips(rng: random.Random, session: str) -> Attack:
    call = rng.choice(CALLS)
    data = bytearray(json.dumps(_thinned(rng, call)).encode())
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    body = bytes(data)
    return Attack("flip", _http(call, session, body), may_succeed=_is_valid(call, body))


def _path(rng: random.Random, session: str) -> Attack:
    path = rng.choice(PATHS).replace("{id}", session)
    head = f"{rng.choice(['GET', 'GET', 'POST'])} {path} HTTP/1.1\r\nHost: localhost\r\n"
    return Attack("path", head.encode() + b"Connection: close\r\nContent-Length: 0\r\n\r\n")


def _method(rng: random.Random, session: str) -> Attack:
    method = rng.choice(METHODS)
    path = rng.choice(CALLS).path.replace("{id}", session)
    if method == "DELETE":
        path = "/sessions"
    return Attack("method", _raw(method, path, b"{}"), may_succeed=True)


def _header(rng: random.Random, session: str) -> Attack:
    call = rng.choice(CALLS)
    header = rng.choice(HEADERS)
    body = json.dumps({}).encode()
    framed = (
        b"" if b"Content-Length" in header or b"Transfer" in header else b"Content-Length: 2\r\n"
    )
    hosted = b"" if header.startswith(b"Host") else b"Host: localhost\r\n"
    head = f"{call.method} {call.path.replace('{id}', session)} HTTP/1.1\r\n".encode()
    raw = head + hosted + framed + b"Connection: close\r\n" + header + b"\r\n\r\n" + body
    return Attack("header", raw, hang_up=b"Transfer" in header, may_succeed=True)


def _framing(rng: random.Random, session: str) -> Attack:
    """Truncated, badly chunked and oversized bodies, and lines that are not HTTP."""
    call = rng.choice(CALLS)
    path = call.path.replace("{id}", session)
    head = f"{call.method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    choice = rng.randrange(6)
    if choice == 0:
        return Attack("framing", head + b'Content-Length: 500\r\n\r\n{"input":', hang_up=True)
    if choice == 1:
        return Attack("framing", chunked + b'5\r\n{"inp\r\n', hang_up=True)
    if choice == 2:
        return Attack("framing", chunked + b"zz\r\nnot hex\r\n0\r\n\r\n")
    if choice == 3:
        return Attack("framing", chunked + b"1\r\n{\r\n" * 2_000 + b"0\r\n\r\n")
    if choice == 4:
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        return Attack("framing", chunked + piece * 24 + b"0\r\n\r\n")
    return Attack("framing", bytes(rng.randrange(256) for _ in range(200)) + b"\r\n\r\n")


def _is_valid(call: Call, body: bytes) -> bool:
    try:
        wire.decode(body, call.shape)
    except Exception:
        return False
    return True


def _http(call: Call, session: str, body: bytes) -> bytes:
    return _raw(call.method, call.path.replace("{id}", session), body)


def _raw(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
