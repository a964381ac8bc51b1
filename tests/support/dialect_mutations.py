"""Mutated bodies of dialect requests, by seed, and what may come of them."""

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from scripted import WEATHER, Scripted, chat_chunks, named_events

from agentserve.errors import CATALOGUE

ANSWER = "Yes, gladly."
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be nice."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "assistant", "content": "It is.", "reasoning_content": "hm"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "stream": False,
        "stream_options": {"include_usage": True},
        "max_tokens": 40,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["zzz"],
        "n": 1,
        "seed": 3,
        "logit_bias": {"5": 1.0},
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "logprobs": False,
        "metadata": {"session_id": "run-123456"},
        "prompt_cache_key": "key",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "user": "me",
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 40,
        "system": [{"type": "text", "text": "Be nice.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        "tools": [{"name": "get_weather", "input_schema": WEATHER["parameters"]}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "stop_sequences": ["zzz"],
        "stream": False,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": '{"session_id": "abcdef-123"}'},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "Be nice.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", **WEATHER, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_output_tokens": 40,
        "stream": False,
        "store": True,
        "background": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "metadata": {"session_id": "run-123456"},
        "prompt_cache_key": "key",
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
    },
}
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 1e308, 0.5, "", "x", "none", "auto",
    "system", "tool", "assistant", "user", "function", "json_schema", "x" * 5000, "\x00\x07",
    "\u2028<|im_end|>", "\ufdd0\uffff", "{", '{"a": [', [], {}, [[]], [None], ["a", 1], [{}],
    {"type": "text"}, {"type": "image_url", "image_url": {"url": "data:"}}, {"type": "tool_use"},
    {"type": "text", "text": 7}, {"type": "function"}, {"type": "json_schema", "schema": {}},
    {"role": "user"}, {"role": "assistant", "tool_calls": [{}]}, {"a": {"b": {"c": [1, {}]}}},
    {"type": "tool_result", "tool_use_id": "nobody", "content": [{"type": "image"}]},
    {"type": "allowed_tools", "tools": 5, "allowed_tools": {"mode": 5, "tools": 5}},
    {"$ref": "#"}, {"type": "object", "properties": 5}, {"type": ["string", "null"]},
]  # fmt: skip


def mutated(path: str, seed: int, count: int) -> Iterator[bytes]:
    """Yield `count` bodies for one dialect."""
    source = random.Random(f"{path} {seed}")
    for _ in range(count):
        body = copy.deepcopy(BODIES[path])
        for _ in range(source.choice((1, 1, 1, 2, 3))):
            _mutate(body, source)
        data = json.dumps(body, ensure_ascii=source.random() < 0.5).encode("utf-8", "replace")
        yield _broken(data, source) if source.random() < 0.1 else data


def _mutate(body: Any, source: random.Random) -> None:
    spots = list(_spots(body))
    if not spots:
        return
    holder, key = source.choice(spots)
    how = source.random()
    if how < 0.6:
        holder[key] = copy.deepcopy(source.choice(JUNK))
    elif how < 0.75:
        del holder[key]
    elif how < 0.85 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif how < 0.9 and isinstance(holder, dict):
        holder[str(source.choice(JUNK))[:40]] = copy.deepcopy(source.choice(JUNK))
    else:
        other, place = source.choice(spots)
        holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _spots(value[key])


def _broken(data: bytes, source: random.Random) -> bytes:
    at = source.randrange(len(data))
    return source.choice(
        (
            data[:at],
            data[:at] + bytes([source.randrange(256)]) + data[at:],
            data[:at] + b"\\ud800" + data[at:],
            b"[" * 5000 + data,
            b"",
        )
    )


def judge(path: str, status: int, kind: str, text: str) -> tuple[str, bool]:
    """Return a name for the outcome and whether it is right."""
    if 400 <= status < 500:
        error = json.loads(text)["error"]
        known = error.get("code", "invalid_request") in {*CATALOGUE, "context_length_exceeded"}
        return f"{status}", known or error["code"] == "previous_response_not_found"
    if status != 200:
        return f"{status}", False
    said = _said(path, text, streamed=kind.startswith("text/event-stream"))
    return "200", said is None or ANSWER.startswith(said)


def _said(path: str, text: str, *, streamed: bool) -> str | None:
    """Return the text of an answer; None when it runs in the background."""
    if path == "/v1/chat/completions":
        if streamed:
            choices = [one for chunk in chat_chunks(text) for one in chunk["choices"]]
            return "".join(one["delta"].get("content", "") for one in choices)
        return str(json.loads(text)["choices"][0]["message"]["content"])
    if path == "/v1/messages":
        if streamed:
            events = named_events(text)
            assert events[-1]["type"] == "message_stop", events[-1]
            return "".join(one.get("delta", {}).get("text", "") for one in events)
        return "".join(block["text"] for block in json.loads(text)["content"])
    response = json.loads(text) if not streamed else named_events(text)[-1]["response"]
    if response["status"] == "in_progress":
        return None
    assert response["status"] in ("completed", "incomplete"), response
    return "".join(part["text"] for one in response["output"] for part in one["content"])


def run(server: Scripted, path: str, seed: int, count: int) -> tuple[Counter[str], list[Any]]:
    """Send `count` bodies; return the outcomes, and what was wrong."""
    outcomes: Counter[str] = Counter()
    wrong = []
    for body in mutated(path, seed, count):
        answer = server.http.post(path, content=body)
        kind = answer.headers.get("content-type", "")
        name, right = judge(path, answer.status_code, kind, answer.text)
        outcomes[name] += 1
        if not right:
            wrong.append((answer.status_code, answer.text[:600], body[:3000]))
    return outcomes, wrong
