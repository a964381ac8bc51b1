"""Retries, errors and keys, decided without I/O."""

import msgspec
import pytest
from client_flows import Script, api, ok, refused

from agentserve import errors
from agentserve.client import core
from agentserve.errors import CATALOGUE, AgentserveError


def call(script, method="POST", body=None):
    return script.drive(api().call(method, "/x", int, {} if body is None else body))


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_every_error_of_the_catalogue_is_raised_as_its_class(code):
    kind = CATALOGUE[code]
    script = Script(*[refused(kind.status, code, "too much")] * 8)
    with pytest.raises(kind, match="too much") as caught:
        call(script)
    assert type(caught.value) is kind
    assert (caught.value.param, caught.value.details) == ("input", {"limit": 5})


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_only_429_and_503_are_sent_again(code):
    status = CATALOGUE[code].status
    script = Script(*[refused(status, code)] * 8)
    with pytest.raises(AgentserveError):
        call(script)
    assert len(script.sent) == (8 if status in (429, 503) else 1)


def test_a_retry_is_the_same_request_with_the_same_key():
    script = Script(refused(429, "overloaded"), ConnectionError(), refused(503, "draining"), ok(7))
    assert call(script) == 7
    assert len(script.sent) == 4
    assert len({(s.body, s.headers["idempotency-key"]) for s in script.sent}) == 1


def test_two_requests_have_two_keys_and_reads_have_none():
    first, second, read = Script(ok(1)), Script(ok(1)), Script(ok(1))
    call(first)
    call(second)
    call(read, "GET")
    assert first.sent[0].headers["idempotency-key"] != second.sent[0].headers["idempotency-key"]
    assert "idempotency-key" not in read.sent[0].headers


def test_a_lost_connection_is_raised_after_the_last_attempt():
    script = Script(*[ConnectionError("gone")] * 8)
    with pytest.raises(ConnectionError, match="gone"):
        call(script)
    assert len(script.slept) == 7


def test_a_server_that_takes_no_connection_is_given_up_within_two_seconds():
    script = Script(*[core.Unreachable("nobody there")] * 8)
    with pytest.raises(core.Unreachable, match="nobody there"):
        call(script)
    assert len(script.slept) >= 3
    assert sum(script.slept) <= 2


def test_a_connection_that_took_long_to_fail_is_not_tried_again():
    script = Script(core.Unreachable("silence", spent_s=10.0))
    with pytest.raises(core.Unreachable):
        call(script)
    assert script.slept == []


def test_a_server_that_has_answered_is_given_every_attempt_to_come_back():
    script = Script(ok(1), *[core.Unreachable("restarting")] * 7, ok(2))
    client = api()
    assert script.drive(client.call("GET", "/x", int)) == 1
    assert script.drive(client.call("GET", "/x", int)) == 2


def test_waits_grow_and_are_bounded():
    script = Script(*[refused(503, "draining")] * 8)
    with pytest.raises(errors.Draining):
        call(script)
    for number, seconds in enumerate(script.slept):
        assert min(0.125 * 2**number, 10) <= seconds <= min(0.25 * 2**number, 10)


@pytest.mark.parametrize(("asked", "waited"), [("3", 3.0), ("3600", 10.0), ("soon", None)])
def test_retry_after_is_honoured_within_bounds(asked, waited):
    script = Script(refused(429, "overloaded", retry_after=asked), ok(1))
    call(script)
    assert script.slept[0] == waited if waited else script.slept[0] < 0.5


def test_an_answer_that_is_not_ours_is_reported_with_its_status_and_text():
    script = Script(core.Reply(502, {}, b"<html>bad gateway"))
    with pytest.raises(AgentserveError, match="HTTP 502: <html>bad gateway"):
        call(script)


def test_an_error_code_of_a_newer_server_becomes_the_base_class():
    script = Script(refused(400, "brand_new", "details inside"))
    with pytest.raises(AgentserveError, match="brand_new: details inside") as caught:
        call(script)
    assert type(caught.value) is AgentserveError


def test_bodies_are_json():
    script = Script(ok(1))
    call(script, body={"a": [1, None]})
    assert msgspec.json.decode(script.sent[0].body) == {"a": [1, None]}
    assert script.sent[0].headers["content-type"] == "application/json"
