"""Facts about the machine at hand, cheap to find: cores, memory and its limits, GPUs, versions.

Nothing is measured here; `profiler.py` does that. What a container may use counts, not what its
host has. Nothing here reads environment variables.
"""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oled_moe.kernels.native import native_kernels

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine_facts(*, root: Path = Path("/")) -> dict[str, Any]:
    """Cores, memory, CPU and versions as plain JSON values; no name of the host, no measurement.

    `root` is where proc and sys are looked up.
    """
    import psutil

    model, flags = _cpu_model(root)
    memory = psutil.virtual_memory()
    return {
        "cpu_model": model,
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "logical_cores": os.cpu_count() or 1,
        "physical_cores": psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        "cpu_quota_cores": _cgroup_cpu_quota(root),
        "usable_cores": usable_cores(root=root),
        "last_level_cache_bytes": _last_level_cache_bytes(root),
        "memory_total_bytes": int(memory.total),
        "memory_available_bytes": int(memory.available),
        "memory_limit_bytes": min((limit for limit, _ in _cgroup_memory(root)), default=None),
        "usable_memory_bytes": usable_memory_bytes(root=root),
        "gpus": _gpus(),
        "platform": platform.platform(),
        "python_version": platform.python_version(),
        "torch_version": str(torch.__version__),
        "numpy_version": np.__version__,
        "cuda_version": torch.version.cuda,
        "triton_version": _version_of("triton"),
        "native_kernels": _native_kernels(),
    }


def _gpus() -> list[dict[str, Any]]:
    """Name, memory and compute capability of each GPU that torch can use."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "memory_bytes": int(properties.total_memory),
                "compute_capability": f"{properties.major}.{properties.minor}",
            }
        )
    return found


def _native_kernels() -> str:
    """The instruction set that the package's own kernels use here."""
    native = native_kernels()
    return "none: torch computes" if native is None else native.isa


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def usable_memory_bytes(*, root: Path = Path("/")) -> int:
    """What this process may still take: memory available here, and left in each of its cgroups."""
    left = [limit - used for limit, used in _cgroup_memory(root)]
    return max(0, min(_available_bytes(), *left, 2**63 - 1))


def _available_bytes() -> int:
    try:
        import psutil
    except ImportError:
        # benchmarks/gpu_check.py runs with little more than torch; psutil reads the same there.
        text = _read_text(Path("/proc/meminfo")) or ""
        match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
        return 1024 * int(match[1]) if match else 0
    return int(psutil.virtual_memory().available)


def usable_cores(*, root: Path = Path("/")) -> int:
    """Physical cores that the process may run on, at most what its CPU quota pays for."""
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity is None:
        import psutil

        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    else:
        topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        cores = len({_read_text(root / topology.format(cpu)) or str(cpu) for cpu in affinity(0)})
    quota = _cgroup_cpu_quota(root)
    return max(1, int(cores if quota is None else min(cores, quota)))


def _cpu_model(root: Path) -> tuple[str, frozenset[str]]:
    text = _read_text(root / "proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return name, frozenset(flags[1].split() if flags else ())


def _last_level_cache_bytes(root: Path) -> int | None:
    sizes = []
    for index in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, size = _read_int(index / "level"), _read_text(index / "size")
        match = re.fullmatch(r"(\d+)([KM])", size or "")
        if level is not None and match:
            sizes.append((level, int(match[1]) * (1024 if match[2] == "K" else 2**20)))
    return max(sizes)[1] if sizes else None


def _cgroup_memory(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of each cgroup above the process that has a limit, version 1 or 2.

    File pages that nobody has touched lately do not count as used: the kernel drops them first.
    """
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    found = []
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, usage_name, cached_name in names:
            limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
            # Version 1 writes "no limit" as the largest page count.
            if limit is None or limit >= 2**60:
                continue
            stat = _read_text(folder / "memory.stat") or ""
            cached = re.search(rf"^{cached_name} (\d+)$", stat, re.MULTILINE)
            used = (usage or 0) - (int(cached[1]) if cached else 0)
            found.append((limit, max(0, used)))
    return found


def _cgroup_cpu_quota(root: Path) -> float | None:
    """Cores' worth of time the tightest cgroup grants; None where there is no quota."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        pair = (_read_text(folder / "cpu.max") or "").split()
        if not pair:
            pair = [_read_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if len(pair) == 2 and all(part.isdecimal() and int(part) for part in pair):
            quotas.append(int(pair[0]) / int(pair[1]))
    return min(quotas, default=None)


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The process's cgroups for `controller` and all above them, as far as they can be seen.

    In a container the path is often the host's and does not exist; its upper end still does.
    """
    mounts = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            bases = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            bases = [mounts / controllers, mounts / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                folder = base.joinpath(*parts[:depth])
                if folder.is_dir() and folder not in folders:
                    folders.append(folder)
    return folders


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read_text(path) or ""
    return int(text) if text.isdecimal() else None
