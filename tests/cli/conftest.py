"""A real server whose model's words are dictated, for the commands that talk to one."""

import pytest
from forced import forced_server, telling


@pytest.fixture(scope="module")
def server():
    """Yield (the app in front of the server, its address)."""
    with forced_server() as served:
        yield served


@pytest.fixture
def story(server):
    """Set what the model says in the next turns; return what was sent meanwhile."""
    with telling(server[0]) as tell:
        yield tell
