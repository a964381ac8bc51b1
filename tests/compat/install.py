"""Builds the clients' environments under one directory; what is there already is left alone.

    python tests/compat/install.py [--directory .compat] [NAME]...

Each `requirements-NAME.txt` beside this file is a virtual environment, because the clients' pins
conflict with ours and with each other's; `npm` is what comes from npm. 2 GB in all.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
CODEX = "@openai/codex@0.171.0"


def environments() -> list[str]:
    """Return the names of all environments."""
    files = sorted(HERE.glob("requirements-*.txt"))
    return [*(path.stem.removeprefix("requirements-") for path in files), "npm"]


def install(name: str, root: Path) -> None:
    """Build one environment unless it is there as wanted; one that failed is made anew."""
    home, done = root / name, root / name / "installed"
    wanted = CODEX if name == "npm" else requirements(name).read_text(encoding="utf-8")
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    if done.exists() and done.read_text(encoding="utf-8") == digest:
        return
    print(f"{name}: installing into {home}", flush=True)
    began = time.monotonic()
    if name == "npm":
        _npm(home)
    else:
        venv.create(home, with_pip=True, clear=True)
        command = [home / "bin" / "python", "-m", "pip", "install", "--quiet"]
        command += ["--disable-pip-version-check", "-r", requirements(name)]
        subprocess.run(command, check=True)
    done.write_text(digest, encoding="utf-8")
    print(f"{name}: took {time.monotonic() - began:.0f} s", flush=True)


def requirements(name: str) -> Path:
    """Return the file of one environment."""
    return HERE / f"requirements-{name}.txt"


def _npm(home: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed: Codex needs it (Debian package `npm`)")
    home.mkdir(parents=True, exist_ok=True)
    command = [npm, "install", "--prefix", str(home), "--no-audit", "--no-fund", "--silent", CODEX]
    subprocess.run(command, check=True, env=os.environ | {"npm_config_update_notifier": "false"})


def main() -> None:
    """Build the environments that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(".compat"))
    parser.add_argument("name", nargs="*", choices=[*environments(), []])
    chosen = parser.parse_args()
    for name in chosen.name or environments():
        try:
            install(name, chosen.directory.resolve())
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
