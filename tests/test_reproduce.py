"""`oled-moe reproduce`, and that every figure of the paper is there with what it needs."""

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from oled_moe import cli_reproduce
from oled_moe.cli import main

ROOT = Path(__file__).parents[1]
FIGURES = (
    "4a", "4b", "5", "7", "10", "11", "12", "13", "14", "15a", "15b", "16a", "16b", "17a", "17b",
    "18a", "18b",
)  # fmt: skip
PROVENANCE = {"experiment", "version", "commit", "versions", "repetitions", "spread"}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run_main(*arguments: object) -> tuple[int, str, str]:
        code = main(["reproduce", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, out, err

    return run_main


@pytest.fixture(scope="module")
def common() -> Iterator[Any]:
    """experiments.paper.common, importable as it is from the repository root."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT))
    yield importlib.import_module("experiments.paper.common")
    patch.undo()


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_is_whole(figure: str, common: Any) -> None:
    """Folder, rows with their provenance, plot, and tables that are those of the rows."""
    folder = ROOT / "experiments" / "paper" / f"fig_{figure}"
    assert (folder / "plot.py").is_file()
    assert (ROOT / "docs" / "figures" / "paper" / f"fig_{figure}.svg").is_file()
    rows = common.read_rows(figure)
    assert rows and all(row.keys() >= PROVENANCE for row in rows)
    assert {row["experiment"] for row in rows} == {f"paper/fig_{figure}"}
    tables = importlib.import_module(f"experiments.paper.fig_{figure}.run").tables(rows)
    assert all(len(line) == len(table.header) for table in tables for line in table.rows)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(f"# Figure {figure}: ")
    assert all(part in readme for part in ("**Question.**", "**Command.**", "**Answer.**"))
    assert f"docs/figures/paper/fig_{figure}.svg" in readme
    assert common.with_tables(readme, tables) == readme


def test_rows_are_written_whole_or_not_at_all(common: Any, tmp_path: Path) -> None:
    common.write_rows("0", [{"a": float("nan"), "b": (1, 2.5)}], tmp_path)
    assert common.read_rows("0", tmp_path) == [{"a": None, "b": [1, 2.5]}]

    def broken() -> Iterator[dict[str, int]]:
        yield {"a": 1}
        raise RuntimeError

    with pytest.raises(RuntimeError):
        common.write_rows("0", broken(), tmp_path)
    assert common.read_rows("0", tmp_path) == [{"a": None, "b": [1, 2.5]}]


def test_warm_up_requests_are_not_among_the_measured(common: Any) -> None:
    size = {"answer_tokens": 16, "prompt_tokens": 4, "num_layers": 1}
    trace = common.mixed("mini", num_requests=2, **size)
    assert [request.workload for request in trace.requests] == [
        "math", "code", "quiz", "math", "code",
    ]  # fmt: skip
    row = common.simulate_row("0", trace, "ktransformers:warmup={warmup}", 40, "testbed-a")
    assert (row["warm_up"], row["num_requests"]) == (3, 2)
    assert row["policy"] == "ktransformers:warmup=3" and row["trace_hash"] == row["trace"]["hash"]
    assert len(common.without_warmup(trace).requests) == 2
    assert (
        common.describe(common.mixed("mini", num_requests=2, seed=1, **size))["hash"]
        != (row["trace_hash"])
    )


def test_list(run: Run) -> None:
    code, out, _ = run("--list")
    lines = out.splitlines()
    assert code == 0 and [line.split()[0] for line in lines] == list(FIGURES)
    assert all(len(line.split()) > 3 for line in lines)
    assert list(json.loads(run("--list", "--json")[1])) == list(FIGURES)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("99",), 2, "known: 4a, 4b, 5"),
        ((), 2, "--list"),
        (("4a", "--quick", "--plot-only"), 2, "give one"),
        (("4a", "--plot-only", "--out", "/nowhere"), 2, "there are no rows"),
    ],
)
def test_bad_request(run: Run, arguments: tuple[str, ...], code: int, named: str) -> None:
    found, out, err = run(*arguments)
    assert found == code and out == "" and named in err


def test_without_a_checkout(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_reproduce.oled_moe, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    code, _, err = run("4a")
    assert code == 3 and "clone" in err


def test_quick_run_leaves_committed_rows_alone(run: Run, tmp_path: Path) -> None:
    rows = ROOT / "results" / "raw" / "fig_4a.jsonl"
    before = rows.read_bytes()
    code, out, err = run("fig4A", "--quick", "--out", tmp_path)
    has_plot = find_spec("matplotlib") is not None
    assert code == (0 if has_plot else 5), err
    assert "Distinct experts" in out and "22.6" in out and "the committed rows are as" in out
    assert rows.read_bytes() == before
    assert (tmp_path / "fig_4a.jsonl").is_file()
    assert (tmp_path / "fig_4a.svg").is_file() == has_plot


def test_without_matplotlib_there_is_a_table(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_reproduce, "find_spec", lambda name: None)
    shutil.copy(ROOT / "results" / "raw" / "fig_11.jsonl", tmp_path)
    code, out, err = run("11", "--plot-only", "--out", tmp_path)
    assert code == 5 and "0.567" in out and "oled-moe[plot]" in err
    code, out, err = run("11", "--plot-only", "--out", tmp_path, "--json")
    report = json.loads(out)
    assert code == 5 and report["plot"] is None and "oled-moe[plot]" in report["error"]
    assert report["tables"][0]["header"] == ["expert", "ours", "paper"]


def test_help_imports_no_numpy() -> None:
    program = (
        "import sys; from oled_moe.cli import main; main(['reproduce', '--help']); "
        "sys.exit('numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)
