"""benchmarks/gpu_check.py from end to end on the CPU, with nothing but what it may need."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
# Dependencies of the package that a machine with a GPU need not have.
BLOCKED = ("psutil", "rich", "typer", "jinja2", "triton")

PROGRAM = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))
sys.path.insert(0, {str(ROOT / "src")!r})
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_dry_run_goes_all_the_way(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    result = run_check("--dry-run", "--out", str(out), "--checkpoint-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["is_dry_run"] and found["is_correct"]
    assert not found["errors"] and not found["skipped"]
    assert found["num_cases"] >= 8 and found["num_wrong"] == 0
    assert found["link"] and found["kernels"]["rows"] and found["limits"]
    asked = {(run["policy"], run["experts_per_layer"]) for run in found["runs"]}
    policies = ("naive-lru", "finemoe:maps=topk", "oled+prefetch")
    assert asked == {("oled", 16), *((policy, c) for c in (4, 8) for policy in policies)}
    for run in found["runs"]:
        assert run["forward_s_median"] > 0 and run["roofline_ratio"] > 0
        assert run["tpot_s"] > 0 and run["ttft_s_median"] > 0 and run["times_full_residency"] > 0
    assert not list(tmp_path.glob("tmp*")), "the random weights are still there"


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code, in this process, which has torch already."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(ended.value.code or 0)


def test_what_the_budget_does_not_reach_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "check.json"
    assert run_here(monkeypatch, "--dry-run", "--out", str(out), "--minutes", "0") == 0
    found = json.loads(out.read_text())
    assert {entry["section"] for entry in found["skipped"]} == {
        "correctness",
        "link",
        "kernels",
        "runs",
    }
    assert all(entry["reason"] == "no time left" for entry in found["skipped"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(monkeypatch, "--out", str(tmp_path / "check.json")) == 2
    assert capsys.readouterr().err.splitlines() == [
        "torch sees no GPU here; --dry-run goes through the check without"
    ]
