"""Say, before anything large is fetched, which torch the environment has or will take."""

import json
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse


def planned() -> tuple[str, str]:
    """Return the version and the address of the torch that pip would install."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
    command += ["--ignore-installed", "--report", "-", "-c", "constraints.txt", "torch"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    item = report["install"][0]
    return item["metadata"]["version"], item["download_info"]["url"]


def size_mb(url: str) -> str:
    """Return the size of the file behind `url` in megabytes, or "unknown size"."""
    parts = urlparse(url)
    try:
        if parts.scheme == "file":
            size = Path(unquote(parts.path)).stat().st_size
        else:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=20) as answer:
                size = int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return "unknown size"
    return f"{size / 1e6:,.0f} MB"


def main() -> None:
    """Print one or two lines."""
    try:
        print(f"torch: {metadata.version('torch')} is installed already; nothing to fetch")
        return
    except metadata.PackageNotFoundError:
        pass
    try:
        version, url = planned()
    except (subprocess.CalledProcessError, json.JSONDecodeError, IndexError):
        print("torch: pip could not say which build it will take; it decides during the install")
        return
    print(f"torch: taking {version}, {size_mb(url)}")
    if "cpu" not in version:
        print(
            "       this is a CUDA build and pulls several GB of libraries with it; to keep a CPU\n"
            "       build, install one into an environment and run make with PYTHON=/path/to/python"
        )


if __name__ == "__main__":
    main()
