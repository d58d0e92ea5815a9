"""`oled-moe reproduce`: runs the experiment of one of the paper's figures and shows ours beside it.

The experiments are no part of the package: they lie in `experiments/paper` of a checkout, and run
in an interpreter of their own. Results go to stdout, progress to stderr.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import oled_moe
from oled_moe.cli_flags import Json, flag, takes_flags
from oled_moe.cli_shared import (
    LogFlags,
    print_json,
    print_rows,
    print_table,
    use_log_flags,
    wrapped,
)
from oled_moe.errors import (
    ConfigError,
    ExperimentNotFoundError,
    MissingDependencyError,
    OledMoeError,
)

FigureName = Annotated[
    str | None,
    typer.Argument(metavar="FIG", help="A figure of the paper, such as 4a or 12; see --list."),
]


@dataclass(frozen=True, slots=True)
class ReproduceFlags:
    """How much is run, and where to."""

    plot_only: Annotated[
        bool, flag("--plot-only", help="Run nothing: table and plot from the rows that are there.")
    ] = False
    quick: Annotated[
        bool,
        flag("--quick", help="Fewer requests, for a look; the committed rows stay as they are."),
    ] = False
    out: Annotated[
        Path | None,
        flag(
            "--out",
            metavar="DIR",
            help="Put rows and plot there; default: results/raw and docs/figures/paper of the "
            "checkout, with --quick a new temporary folder.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class _Experiment:
    """The folder of one figure."""

    figure: str
    folder: Path

    @property
    def title(self) -> str:
        """The first line of its README, without "# Figure NAME:"."""
        with (self.folder / "README.md").open(encoding="utf-8") as file:
            line = file.readline()
        return re.sub(r"^#\s*Figure[^:]*:", "", line).strip()


@takes_flags
def reproduce(
    figure: FigureName = None,
    flags: ReproduceFlags = ReproduceFlags(),
    is_list: Annotated[bool, flag("--list", help="Print every figure with one line.")] = False,
    as_json: Json = False,
    log: LogFlags = LogFlags(),
) -> int | None:
    """Redo a figure of the paper: its numbers beside ours, rows, and a plot (extra `plot`)."""
    use_log_flags(log)
    known = _experiments()
    if is_list:
        titles = [(name, experiment.title) for name, experiment in known.items()]
        print_json(dict(titles)) if as_json else print_rows(titles)
        return None
    if figure is None:
        raise ConfigError("there is no figure; name one, or see all with --list")
    experiment = known.get(_plain_name(figure))
    if experiment is None:
        raise ConfigError(f"unknown figure {figure!r}; known: {', '.join(known)}")
    if flags.plot_only and flags.quick:
        raise ConfigError("plot-only runs nothing, so quick has nothing to shorten; give one")
    out = flags.out
    if out is None and flags.quick:
        out = Path(tempfile.mkdtemp(prefix=f"oled-moe-{experiment.figure}-"))
    return _reproduce(experiment, flags, out, as_json=as_json)


def _reproduce(
    experiment: _Experiment, flags: ReproduceFlags, out: Path | None, *, as_json: bool
) -> int | None:
    root, name = experiment.folder.parents[2], f"fig_{experiment.figure}"
    rows = (root / "results" / "raw" if out is None else out) / f"{name}.jsonl"
    plot = (root / "docs" / "figures" / "paper" if out is None else out) / f"{name}.svg"
    if flags.plot_only and not rows.is_file():
        raise ConfigError(f"there are no rows in {rows}; run this without --plot-only first")
    place = [] if out is None else ["--out", str(out.absolute())]
    what = ["--table-only"] if flags.plot_only else ["--quick"] if flags.quick else []
    tables = json.loads(_run(experiment, "run", [*what, *place, "--json"]))
    has_plot = find_spec("matplotlib") is not None
    if has_plot:
        _run(experiment, "plot", [*place, *([] if out is None else ["--rows", place[1]])])
    missing = "the plot needs matplotlib; install it with `pip install 'oled-moe[plot]'`"
    if as_json:
        report: dict[str, Any] = {
            "figure": experiment.figure,
            "title": experiment.title,
            "scope": "\n".join(_SCOPE),
            "tables": tables,
            "rows": str(rows),
            "plot": str(plot) if has_plot else None,
        }
        print_json(report if has_plot else {**report, "error": missing})
        return None if has_plot else MissingDependencyError.exit_code
    _print(experiment, tables)
    quick = " (rewritten)"
    if flags.plot_only:
        quick = ""
    elif flags.quick:
        quick = ", of fewer requests: the committed rows are as they were"
    print(wrapped(f"Rows: {rows}{quick}"))
    if not has_plot:
        raise MissingDependencyError(missing)
    print(f"Plot: {plot}")
    print(f"What it says: {experiment.folder / 'README.md'}")
    return None


_SCOPE = (
    "Ours: simulated on profiles from data sheets, routing synthetic or the demo model's, unless a "
    "column says measured.",
    "The paper's: on its own machines and checkpoints.",
)


def _print(experiment: _Experiment, tables: list[dict[str, Any]]) -> None:
    print(f"Figure {experiment.figure}: {experiment.title}")
    for line in _SCOPE:
        print(wrapped(line))
    for table in tables:
        print(f"\n{wrapped(table['title'])}\n")
        print_table(table["header"], table["rows"])
    print()


def _run(experiment: _Experiment, script: str, arguments: list[str]) -> str:
    """The stdout of one of the experiment's scripts; its stderr is ours.

    Raises: OledMoeError where it fails.
    """
    module = f"experiments.paper.fig_{experiment.figure}.{script}"
    # Started in the checkout, whose folder python puts on its path for -m unless told not to.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=experiment.folder.parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise OledMoeError(
            f"{script}.py of figure {experiment.figure} failed with exit code {done.returncode}; "
            "what it said stands above"
        )
    return done.stdout


def _experiments() -> dict[str, _Experiment]:
    """By figure, in the paper's order.

    Raises: ExperimentNotFoundError where the package is not in a checkout.
    """
    folder = Path(oled_moe.__file__).parents[2] / "experiments" / "paper"
    if not folder.is_dir():
        raise ExperimentNotFoundError(
            f"there is no {folder}: the experiments come with the repository alone; clone it, "
            "install it with `pip install -e .`, and run this there"
        )
    found = [
        _Experiment(path.parent.name.removeprefix("fig_"), path.parent)
        for path in folder.glob("fig_*/run.py")
        if (path.parent / "README.md").is_file()
    ]
    return {each.figure: each for each in sorted(found, key=lambda each: _order(each.figure))}


def _order(figure: str) -> tuple[int, str]:
    number, rest = re.match(r"(\d*)(.*)", figure, re.DOTALL).groups()  # type: ignore[union-attr]  # matches all
    return int(number or 0), rest


def _plain_name(figure: str) -> str:
    """4a, of 4A, fig_4a, fig4a or Fig. 4a."""
    return re.sub(r"^fig(ure)?[._ ]*", "", figure.strip().lower())
