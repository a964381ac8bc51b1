"""What `import agentserve` gives, and what it costs."""

import inspect
import subprocess
import sys

import agentserve
from agentserve.client import aio, sync

PAIRS = [
    (sync.Client, aio.AsyncClient),
    (sync.Session, aio.AsyncSession),
    (sync.TurnStream, aio.AsyncTurnStream),
]
TWINS = {"__enter__": "__aenter__", "__exit__": "__aexit__"} | {
    "__iter__": "__aiter__",
    "__next__": "__anext__",
}


def members(cls):
    return {
        name: member
        for name, member in vars(cls).items()
        if not name.startswith("_") or name in {*TWINS, *TWINS.values()}
    }


def parameters(member):
    if isinstance(member, property):
        return "property"
    if isinstance(member, classmethod):
        member = member.__func__
    return [(p.name, p.kind, p.default) for p in inspect.signature(member).parameters.values()]


def test_the_public_names_are_these():
    assert sorted(agentserve.__all__) == [
        "AsyncClient",
        "AsyncSession",
        "Client",
        "Session",
        "ToolDone",
        "ToolStarted",
        "Turn",
        "errors",
        "system",
        "tool",
        "user",
    ]
    for name in agentserve.__all__:
        assert getattr(agentserve, name) is not None


def test_dir_lists_the_public_names_before_they_are_loaded():
    modules = loaded_after("import agentserve; assert {*agentserve.__all__} <= {*dir(agentserve)}")
    assert "agentserve.client" not in modules


def test_sync_and_async_have_the_same_public_members_and_parameters():
    for plain, twin in PAIRS:
        ours = {TWINS.get(name, name): parameters(m) for name, m in members(plain).items()}
        theirs = {name: parameters(m) for name, m in members(twin).items()}
        assert ours == theirs


def loaded_after(statement):
    program = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_the_client_loads_neither_the_server_nor_a_model():
    modules = loaded_after("from agentserve import *")
    assert "agentserve.client.sync" in modules
    for heavy in ("torch", "uvicorn", "starlette", "transformers", "tokenizers", "numpy"):
        assert heavy not in modules
    assert not any(name.startswith(("agentserve.server", "agentserve.model")) for name in modules)


def test_the_package_itself_loads_no_client():
    assert "httpx" not in loaded_after("import agentserve")


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(agentserve, "Clients")
