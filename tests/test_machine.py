"""Facts about the machine, with proc and sys made up."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from oled_moe.machine import machine_facts, usable_cores, usable_memory_bytes

MIB = 2**20


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


V1 = {
    "proc/self/cgroup": "4:memory:/jobs/one\n2:cpu,cpuacct:/jobs/one\n0::/",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "999999999",
    "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "5000000",
    "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": "4000000",
    "sys/fs/cgroup/memory/jobs/memory.stat": "cache 7\ntotal_inactive_file 500000\nrss 1",
    "sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes": "3000000",
    "sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes": "1000000",
    "sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_quota_us": "150000",
    "sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us": "100000",
}
V2 = {
    "proc/self/cgroup": "0::/../app.slice/job",
    "sys/fs/cgroup/app.slice/memory.max": "max",
    "sys/fs/cgroup/app.slice/memory.current": "123",
    "sys/fs/cgroup/app.slice/cpu.max": "max 100000",
    "sys/fs/cgroup/app.slice/job/memory.max": "8000000",
    "sys/fs/cgroup/app.slice/job/memory.current": "7000000",
    "sys/fs/cgroup/app.slice/job/memory.stat": "inactive_file 2000000\nslab 3",
    "sys/fs/cgroup/app.slice/job/cpu.max": "50000 100000",
}
# As in a container whose path is the host's: only the top of the tree can be seen.
CONTAINER = {
    "proc/self/cgroup": "0::/host/docker/abc",
    "sys/fs/cgroup/memory.max": "4000000",
    "sys/fs/cgroup/memory.current": "1000000",
    "sys/fs/cgroup/cpu.max": "400000 100000",
}


@pytest.mark.parametrize(
    ("files", "left", "limit", "quota"),
    [
        (V1, 1_500_000, 3_000_000, 1.5),
        (V2, 3_000_000, 8_000_000, 0.5),
        (CONTAINER, 3_000_000, 4_000_000, 4.0),
    ],
    ids=["v1", "v2", "container"],
)
def test_cgroup_limits(
    files: Mapping[str, str], left: int, limit: int, quota: float, tmp_path: Path
) -> None:
    root = write_files(tmp_path, files)
    assert usable_memory_bytes(root=root) == left
    facts = machine_facts(root=root)
    assert facts["memory_limit_bytes"] == limit
    assert facts["usable_memory_bytes"] == left
    assert facts["cpu_quota_cores"] == quota
    assert 1 <= facts["usable_cores"] <= max(1, quota)


def test_used_up_cgroup_leaves_nothing(tmp_path: Path) -> None:
    files = {**CONTAINER, "sys/fs/cgroup/memory.current": "4100000"}
    assert usable_memory_bytes(root=write_files(tmp_path, files)) == 0


@pytest.mark.parametrize("content", ["", "garbage", "0::", "a:b", "4:memory:/../.."])
def test_unreadable_cgroups_are_no_limit(content: str, tmp_path: Path) -> None:
    root = write_files(tmp_path, {"proc/self/cgroup": content})
    assert 0 < usable_memory_bytes(root=root) <= psutil.virtual_memory().total
    facts = machine_facts(root=root)
    assert facts["memory_limit_bytes"] is None and facts["cpu_quota_cores"] is None


def test_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    pairs = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}
    root = write_files(tmp_path, {siblings.format(cpu): pair for cpu, pair in pairs.items()})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 1}, raising=False)
    assert usable_cores(root=root) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores(root=root) >= 1


def test_cpu_facts(tmp_path: Path) -> None:
    cache = "sys/devices/system/cpu/cpu0/cache"
    root = write_files(
        tmp_path,
        {
            "proc/cpuinfo": "model name\t: Some CPU @ 2GHz\nflags\t\t: fpu avx2 amx_bf16",
            f"{cache}/index0/level": "1",
            f"{cache}/index0/size": "48K",
            f"{cache}/index3/level": "3",
            f"{cache}/index3/size": "32M",
        },
    )
    facts = machine_facts(root=root)
    assert facts["cpu_model"] == "Some CPU @ 2GHz"
    assert facts["cpu_flags"] == ["avx2", "amx_bf16"]
    assert facts["last_level_cache_bytes"] == 32 * MIB


def test_facts_are_json_without_the_host_name() -> None:
    text = json.dumps(machine_facts())
    assert os.uname().nodename not in json.loads(text).values()
    assert json.loads(text)["memory_total_bytes"] > 0
