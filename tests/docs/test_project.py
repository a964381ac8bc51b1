"""The documents say what the code is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import agentserve
from agentserve.errors import CATALOGUE, AgentserveError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path.relative_to(ROOT)
    for top in ("agentserve", "kernels", "tools")
    for path in sorted((ROOT / top).rglob("*.py"))
]


def test_every_module_has_a_row_in_the_module_map() -> None:
    rows = set(re.findall(r"^\| `([^`]+\.py)`", (ROOT / "ARCHITECTURE.md").read_text(), re.M))
    modules = {str(path) for path in SOURCES if path.name != "__init__.py"}
    assert modules <= rows
    assert {row for row in rows if not (ROOT / row).exists()} == set()


def test_no_source_file_is_longer_than_a_reader_takes_in() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines > 420} == {}


def test_the_changelog_starts_with_this_version() -> None:
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == agentserve.__version__


def test_every_error_code_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert {code for code in CATALOGUE if f"`{code}`" not in readme} == set()


def test_the_catalogue_is_closed_and_every_error_says_what_it_is() -> None:
    for error in AgentserveError.__subclasses__():
        assert CATALOGUE[error.code] is error
        assert 400 <= error.status < 600
        assert error.__doc__


def test_kernels_and_tools_do_not_shadow_other_packages() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tools" / "__init__.py").exists()


def test_a_package_named_kernels_is_found_beside_ours(tmp_path: Path) -> None:
    other = tmp_path / "kernels"
    other.mkdir()
    (other / "__init__.py").write_text("whose = 'another project'\n")
    program = "import agentserve_kernels.norm, kernels; print(kernels.whose)"
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.stdout == "another project\n", run.stderr


def test_the_repository_root_does_not_pose_as_a_package_named_kernels() -> None:
    program = "import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('tools'))"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "None None\n", run.stderr


def test_the_traces_in_the_architecture_name_what_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    traces = text[text.index("## One turn") : text.index("## State machines")]
    code = "\n".join((ROOT / path).read_text() for path in SOURCES)
    named = set(re.findall(r"\b([A-Z][A-Za-z]+)\.([a-z_]+)\b", traces))
    assert len(named) > 15
    for owner, method in named:
        assert re.search(rf"^class {owner}\b", code, re.M), owner
        assert re.search(rf"^\s+(async )?def {method}\(", code, re.M), f"{owner}.{method}"
