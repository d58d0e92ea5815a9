"""What int8 and int4 experts lose, by form and by the way they are rounded.

    python -m experiments.10_quantisation.run

Writes results/raw/10_quantisation.jsonl and the README's tables. Rows that are there stay, what is
missing is measured; to measure all again remove the file. Times of forwards are those of
benchmarks/quantized.py.
"""

import argparse
import importlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.paper.common import RAW, Row, Table, base_row
from experiments.studies import read_study, replace_tables, study_path
from oled_moe.quantization import QuantSpec, weights_of
from oled_moe.store import ExpertLayout

calibration = importlib.import_module("experiments.10_quantisation.calibration")
measures = importlib.import_module("experiments.10_quantisation.measures")
methods = importlib.import_module("experiments.10_quantisation.methods")

STUDY = "10_quantisation"
INT8 = ("int8-row", "int8-g128", "int8-g64", "int8-g32", "int8-row-asym")
INT4_GROUPS = ("int4-row", "int4-g128", "int4-g64", "int4-g32")
FORMS = (*INT8, *INT4_GROUPS, *(f"{form}-asym" for form in INT4_GROUPS))
# The demo model's rows are of 128 and 32 weights, so that a group of 128 is a whole row.
DEMO_FORMS = tuple(form for form in FORMS if "g128" not in form)
# In which ways are compared.
COMPARED = ("int8-row", "int4-g64")
NUM_CALIBRATION = 500
# The demo model's answers and logits; its logits on further questions, where ways are compared;
# a layer of random weights.
PARTS = ("demo", "further", "random")
# hidden, moe_intermediate: of LLaDA2-mini, and of the demo model.
SHAPES = {"llada2-mini": (2048, 512), "demo": (128, 32)}
# Experts and tokens of the layer of random weights; each token takes all of the experts.
NUM_EXPERTS, NUM_TOKENS, INITIAL_STD = 2, 64, 0.02
RESAMPLES = 2000
# Below this a divergence of logits in bfloat16 is rounding.
LEAST_KL = 1e-9


class Cell(NamedTuple):
    """`part`: one of PARTS; `form` None: bfloat16."""

    part: str
    form: str | None
    method: str | None


def cells() -> Iterator[Cell]:
    yield Cell("demo", None, None)
    for form in COMPARED:
        yield Cell("demo", form, "searched")
    for method in ("nearest", "half-quadratic", *methods.CALIBRATED):
        yield Cell("demo", "int4-g64", method)
    for method in ("searched", "nearest", *methods.CALIBRATED):
        yield Cell("further", "int4-g64", method)
    # Whole numbers of eight bits are rounded to the nearest by `searched` too.
    yield Cell("demo", "int8-row", "weighted, compensated")
    for form in DEMO_FORMS:
        if form not in COMPARED:
            yield Cell("demo", form, "searched")
    for form in FORMS:
        for method in methods.PLAIN:
            # Half-quadratic fits take seven times as long as the search.
            if method != "half-quadratic" or form in (*COMPARED, "int4-g128"):
                yield Cell("random", form, method)


# The demo model


class Demo:
    """The demo model in bfloat16, which every form is compared with; loaded when it is needed."""

    def __init__(self, part: str, num_questions: int | None) -> None:
        records = measures.held_out() if part == "demo" else measures.further()
        every = 1 if num_questions is None else max(1, len(records) // num_questions)
        self.records = records[::every]
        self.is_graded = part == "demo"
        self.statistics: Any = None
        with measures.open_engine("demo") as engine:
            self.answers = measures.answer_all(engine, self.records)
            self.canvases = list(measures.canvases(engine, self.records, self.answers))
            probe = measures.LayerInputs()
            self.logits_NV = measures.logits_of(engine, self.canvases, probe)
            self.inputs = probe.joined()
            self.outputs = measures.layer_outputs(engine, self.inputs)

    def row(self, cell: Cell) -> Row:
        if cell.form is None:
            return self.row_of("demo")
        if cell.method in methods.CALIBRATED and self.statistics is None:
            self.statistics = calibration.statistics_of(NUM_CALIBRATION)
        with tempfile.TemporaryDirectory() as directory:
            pack = Path(directory) / "pack"
            calibration.write_quantized(pack, cell.form, cell.method, self.statistics)
            row = self.row_of(pack)
        if cell.method in methods.CALIBRATED:
            row["num_calibration"] = NUM_CALIBRATION
        return row

    def row_of(self, model: Any) -> Row:
        with measures.open_engine(model) as engine:
            answers = measures.answer_all(engine, self.records) if self.is_graded else None
            logits_NV = measures.logits_of(engine, self.canvases)
            outputs = measures.layer_outputs(engine, self.inputs)
        kl_N = measures.divergences(logits_NV, self.logits_NV)
        is_other = logits_NV.argmax(-1) != self.logits_NV.argmax(-1)
        row = {
            "model": "demo",
            "num_questions": len(self.records),
            "block_length": measures.BLOCK_LENGTH,
            "threshold": measures.THRESHOLD,
            "num_canvases": len(self.canvases),
            "num_positions": len(kl_N),
            "best_token_changed": float(is_other.double().mean()),
            "kl_by_question": measures.by_question(kl_N, self.canvases),
            "output_error": measures.output_error(outputs, self.outputs, self.inputs),
        }
        if answers is not None:
            row["right"] = sum(answer.is_right for answer in answers)
            row["is_right"] = "".join("01"[answer.is_right] for answer in answers)
            row["token_agreement"] = measures.agreement(answers, self.answers)
        return row


# Random weights


def random_row(cell: Cell) -> Row:
    """Of one layer of LLaDA2-mini's shape: Gaussian weights and activations, equal shares."""
    hidden, width = SHAPES["llada2-mini"]
    generator = torch.Generator().manual_seed(0)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    experts = [
        [torch.randn(shape, generator=generator) * INITIAL_STD for shape in shapes]
        for _ in range(NUM_EXPERTS)
    ]
    rows = torch.randn(NUM_TOKENS, hidden, generator=generator)
    spec = QuantSpec.parse(cell.form)
    rounded = [
        [weights_of(methods.PLAIN[cell.method](matrix, spec), spec) for matrix in matrices]
        for matrices in experts
    ]
    expected, found = _layer(rows, experts), _layer(rows, rounded)
    return {
        "shape": "llada2-mini",
        "num_experts": NUM_EXPERTS,
        "num_tokens": NUM_TOKENS,
        "seed": 0,
        "routed_error": float((found - expected).norm() / expected.norm()),
    }


def _layer(rows_TD: Tensor, experts: Sequence[Sequence[Tensor]]) -> Tensor:
    parts = [(F.silu(rows_TD @ gate.T) * (rows_TD @ up.T)) @ down.T for gate, up, down in experts]
    return torch.stack(parts).sum(0)


def slot_bytes(shape: str, form: str | None) -> int:
    """Of one expert as it lies in a pack and in memory, padding included."""
    quant = None if form is None else QuantSpec.parse(form)
    return ExpertLayout(*SHAPES[shape], torch.bfloat16, quant=quant).slot_bytes


# Rows


def measure(path: Path, parts: Sequence[str], num_questions: int | None) -> None:
    """Appends the rows of these parts that are not there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    done = {Cell(*(json.loads(line)[name] for name in Cell._fields)) for line in lines}
    demos: dict[str, Demo] = {}
    with path.open("a", encoding="utf-8") as file:
        for cell in cells():
            if cell in done or cell.part not in parts:
                continue
            if cell.part == "random":
                row = random_row(cell)
            else:
                if cell.part not in demos:
                    demos[cell.part] = Demo(cell.part, num_questions)
                row = demos[cell.part].row(cell)
            sizes = {f"{shape}_expert_bytes": slot_bytes(shape, cell.form) for shape in SHAPES}
            row = base_row("", None) | {"experiment": STUDY} | cell._asdict() | sizes | row
            file.write(json.dumps(_short(row)) + "\n")
            file.flush()
            print(*cell, row.get("right", ""), flush=True)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list) else value


# Tables


def read_speed(folder: Path) -> dict[str, Row]:
    """The latest row of benchmarks/quantized.py for each form, if there are any."""
    path = folder / "quantized.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {row["form"]: row for row in map(json.loads, lines)}


def tables(rows: Sequence[Row], speed: dict[str, Row]) -> list[Table]:
    order = {cell: number for number, cell in enumerate(cells())}
    rows = sorted(rows, key=lambda row: order[Cell(*(row[name] for name in Cell._fields))])
    demo = [row for row in rows if row["part"] == "demo"]
    plain = [row for row in demo if row["method"] in (None, "searched")]
    plain.sort(key=lambda row: (None, *FORMS).index(row["form"]))
    compared = [row for form in COMPARED for row in demo if row["form"] == form]
    further = [row for row in rows if row["part"] == "further"]
    drawn = [row for row in rows if row["part"] == "random"]
    found = []
    if demo:
        found.append(_demo_table("**Forms, `searched`, demo model", plain, demo))
        found.append(_demo_table("**Ways to round, demo model", compared, demo))
    if further:
        found.append(_further_table("**Ways to round, further questions", further))
    return [*found, _random_table(drawn, speed)] if drawn else found


LOGIT_COLUMNS = (
    *("KL, 10⁻³ nats", "KL ÷ that of `searched`", "typical KL ÷ that of `searched`"),
    *("best token changed, %", "error of a layer, %"),
)


def _demo_table(title: str, rows: Sequence[Row], demo: Sequence[Row]) -> Table:
    header = ("form", "way", "bytes of an expert", "right, %", "lost", "won", "tokens as bf16's, %")
    (base,) = (row for row in demo if row["form"] is None)
    lines = []
    for row in rows:
        pairs = list(zip(row["is_right"], base["is_right"], strict=True))
        lines.append(
            (
                f"`{row['form']}`" if row["form"] else "bf16",
                row["method"] or "-",
                f"{row['demo_expert_bytes']:,}",
                f"{100 * row['right'] / row['num_questions']:.1f}",
                str(pairs.count(("0", "1"))),
                str(pairs.count(("1", "0"))),
                f"{100 * row['token_agreement']:.2f}",
                *_logit_cells(row, demo),
            )
        )
    return Table(_counted(title, base), (*header, *LOGIT_COLUMNS), tuple(lines))


def _further_table(title: str, rows: Sequence[Row]) -> Table:
    lines = [(f"`{row['form']}`", row["method"], *_logit_cells(row, rows)) for row in rows]
    return Table(_counted(title, rows[0]), ("form", "way", *LOGIT_COLUMNS), tuple(lines))


def _counted(title: str, row: Row) -> str:
    return f"{title}, {row['num_questions']:,} questions, {row['num_positions']:,} masks**"


def _logit_cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Beside those of `searched` in the same form."""
    beside = [r for r in rows if (r["form"], r["method"]) == (row["form"], "searched")]
    ratios = ("-", "-")
    if beside and row["method"] != "searched":
        ratios = _ratios(row["kl_by_question"], beside[0]["kl_by_question"])
    return (
        f"{1e3 * _mean(row['kl_by_question']):.2f}",
        *ratios,
        f"{100 * row['best_token_changed']:.2f}",
        f"{100 * row['output_error']:.2f}",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ratios(values: Sequence[float], others: Sequence[float]) -> tuple[str, str]:
    """Ratios of arithmetic and of geometric means, with 95 % intervals over questions, paired, by
    resampling. A few questions make most of an arithmetic mean."""
    pairs = torch.tensor([values, others], dtype=torch.float64).clamp(min=LEAST_KL)
    chosen = torch.randint(
        pairs.shape[1], (RESAMPLES, pairs.shape[1]), generator=torch.Generator().manual_seed(0)
    )
    found = []
    for means in (lambda each: each.mean(-1), lambda each: each.log().mean(-1).exp()):
        whole, drawn = means(pairs), means(pairs[:, chosen])
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = (drawn[0] / drawn[1]).quantile(ends)
        found.append(f"{whole[0] / whole[1]:.2f} [{low:.2f}, {high:.2f}]")
    return found[0], found[1]


def _random_table(rows: Sequence[Row], speed: dict[str, Row]) -> Table:
    ways = list(dict.fromkeys(row["method"] for row in rows))
    errors = {(row["form"], row["method"]): row["routed_error"] for row in rows}
    whole = slot_bytes("llada2-mini", None)
    lines = [("bf16", f"{whole:,}", "100", *("0" for _ in ways), *_speed_of("bf16", speed))]
    for form in dict.fromkeys(row["form"] for row in rows):
        size = slot_bytes("llada2-mini", form)
        found = (errors.get((form, way)) for way in ways)
        shares = ("-" if error is None else f"{100 * error:.2f}" for error in found)
        line = (f"`{form}`", f"{size:,}", f"{100 * size / whole:.1f}")
        lines.append((*line, *shares, *_speed_of(form, speed)))
    header = ("form", "bytes of an expert", "of bf16, %", *(f"error, %: {way}" for way in ways))
    columns = ("forward ÷ bf16's", "experts ÷ bf16's")
    return Table(
        "**LLaDA2-mini's shape, random weights: error of a layer's routed experts; time where all "
        "experts are resident**",
        (*header, *columns),
        tuple(lines),
    )


def _speed_of(form: str, speed: dict[str, Row]) -> tuple[str, str]:
    row = speed.get(form)
    if row is None:
        return "-", "-"
    low, high = row["ratio_low"], row["ratio_high"]
    return f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]", f"{row['routed_ratio']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{STUDY}.run")
    parser.add_argument("--tables-only", action="store_true", help="of the rows that are there")
    parser.add_argument("--out", type=Path, default=RAW, help="another folder leaves README alone")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both")
    parser.add_argument("--limit", type=int, help="about so many questions; default: all 440")
    arguments = parser.parse_args()
    if arguments.limit is not None and arguments.out.resolve() == RAW:
        parser.error("--limit does not replace committed rows; give --out another folder")
    if not arguments.tables_only:
        with torch.inference_mode():
            path = study_path(STUDY, arguments.out)
            measure(path, arguments.part or PARTS, arguments.limit)
    found = tables(read_study(STUDY, arguments.out), read_speed(arguments.out))
    if arguments.out.resolve() == RAW:
        replace_tables(STUDY, found)
    print("\n\n".join(table.markdown() for table in found))


if __name__ == "__main__":
    main()
