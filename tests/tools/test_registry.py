"""Tools by name, and what the decorator says about them."""

import subprocess
import sys
from functools import partial

import pytest
from agentserve_tools import Toolbox, tool


@tool(read_only=True, expected_ms=20, examples=[{"path": "a.py"}], max_concurrency=2)
def read(path: str) -> str:
    """Read a file."""
    return path


def plain(n: int) -> int:
    return n


def test_a_decorated_function_stays_a_function():
    assert read("x") == "x"
    assert tool(plain)(3) == 3


def test_the_decorator_describes_the_tool():
    box = Toolbox([read])
    (spec,) = box.specs
    assert (spec.name, spec.description) == ("read", "Read a file.")
    assert spec.read_only
    assert (spec.expected_ms, spec.examples) == (20, ({"path": "a.py"},))
    assert box["read"].max_concurrency == 2


def test_plain_async_and_callable_objects_are_accepted():
    async def later(n: int) -> int:
        return n

    class Adder:
        def __call__(self, n: int) -> int:
            return n + 1

    assert list(Toolbox([plain, later, Adder()])) == ["plain", "later", "Adder"]


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools named plain"):
        Toolbox([plain, plain])


@pytest.mark.parametrize("name", ["has space", "", "x" * 65, "dotted.name"])
def test_a_name_that_the_server_would_refuse_is_refused(name):
    def f() -> None: ...

    f.__name__ = name
    with pytest.raises(ValueError, match="is no tool name"):
        Toolbox([f])


def test_a_nameless_callable_needs_a_name_and_then_works():
    named = partial(plain, n=3)
    with pytest.raises(ValueError, match="there are two tools"):
        Toolbox([partial(plain, n=1), partial(plain, n=2)])
    assert list(Toolbox([tool(name="three")(named)])) == ["three"]


def test_an_example_may_begin_with_what_the_user_says():
    example = {"input": "Open a.py", "arguments": {"path": "a.py"}}

    @tool(examples=[example])
    def show(path: str) -> str:
        return path

    assert Toolbox([show]).specs[0].examples == (example,)


def test_an_example_that_is_not_a_valid_call_is_refused():
    with pytest.raises(ValueError, match="argument n"):
        Toolbox([tool(examples=[{"n": "three"}])(partial(plain))])


def test_without_the_mcp_package_it_is_said_what_to_install(tmp_path):
    file = tmp_path / "mcp.json"
    file.write_text('{"mcpServers": {}}')
    program = (
        "import sys\n"
        "sys.modules['mcp'] = None\n"
        "from agentserve_tools import Toolbox\n"
        "try: Toolbox.from_mcp_config(sys.argv[1])\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, file], capture_output=True, text=True, check=True
    )
    assert "pip install -e '.[mcp]' in agentserve's clone" in done.stdout
