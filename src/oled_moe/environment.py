"""Where a measurement was made: the code's revision, and how busy the machine was. No torch."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

# Cores of others that still count as idle.
_IDLE_CORES = 0.25


class Load:
    """How busy the machine was, and how much of that were others."""

    def __init__(self) -> None:
        self._average = os.getloadavg()
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        times = psutil.cpu_times()._asdict()
        # What guests of this machine use is in `user` already.
        uncounted = ("idle", "iowait", "guest", "guest_nice")
        busy_s = sum(value for name, value in times.items() if name not in uncounted)
        return time.perf_counter(), busy_s - time.process_time()

    def facts(self) -> dict[str, Any]:
        clock, others_s = self._now()
        busy_cores = max(0.0, (others_s - self._start[1]) / (clock - self._start[0]))
        return {
            "wall_s": clock - self._start[0],
            "load_average_before": list(self._average),
            "load_average_after": list(os.getloadavg()),
            "other_busy_cores": busy_cores,
            "is_idle": busy_cores <= _IDLE_CORES,
        }


def git_revision() -> str | None:
    """The commit this package runs from, `+changes` where src differs; None outside its clone."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    revision = _git(root, "rev-parse", "HEAD")
    return revision and revision + ("+changes" if _git(root, "status", "-s", "src") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
