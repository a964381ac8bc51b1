"""`agentserve ps`: what the table shows, that it fits the screen, keys, and JSON."""

import io
import json
import time

import httpx
import pytest
from rich.console import Console
from served import served

from agentserve import wire
from agentserve.cli import main
from agentserve.cli.options import CommandFailed
from agentserve.cli.sessions import fitting_table, list_sessions
from agentserve.config import ServerSettings

NOW = 1_700_000_000.0


def session(name, **fields):
    own = {
        "id": name,
        "state": "awaiting_tools",
        "head": "t_1",
        "turns": 12,
        "model": "m",
        "created_at": int(NOW * 1000),
        "last_active_at": int((NOW - 7300) * 1000),
        "expires_at": None,
        "pending_calls": [],
        "context": wire.Context(81234, 131072, 49838),
        "kv": wire.KvTokens(device=30016, host=81216),
        "usage": wire.Usage(
            recomputed=[wire.Recomputed(4096, "host_full"), wire.Recomputed(1, "last_token")]
        ),
        "metadata": {},
        "residency": wire.Residency(3 << 20, 1 << 20, 1234),
    }
    return wire.SessionInfo(**(own | fields))


def rendered(width, *sessions):
    """Return the lines of the table on a screen of that width."""
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(fitting_table(list(sessions), NOW, width))
    return console.file.getvalue().splitlines()


def test_the_table_shows_tiers_moved_bytes_stall_and_recomputed_tokens():
    header, row = rendered(200, session("run-7"))
    names = "session state turns tokens device host moved stall last active recomputed"
    cells = "run-7 awaiting_tools 12 81234 30016 81216 4.0 MiB 1.2 s 2 h ago"
    assert " ".join(header.split()) == names
    assert " ".join(row.split()) == f"{cells} 4096 host_full, 1 last_token"


@pytest.mark.parametrize("width", [*range(48, 130, 3), 300])
def test_the_table_fits_the_screen_and_cuts_no_number(width):
    long = "a-session-id-" + "x" * 115
    lines = rendered(width, session("short"), session(long, state="idle"))
    assert max(len(line.rstrip()) for line in lines) <= width
    for name in ("short", long[:7]):
        (row,) = [line for line in lines if line.startswith(name)]
        assert row.split()[-4:] if width < 60 else row
        for number in ("12", "81234", "30016", "81216"):
            assert number in row.split()
    if width >= 100:
        assert "4096 host_full" in " ".join(" ".join(lines).split())


def test_no_session_is_an_empty_table():
    (header,) = rendered(80)
    assert header.split()[0] == "session"


def test_ps_shows_the_sessions_of_its_key_as_a_table_and_as_json(capsys):
    settings = ServerSettings(api_keys=("one", "two"))
    with served(settings, key="one") as server:
        server.create(id="mine")
        server.turn("mine")
        url = f"http://127.0.0.1:{server.port}"

        def run(*arguments):
            with pytest.raises(SystemExit) as done:
                main(["ps", "--url", url, *arguments])
            return done.value.code, *capsys.readouterr()

        code, out, _ = run("--api-key", "one")
        assert (code, out.splitlines()[1].split()[:3]) == (0, ["mine", "idle", "1"])
        code, out, _ = run("--api-key", "one", "--json")
        (shown,) = json.loads(out)
        assert (code, shown["id"], shown["kv"]["disk"]) == (0, "mine", 0)
        assert shown["residency"].keys() == {"saved_bytes", "loaded_bytes", "stall_ms"}
        assert run("--api-key", "two", "--json")[:2] == (0, "[]\n")
        code, out, err = run()
        assert (code, out) == (1, "")
        assert "unauthorized" in err
        assert time.time() * 1000 >= shown["last_active_at"]


@pytest.mark.parametrize("content", [b"<html>", b'{"sessions": [{"id": 7}]}', b"[]"])
def test_a_server_that_is_no_agentserve_is_named(content):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    with (
        httpx.Client(base_url="http://elsewhere:9", transport=transport) as client,
        pytest.raises(CommandFailed, match="http://elsewhere:9"),
    ):
        list_sessions(client)
