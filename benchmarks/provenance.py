"""What every benchmark row says about where it comes from."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """Commit, versions and cores; no name of a machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    packages = {name: version(name) for name in ("oled-moe", "torch", "numpy")}
    return {
        "commit": commit,
        "versions": {**packages, "python": platform.python_version()},
        "architecture": platform.machine(),
        "num_cores": os.cpu_count(),
    }
