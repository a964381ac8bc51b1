import ast
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from agentserve.config import ServerSettings
from agentserve.errors import Forbidden, Unauthorized
from agentserve.server import auth
from agentserve.server.auth import HostGuard, Keyring, check_bind


def test_without_keys_everyone_is_local() -> None:
    assert Keyring(()).principal(Headers({"authorization": "Bearer whatever"})) == "local"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer s3cret"},
        {"authorization": "bearer s3cret"},
        {"x-api-key": "s3cret"},
    ],
)
def test_both_headers_carry_the_key(headers: dict[str, str]) -> None:
    ring = Keyring(("other", "s3cret"))
    principal = ring.principal(Headers(headers))
    assert principal == Keyring(("s3cret",)).principal(Headers({"x-api-key": "s3cret"}))
    assert "s3cret" not in principal


def test_each_key_is_its_own_principal() -> None:
    ring = Keyring(("a", "b"))
    names = {ring.principal(Headers({"x-api-key": key})) for key in "ab"}
    assert len(names) == 2


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Basic s3cret"},
        {"authorization": "Bearer s3cre"},
        {"authorization": "Bearer s3cret2"},
        {"x-api-key": ""},
        {"x-api-key": "S3CRET"},
    ],
)
def test_a_missing_and_a_wrong_key_are_refused_alike(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized) as caught:
        Keyring(("s3cret",)).principal(Headers(headers))
    with pytest.raises(Unauthorized) as missing:
        Keyring(("s3cret",)).principal(Headers({}))
    assert caught.value.message == missing.value.message


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000"]
)
def test_local_names_are_accepted_with_any_port(host: str) -> None:
    HostGuard(ServerSettings()).check(Headers({"host": host}))


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost@evil.example", "",
     "[::1", "2130706433", "10.0.0.1"],
)  # fmt: skip
def test_other_names_are_refused_on_a_loopback_bind(host: str) -> None:
    with pytest.raises(Forbidden):
        HostGuard(ServerSettings()).check(Headers({"host": host}))


def test_a_request_without_host_is_refused_on_a_loopback_bind() -> None:
    with pytest.raises(Forbidden):
        HostGuard(ServerSettings()).check(Headers({}))


def test_a_network_bind_answers_to_any_name() -> None:
    settings = ServerSettings(host="0.0.0.0", api_keys=("k",))
    HostGuard(settings).check(Headers({"host": "gpu-box.lan:8000"}))


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1.evil.io", ""])
def test_a_foreign_origin_is_refused(origin: str) -> None:
    for settings in (ServerSettings(), ServerSettings(host="0.0.0.0", api_keys=("k",))):
        with pytest.raises(Forbidden):
            HostGuard(settings).check(Headers({"host": "127.0.0.1", "origin": origin}))


def test_the_servers_own_origin_is_accepted() -> None:
    HostGuard(ServerSettings()).check(
        Headers({"host": "127.0.0.1:8000", "origin": "http://localhost:8000"})
    )
    HostGuard(ServerSettings(host="0.0.0.0", api_keys=("k",))).check(
        Headers({"host": "box.lan:8000", "origin": "https://box.lan"})
    )


def test_an_open_bind_needs_a_key() -> None:
    check_bind(ServerSettings())
    check_bind(ServerSettings(host="::1"))
    check_bind(ServerSettings(host="0.0.0.0", api_keys=("k",)))
    with pytest.raises(ValueError, match="key"):
        check_bind(ServerSettings(host="0.0.0.0"))


def test_secrets_are_compared_only_by_compare_digest() -> None:
    tree = ast.parse(Path(auth.__file__).read_text())
    compared = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    }
    assert not compared & {"key", "sent", "known", "credentials", "digest"}
    assert "hmac.compare_digest(" in Path(auth.__file__).read_text()
