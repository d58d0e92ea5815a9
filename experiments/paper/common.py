"""What the experiments on the paper's figures share: traces, simulated rows, files, tables.

A figure is a folder `fig_NAME` with `README.md`, `run.py` and `plot.py`:

    python -m experiments.paper.fig_5.run      # rows, the README's tables; from the repository root
    python -m experiments.paper.fig_5.plot     # the plot, from rows alone
    oled-moe reproduce 5                       # both, and the tables on the terminal

Nothing here draws without a seed or reads a clock; the simulator repeats itself exactly, so every
row is one repetition. Where the paper ran three times we take three seeds of a synthetic trace.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from oled_moe.costs import HardwareProfile
from oled_moe.hardware import load_hardware
from oled_moe.simulator import simulate
from oled_moe.synthesis import PRESETS, synthesize
from oled_moe.traces import RoutingTrace, load_trace

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT / "experiments" / "paper"
RAW = ROOT / "results" / "raw"
PLOTS = ROOT / "docs" / "figures" / "paper"
TRACES = ROOT / "results" / "traces"
ROW_VERSION = 1

# The paper's settings; policies.md 2.4 and 4.
BLOCK_LENGTH = 16
CAPACITIES = (40, 100)
MODELS = {"mini": "llada2-mini", "flash": "llada2-flash"}
# Mini on testbed A, flash on B: see the profiles' notes.
HARDWARE = {"mini": "testbed-a", "flash": "testbed-b"}
# math, code and quiz stand for these.
WORKLOADS = {"math": "GSM8K", "code": "HumanEval", "quiz": "GPQA"}
DEMO_FAMILIES = ("arithmetic", "code", "facts")
# Dummy requests that warm the cache, drawn like the measured ones and never measured: one of each
# workload in a mixed trace.
NUM_WARMUP, NUM_WARMUP_MIXED = 2, 3
SEEDS = (0, 1, 2)
# The policies of figures 5 and 12 by the paper's names. Synthetic traces hold no gate scores, so
# FineMoE searches maps made of the chosen experts' weights (maps=topk).
POLICIES = {
    "KTransformers": "ktransformers",
    "KTransformers (frequency)": "ktransformers:placement=frequency,warmup={warmup}",
    "MoE-Infinity": "moe-infinity",
    "FineMoE": "finemoe:maps=topk",
    "naive (LRU)": "naive-lru",
    "OLED": "oled",
    "Belady": "belady",
    "ideal": "oracle",
}

Row = dict[str, Any]


# Traces


@functools.lru_cache(maxsize=4)
def synthetic(
    model: str,
    workload: str,
    *,
    block_length: int = BLOCK_LENGTH,
    num_requests: int = 6,
    seed: int = 0,
    num_warmup: int | None = None,
    **changes: Any,
) -> RoutingTrace:
    """A synthetic trace at the size of `mini` or `flash`: warm-up requests, then `num_requests`.

    `workload`: math, code, quiz, or mixed, where the three take turns (a uniform sample with equal
    parts). Each request draws from a generator of its own, so warm-up and measured requests share
    the model and nothing else. `changes` are parameters of `synthesize`.
    """
    if num_warmup is None:
        num_warmup = NUM_WARMUP_MIXED if workload == "mixed" else NUM_WARMUP
    trace = synthesize(
        MODELS[model],
        workload=workload,
        block_length=block_length,
        num_requests=num_warmup + num_requests,
        seed=seed,
        **changes,
    )
    return dataclasses.replace(trace, extra={**trace.extra, "warmup_requests": num_warmup})


def mixed(model: str, **options: Any) -> RoutingTrace:
    """`synthetic` of the paper's mixed workload."""
    return synthetic(model, "mixed", **options)


@functools.lru_cache(maxsize=8)
def demo_trace(family: str, slow: bool = False, *, num_warmup: int | None = None) -> RoutingTrace:
    """A trace recorded from the demo model (results/traces); `slow`: one token a step.

    The first requests are the warm-up: 5 of 60, or 1 of the 12 slow ones.
    """
    trace = load_trace(demo_path(family, slow))
    if num_warmup is None:
        num_warmup = 1 if slow else 5
    return dataclasses.replace(trace, extra={**trace.extra, "warmup_requests": num_warmup})


def demo_path(family: str, slow: bool = False) -> Path:
    return TRACES / f"demo-{family}{'-slow' if slow else ''}.trace.safetensors"


def num_warmup(trace: RoutingTrace) -> int:
    return int(trace.extra.get("warmup_requests", 0))


def without_warmup(trace: RoutingTrace) -> RoutingTrace:
    """The measured requests alone, for statistics that no cache takes part in."""
    return trace.select_requests(range(num_warmup(trace), len(trace.requests)))


def describe(trace: RoutingTrace) -> Row:
    """What a row says of its trace; the hash is over all arrays in order."""
    synthesis = trace.extra.get("synthesis", {})
    kept = ("workload", "seed", "model_seed", "prompt_tokens", "answer_tokens", "batch_size")
    return {
        "name": trace.model_name,
        "source": trace.source,
        "hash": trace_hash(trace),
        "block_length": trace.block_length,
        "num_layers": trace.num_moe_layers,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "expert_bytes": trace.expert_bytes,
        "num_requests": len(trace.requests),
        **{key: synthesis[key] for key in kept if key in synthesis},
    }


def trace_hash(trace: RoutingTrace) -> str:
    digest = hashlib.sha256()
    for name, array in trace.tensors().items():
        digest.update(name.encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


# Rows


@functools.cache
def _provenance() -> Row:
    return provenance()


def base_row(figure: str, trace: RoutingTrace | None = None, **labels: Any) -> Row:
    """What every row begins with: where it comes from, and what tells it from the others."""
    row: Row = {"experiment": f"paper/fig_{figure}", "version": ROW_VERSION, **labels}
    if trace is not None:
        described = describe(trace)
        row |= {"trace": described, "trace_hash": described["hash"]}
        row |= {"seed": described.get("seed"), "warm_up": num_warmup(trace)}
    return row | {"repetitions": 1, "spread": 0.0} | _provenance()


def simulate_row(
    figure: str,
    trace: RoutingTrace,
    policy: str,
    C: float,
    hardware: str | HardwareProfile,
    *,
    options: dict[str, Any] | None = None,
    **labels: Any,
) -> Row:
    """Replay `trace` under `policy` with C slots per layer; the report with its provenance.

    `{warmup}` in the policy becomes the number of warm-up requests. `options` go to `simulate`,
    `labels` into the row. The simulator is deterministic: one repetition, spread 0.
    """
    policy = policy.format(warmup=max(1, num_warmup(trace)))
    profile = load_hardware(hardware) if isinstance(hardware, str) else hardware
    report = simulate(
        trace,
        policy,
        hardware=profile,
        experts_per_layer=C,
        warmup_requests=num_warmup(trace),
        **(options or {}),
    )
    row = base_row(figure, trace, policy=policy, capacity=C, **labels)
    row |= {"scope": "layer", "hardware": asdict(profile), "is_measured": profile.is_measured}
    del row["hardware"]["note"]
    numbers = report.to_dict()
    for name in ("policy", "hardware", "trace", "trace_hash", "trace_source", "warmup_requests"):
        del numbers[name]
    return row | numbers


def rows_path(figure: str, folder: Path = RAW) -> Path:
    return folder / f"fig_{figure}.jsonl"


def write_rows(figure: str, rows: Iterable[Row], folder: Path = RAW) -> list[Row]:
    """Written beside and renamed, so that a run that is stopped leaves the old rows."""
    path = rows_path(figure, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    written = []
    with beside.open("w", encoding="utf-8") as file:
        for row in rows:
            # What could not be measured is null: JSON has no NaN.
            clean = _plain(row)
            file.write(json.dumps(clean) + "\n")
            written.append(clean)
    os.replace(beside, path)
    return written


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return None if value != value else float(f"{value:.7g}")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def read_rows(figure: str, folder: Path = RAW) -> list[Row]:
    lines = rows_path(figure, folder).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def select(rows: Iterable[Row], **labels: Any) -> list[Row]:
    return [row for row in rows if all(row.get(k) == v for k, v in labels.items())]


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Mean over rows, of which there is one at least."""
    return statistics.fmean(row[name] for row in rows)


# Tables


@dataclass(frozen=True)
class Table:
    """Text cells; the columns that hold the paper's numbers say so in the header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        return f"{self.title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


BEGIN, END = "<!-- table -->", "<!-- /table -->"


def with_tables(readme: str, tables: Sequence[Table]) -> str:
    """The README with what stands between the markers replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"the README lacks {BEGIN} and {END}"
    text = "\n\n".join(table.markdown() for table in tables)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


# The command line of every run.py


def run_figure(
    figure: str,
    make_rows: Callable[[bool], Iterable[Row]],
    tables: Callable[[list[Row]], list[Table]],
) -> None:
    """`--quick`: fewer requests, for a look; `--out`: where rows go instead of results/raw (with
    --quick never there); `--table-only`: no run, the table of rows that are there. The README's
    tables are replaced after a full run into results/raw. Tables go to stdout, with --json as one
    object.
    """
    parser = argparse.ArgumentParser(prog=f"python -m experiments.paper.fig_{figure}.run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RAW)
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick and arguments.out.resolve() == RAW:
        parser.error("--quick does not replace committed rows; give --out another folder")
    if arguments.table_only:
        rows = read_rows(figure, arguments.out)
    else:
        rows = write_rows(figure, _shown(make_rows(arguments.quick)), arguments.out)
    found = tables(rows)
    if arguments.out.resolve() == RAW:
        readme = PAPER / f"fig_{figure}" / "README.md"
        readme.write_text(with_tables(readme.read_text("utf-8"), found), encoding="utf-8")
    if arguments.json:
        print(json.dumps([asdict(table) for table in found]))
    else:
        print("\n\n".join(table.markdown() for table in found))


def _shown(rows: Iterable[Row]) -> Iterator[Row]:
    """Says on a terminal how far a run is."""
    is_shown = sys.stderr.isatty()
    for number, row in enumerate(rows, 1):
        if is_shown:
            label = f"{row['experiment']}: row {number}"
            print(f"\r\x1b[K{label}", end="", file=sys.stderr, flush=True)
        yield row
    if is_shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# Runs that several figures share


def policy_rows(
    figure: str, trace: RoutingTrace, model: str, C: float, policies: Iterable[str], **labels: Any
) -> Iterator[Row]:
    """One row for each of POLICIES that is named, on the model's testbed."""
    for label in policies:
        yield simulate_row(
            figure, trace, POLICIES[label], C, HARDWARE[model], label=label, model=model, **labels
        )


assert set(MODELS.values()) <= set(PRESETS)
