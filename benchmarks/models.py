"""The tables of docs/models.md: sizes of every shape, and what of it fits where, how fast.

    python benchmarks/models.py                  # computes all rows, which takes minutes
    python benchmarks/models.py --only sizes     # or fits; the other's rows stay
    python benchmarks/models.py --names rnd1     # of these shapes alone, by commas
    python benchmarks/models.py --tables-only    # the tables, from rows alone
    python benchmarks/models.py --take FILE      # rows of `oled-moe bench --shape --save FILE`, too

Nothing is run or measured: every number follows from config.json alone, as `oled-moe plan` says it.
What was run is read from rows that `oled-moe bench --shape --save` and benchmarks/offload.py wrote.
Writes results/raw/models.jsonl and what stands between the marks in docs/models.md.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from oled_moe.config import EngineConfig
from oled_moe.costs import HardwareProfile
from oled_moe.errors import DoesNotFitError
from oled_moe.hardware import load_hardware
from oled_moe.memory import GpuMemoryPlan, MemoryPlan, process_memory_bytes
from oled_moe.models import ModelConfig, find_family
from oled_moe.outlook import Machine, OpenedModel, imagine, open_sizes, outlook, plan_for
from oled_moe.quantization import default_spec
from oled_moe.shapes import SHAPES
from oled_moe.store import ExpertLayout

ROOT = Path(__file__).parents[1]
RAW, DOC = ROOT / "results" / "raw", ROOT / "docs" / "models.md"
ROWS, RUNS = RAW / "models.jsonl", RAW / "shape_runs.jsonl"
PARTS = ("sizes", "fits")
MEMORIES_GIB = (8, 16, 24, 32)
HOST_RAM_GIB = 64
HARDWARE = "rtx4090-ddr5"
GIB = 2**30
# A program of this size, so that rows do not depend on the one that makes them.
PROCESS_BYTES = 256 * 2**20
FORMS = ("bf16", "int8", "int4")

# Of what `bench --shape` saves, what says nothing of places on a disk.
_TAKEN = (
    "benchmark", "shape", "replay", "block_length", "device", "dtype", "num_moe_layers", "policy",
    "experts_per_layer", "num_forwards", "num_warmup", "hit_rate", "miss_bytes_per_forward",
    "active_experts_per_forward", "forward_s_median", "forward_s_ci", "roofline_s",
    "peak_rss_bytes", "plan_bytes", "is_idle", "other_busy_cores", "versions",
)  # fmt: skip

Row = dict[str, Any]


def expert_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of an expert in a slot, and in a pack, in each form."""
    layout = ExpertLayout(
        config.hidden_size, config.moe_intermediate_size, torch.bfloat16, config.activation
    )
    packed = {form: replace(layout, quant=default_spec(form)) for form in FORMS[1:]}
    return {form: each.slot_bytes for form, each in {"bf16": layout, **packed}.items()}


def sizes_rows(names: Iterable[str] = SHAPES) -> Iterator[Row]:
    for name in names:
        shape = SHAPES[name]
        family = find_family(shape.config)
        config = family.config(shape.config)
        num_rest = sum(map(prod, family.parameter_shapes(config).values()))
        each = expert_bytes(config)
        num_expert_values = 3 * config.hidden_size * config.moe_intermediate_size
        num_experts = config.num_moe_layers * config.num_experts
        yield {
            "part": "sizes",
            "name": name,
            "family": family.name,
            "num_parameters": num_rest + num_experts * num_expert_values,
            "num_moe_layers": config.num_moe_layers,
            "num_dense_layers": config.num_layers - config.num_moe_layers,
            "num_experts": config.num_experts,
            "top_k": config.top_k,
            "expert_bytes": each,
            "all_experts_bytes": {form: num_experts * size for form, size in each.items()},
            "rest_bytes": 2 * num_rest,
            "kv_bytes_per_token": open_sizes(name).sizes.kv_bytes_per_token,
        }


def fits_rows(names: Iterable[str] = SHAPES) -> Iterator[Row]:
    hardware = load_hardware(HARDWARE)
    for name in names:
        models = forms_of(name)
        for device in ("cuda", "cpu"):
            for memory_gib in MEMORIES_GIB:
                yield fit_row(models, device, memory_gib, hardware)


def forms_of(name: str) -> dict[str, OpenedModel]:
    """A shape as stored, and as `oled-moe plan NAME --dtype FORM` takes it."""
    return {form: open_sizes(name, form=None if form == "bf16" else form) for form in FORMS}


def fit_row(
    models: Mapping[str, OpenedModel],
    device: str,
    memory_gib: int,
    hardware: HardwareProfile,
    *,
    predicts: bool = True,
) -> Row:
    """One cell: the plan of a model in so much memory, and what is predicted of it in bfloat16;
    of the other forms the share of experts alone that stays."""
    is_gpu = device == "cuda"
    ram_bytes = (HOST_RAM_GIB if is_gpu else memory_gib) * GIB
    machine = imagine(
        device, hardware, gpu_bytes=memory_gib * GIB if is_gpu else None, ram_bytes=ram_bytes
    )
    machine = replace(machine, ram_bytes=machine.ram_bytes + process_memory_bytes() - PROCESS_BYTES)
    plans = {form: plan_or_none(model, machine, hardware) for form, model in models.items()}
    model, plan = models["bf16"], plans["bf16"]
    row: Row = {
        "part": "fits",
        "name": model.name,
        "device": device,
        "memory_gib": memory_gib,
        "ram_gib": HOST_RAM_GIB if is_gpu else memory_gib,
        "hardware": HARDWARE,
        "policy": model.config.decoding.policy,
        "is_run": False,
        "does_fit": plan is not None,
        "resident_share": {form: resident_share(plan) for form, plan in plans.items()},
    }
    if plan is None:
        return row
    slots = plan.gpu if isinstance(plan, GpuMemoryPlan) else plan
    on_disk = plan.num_on_disk if isinstance(plan, GpuMemoryPlan) else None
    row |= {
        "slots_per_layer": slots.num_slots / slots.shape.num_layers,
        "has_experts_on_disk": not is_gpu or bool(on_disk),
    }
    if not predicts:
        return row
    view = outlook(model, EngineConfig(), machine, hardware, hardware_source=HARDWARE)
    assert view.prediction is not None
    found = view.prediction
    return row | {
        "active_per_layer": found.typical.active_per_layer,
        "forward_low_s": found.forward.low_s,
        "forward_likely_s": found.forward.likely_s,
        "forward_high_s": found.forward.high_s,
        "tokens_per_forward": list(found.tokens_per_forward),
        "tpot_likely_s": found.tpot.likely_s,
        "prompt_tokens": found.prompt_tokens,
    }


def plan_or_none(
    model: OpenedModel, machine: Machine, hardware: HardwareProfile
) -> MemoryPlan | GpuMemoryPlan | None:
    """None where it does not fit."""
    try:
        return plan_for(model, EngineConfig(), machine, hardware)
    except DoesNotFitError:
        return None


def resident_share(plan: MemoryPlan | GpuMemoryPlan | None) -> float | None:
    """Of all experts, those that memory holds; None where the model does not fit."""
    if plan is None:
        return None
    slots = plan.gpu if isinstance(plan, GpuMemoryPlan) else plan
    return slots.num_slots / slots.shape.num_experts_total


# Tables


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Name of a mark to the table between."""
    sizes = [row for row in rows if row["part"] == "sizes"]
    fits = [row for row in rows if row["part"] == "fits"]
    return {
        "sizes": _sizes_table(sizes),
        "gpu": _fits_table(fits, "cuda", _speed_cell),
        "ram": _fits_table(fits, "cpu", _speed_cell),
        "gpu-packed": _fits_table(fits, "cuda", _packed_cell),
        "ram-packed": _fits_table(fits, "cpu", _packed_cell),
        "runs": _runs_table(),
    }


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g}"


def _sizes_table(rows: Sequence[Row]) -> str:
    header = (
        "name", "parameters", "MoE layers × experts (of which a token takes)",
        "an expert, MB: bf16 / int8 / int4", "all experts, GB: bf16 / int8 / int4",
        "the rest, GB", "K/V of a token",
    )  # fmt: skip
    lines = []
    for row in rows:
        mega = " / ".join(f"{row['expert_bytes'][form] / 1e6:.3g}" for form in FORMS)
        giga = " / ".join(_gb(row["all_experts_bytes"][form]) for form in FORMS)
        lines.append(
            (
                f"`{row['name']}`",
                f"{row['num_parameters']:,}",
                f"{row['num_moe_layers']} × {row['num_experts']} ({row['top_k']})",
                mega,
                giga,
                _gb(row["rest_bytes"]),
                f"{row['kv_bytes_per_token']:,} B",
            )
        )
    return _markdown(header, lines)


def _fits_table(rows: Sequence[Row], device: str, cell: Any) -> str:
    own = [row for row in rows if row["device"] == device]
    names = list(dict.fromkeys(row["name"] for row in own))
    lines = []
    for name in names:
        by_size = {row["memory_gib"]: row for row in own if row["name"] == name}
        lines.append([f"`{name}`", *(cell(by_size[size]) for size in MEMORIES_GIB)])
    return _markdown(["", *(f"{size} GiB" for size in MEMORIES_GIB)], lines)


def _speed_cell(row: Row) -> str:
    if not row["does_fit"]:
        return "does not fit"
    share = f"{100 * row['resident_share']['bf16']:.0f} %"
    if "forward_likely_s" not in row:
        return f"{row['slots_per_layer']:.3g} ({share}), not predicted"
    on_disk = " †" if row["device"] == "cuda" and row["has_experts_on_disk"] else ""
    return f"{row['slots_per_layer']:.3g} ({share}), {_duration(row['forward_likely_s'])}{on_disk}"


def _packed_cell(row: Row) -> str:
    shares = row["resident_share"]
    if shares["int4"] is None:
        return "does not fit"
    known = ("–" if shares[form] is None else f"{100 * shares[form]:.0f}" for form in FORMS)
    return " / ".join(known) + " %"


def _duration(seconds: float) -> str:
    """Two digits, in a unit that needs no zeros before them."""
    scale, unit = (1, "s") if seconds >= 0.995 else (1e3, "ms")
    return f"{float(f'{scale * seconds:.2g}'):g} {unit}"


def _runs_table() -> str:
    header = (
        "shape", "MoE layers run", "by", "policy", "C", "hits", "a forward", "peak ÷ plan", "rows",
    )  # fmt: skip
    # Of the other benchmark the runs in which the disk was as fast as it is.
    timed = [row for row in read(RAW / "offload.jsonl") if not row.get("disk_bytes_per_s")]
    lines = [_run_cells(row, "offload", "benchmarks/offload.py") for row in timed]
    lines += [_run_cells(row, "shape_runs", "bench --shape") for row in read(RUNS)]
    return _markdown(header, lines)


def _run_cells(row: Mapping[str, Any], file: str, what: str) -> tuple[str, ...]:
    name = row["shape"].split(",")[0]
    num_layers = row.get("moe_layers") or row["num_moe_layers"]
    return (
        f"`{name}`",
        f"{num_layers} of {SHAPES[name].num_moe_layers}",
        f"`{what}`, {row['num_cores']} cores",
        f"`{row['policy']}`",
        f"{row['experts_per_layer']:g}",
        f"{100 * row['hit_rate']:.1f} %",
        _duration(row["forward_s_median"]) if row["is_idle"] else "busy",
        f"{row['peak_rss_bytes'] / row['plan_bytes']:.2f}",
        f"[{file}](../results/raw/{file}.jsonl)",
    )


def taken(row: Row) -> Row:
    """A saved row of a full-width run as it is kept here."""
    machine = {"num_cores": row["environment"]["usable_cores"]}
    return {**{name: row[name] for name in _TAKEN}, **machine}


def read(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def with_tables(text: str, found: Mapping[str, str]) -> str:
    """The text with every table between its marks. Raises: ValueError where a mark is missing."""
    for name, table in found.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        head, _, rest = text.partition(start)
        _, mark, tail = rest.partition(end)
        if not mark:
            raise ValueError(f"{DOC.name} lacks the marks of {name}")
        text = f"{head}{start}{table}{mark}{tail}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/models.py")
    parser.add_argument("--only", choices=PARTS, help="the other part's rows stay as they are")
    parser.add_argument("--names", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--tables-only", action="store_true")
    parser.add_argument("--take", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = read(ROWS)
    if arguments.take is not None:
        runs = [*read(RUNS), *map(taken, read(arguments.take))]
        RUNS.write_text("".join(json.dumps(row) + "\n" for row in runs), encoding="utf-8")
    elif not arguments.tables_only:
        makers = {"sizes": sizes_rows, "fits": fits_rows}
        base = {"benchmark": "models", **provenance()}
        for part in PARTS if arguments.only is None else (arguments.only,):
            made = [{**base, **row} for row in makers[part](arguments.names)]
            kept = (r for r in rows if r["part"] != part or r["name"] not in arguments.names)
            rows = [*kept, *made]
        rows.sort(key=lambda row: (PARTS.index(row["part"]), list(SHAPES).index(row["name"])))
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    DOC.write_text(with_tables(DOC.read_text(encoding="utf-8"), tables(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
