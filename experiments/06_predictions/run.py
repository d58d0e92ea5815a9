"""Predictions of `doctor MODEL` and `plan` against measured runs on this machine.

    python -m experiments.06_predictions.run                 # both parts
    python -m experiments.06_predictions.run --only demo     # or shape; the other's rows stay
    python -m experiments.06_predictions.run --predict-only  # again, of what the rows measured

Writes results/raw/06_predictions.jsonl and the README's tables. Rows are of these `part`s: demo
(the bundled model answering questions) and shape (LLaDA2-mini's sizes with random weights and
replayed routing, by `oled-moe bench --shape`). The machine is measured first, as by `doctor`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from experiments.paper.common import RAW, Row, Table, ms, rows_path, select, write_rows
from experiments.studies import read_study, replace_tables, study_path
from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.costs import HardwareProfile
from oled_moe.demo_screen import load_questions, pick_questions
from oled_moe.inspection import Question, check_machine
from oled_moe.model_paths import find_model
from oled_moe.outlook import open_sizes, outlook, this_machine
from oled_moe.shapes import find_shape
from oled_moe.types import ForwardOutcome, LayerDemand, LayerPlan

STUDY = "06_predictions"
PARTS = ("demo", "shape")
DEMO_SHARES = ("100%", "50%", "25%", "15%")
DEMO_POLICY = "oled"
NUM_QUESTIONS, NUM_WARMUP, MAX_TOKENS = 8, 2, 96
# One token a step, and the model's own threshold.
THRESHOLDS = {"slow": 1.0, "default": 0.95}
SHAPE, MOE_LAYERS, NUM_FORWARDS = "llada2-mini", 5, 40
REPLAY = "synth:llada2-mini:block=32"
SHAPE_PROMPT_TOKENS = 96
SHAPE_CAPACITIES, SHAPE_POLICIES = (256, 100, 64), ("oled", "oled+prefetch")


def measure(model: str, directory: Path | None) -> tuple[HardwareProfile, Row]:
    """This machine as `doctor MODEL` measures it, and what a row says of it."""
    found = check_machine(
        Question(model, EngineConfig(), "cpu"),
        "cpu",
        is_quick=False,
        directory=directory,
        threads=None,
        saves=False,
        hub_cache=None,
        say=lambda step: None,
    )
    profile = HardwareProfile.from_dict(found["profile"])
    said = json.loads(profile.to_json())
    return profile, {"hardware": said, "is_disturbed": found["measurements"]["is_disturbed"]}


def predicted(
    model: str, config: EngineConfig, profile: HardwareProfile, prompt_tokens: int
) -> Mapping[str, Any]:
    """The prediction as plain values."""
    view = outlook(
        open_sizes(model, config),
        config,
        this_machine("cpu"),
        profile,
        hardware_source="measured now",
        prompt_tokens=prompt_tokens,
    )
    assert view.prediction is not None, view.fit.verdict
    return view.prediction.to_dict()


def compared(name: str, prediction: Mapping[str, Any], measured: float) -> Row:
    """One predicted range beside what was measured."""
    low, likely, high = (prediction[name][end] for end in ("low_s", "likely_s", "high_s"))
    return {
        "what": name,
        "low_s": low,
        "likely_s": likely,
        "high_s": high,
        "measured_s": measured,
        "error": likely / measured,
        "is_within": low <= measured <= high,
    }


# The demo model


@dataclass
class Stopwatch:
    """Times of forwards that denoise, from the end of the one before."""

    times: list[float] = field(default_factory=list)
    moment: float = 0.0
    num_forwards: int = 0
    num_demanded: int = 0

    def start(self) -> None:
        self.moment = time.perf_counter()

    def on_demand(self, demand: LayerDemand, plan: LayerPlan) -> None:
        if demand.context.is_denoise:
            self.num_demanded += len(demand.expert_ids)

    def on_outcome(self, outcome: ForwardOutcome) -> None:
        now = time.perf_counter()
        if outcome.context.is_denoise:
            self.times.append(now - self.moment)
        self.moment = now


def demo_rows() -> Iterator[Row]:
    profile, machine = measure("demo", None)
    for share in DEMO_SHARES:
        config = EngineConfig(expert_memory=share, policy=DEMO_POLICY, hardware=profile)
        for text, threshold in THRESHOLDS.items():
            numbers = run_demo(config, threshold)
            prediction = predicted("demo", config, profile, numbers["prompt_tokens"])
            # At one token a step, tokens a forward are set, not predicted.
            for name in ("forward", "ttft") if threshold == 1 else ("forward", "tpot", "ttft"):
                yield {
                    "part": "demo",
                    "model": "demo",
                    "share": share,
                    "text": text,
                    "policy": DEMO_POLICY,
                    **compared(name, prediction, numbers[f"{name}_s"]),
                    "forward_s_fastest_tenth": numbers["forward_s_fastest_tenth"],
                    "tokens_per_forward": numbers["tokens_per_forward"],
                    "predicted_tokens_per_forward": prediction["tokens_per_forward"],
                    "hit_rate": numbers["hit_rate"],
                    "predicted_hit_rates": [each["hit_rate"] for each in prediction["texts"]],
                    "active_per_layer": numbers["active_per_layer"],
                    "predicted_active": [each["active_per_layer"] for each in prediction["texts"]],
                    "repetitions": NUM_QUESTIONS,
                    "warm_up": NUM_WARMUP,
                    "spread": numbers["spread"],
                    **machine,
                }


def chosen_questions() -> list[Any]:
    return pick_questions(load_questions(find_model("demo")), NUM_QUESTIONS + NUM_WARMUP)


def run_demo(config: EngineConfig, threshold: float) -> Row:
    """Medians of forwards and first tokens, means of the rest; the first questions not counted."""
    questions = chosen_questions()
    watch, stats, lengths = Stopwatch(), [], []
    with Engine("demo", config) as engine:
        num_layers = engine.model_config.num_moe_layers
        params = SamplingParams(max_tokens=MAX_TOKENS, threshold=threshold)
        engine.outcome_observers.append(watch.on_outcome)
        engine.experts.observers.append(watch.on_demand)
        assert engine.tokenizer is not None
        for i, question in enumerate(questions):
            if i == NUM_WARMUP:
                watch.times.clear()
                watch.num_demanded = 0
            messages = [{"role": "user", "content": question.text}]
            prompt = engine.tokenizer.apply_chat_template(messages)
            watch.start()
            result = engine.generate(prompt, params)
            if i >= NUM_WARMUP:
                stats.append((result.stats, len(result.token_ids)))
                lengths.append(len(engine.tokenizer.encode(prompt)))
    num_tokens = sum(tokens for _, tokens in stats)
    times = sorted(watch.times)
    return {
        "forward_s": statistics.median(times),
        "forward_s_fastest_tenth": times[len(times) // 10],
        "spread": times[len(times) * 3 // 4] - times[len(times) // 4],
        "tpot_s": sum(stat.tpot_s * tokens for stat, tokens in stats) / num_tokens,
        "ttft_s": statistics.median(stat.ttft_s for stat, _ in stats),
        "hit_rate": sum(stat.hit_rate for stat, _ in stats) / len(stats),
        "tokens_per_forward": num_tokens / len(times),
        "active_per_layer": watch.num_demanded / len(times) / num_layers,
        "prompt_tokens": round(sum(lengths) / len(lengths)),
    }


# LLaDA2-mini's shape


@contextmanager
def shape_folder() -> Iterator[str]:
    """A directory with the shape's config.json alone."""
    with tempfile.TemporaryDirectory() as folder:
        config = find_shape(SHAPE).config_with(MOE_LAYERS)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def shape_rows() -> Iterator[Row]:
    with shape_folder() as folder:
        runs = [
            (policy, run)
            for policy in SHAPE_POLICIES
            for run in bench_shape(policy, SHAPE_CAPACITIES)
        ]
        profile, machine = measure(folder, shapes_directory())
        for policy, run in runs:
            capacity = float(run["experts_per_layer"])
            config = EngineConfig(experts_per_layer=capacity, policy=policy, force=True)
            prediction = predicted(folder, config, profile, SHAPE_PROMPT_TOKENS)
            yield {
                "part": "shape",
                "model": f"{SHAPE}, {MOE_LAYERS} MoE layers",
                "policy": policy,
                "capacity": capacity,
                **compared("forward", prediction, run["forward_s_median"]),
                "hit_rate": run.get("hit_rate"),
                "predicted_hit_rates": [each["hit_rate"] for each in prediction["texts"]],
                "roofline_s": run.get("roofline_s"),
                "bound": run.get("bound"),
                "predicted_bound": prediction["bound"],
                "terms": prediction["terms"],
                "repetitions": run.get("num_forwards"),
                "warm_up": run.get("num_warmup"),
                "spread": run.get("forward_s_ci"),
                **machine,
            }


def shapes_directory() -> Path:
    """Where `bench --shape` keeps its checkpoints: the disk to measure."""
    folder = Path.home() / ".cache" / "oled-moe"
    return folder if folder.is_dir() else Path.home()


def bench_shape(policy: str, capacities: Sequence[int]) -> list[Mapping[str, Any]]:
    """`oled-moe bench --shape` for one policy at several capacities."""
    command = [
        sys.executable, "-m", "oled_moe", "bench", "--shape", SHAPE,
        "--moe-layers", str(MOE_LAYERS), "--replay", REPLAY, "--policy", policy,
        "--experts-per-layer", ",".join(map(str, capacities)),
        "--forwards", str(NUM_FORWARDS), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench --shape failed: {done.stderr.strip()[-500:]}")
    runs: list[Mapping[str, Any]] = json.loads(done.stdout)["runs"]
    return runs


# The same measurements, predicted again


def predicted_again(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows with what the present code predicts, by each row's own profile of its machine."""
    with Engine("demo") as engine, shape_folder() as folder:
        assert engine.tokenizer is not None
        lengths = []
        for question in chosen_questions()[NUM_WARMUP:]:
            messages = [{"role": "user", "content": question.text}]
            text = engine.tokenizer.apply_chat_template(messages)
            lengths.append(len(engine.tokenizer.encode(text)))
        demo_prompt = round(sum(lengths) / len(lengths))
        for row in rows:
            profile = HardwareProfile.from_dict(row["hardware"])
            if row["part"] == "demo":
                config = EngineConfig(
                    expert_memory=row["share"], policy=row["policy"], hardware=profile
                )
                prediction = predicted("demo", config, profile, demo_prompt)
                changes: Row = {
                    "predicted_tokens_per_forward": prediction["tokens_per_forward"],
                    "predicted_active": [e["active_per_layer"] for e in prediction["texts"]],
                }
            else:
                config = EngineConfig(
                    experts_per_layer=row["capacity"], policy=row["policy"], force=True
                )
                prediction = predicted(folder, config, profile, SHAPE_PROMPT_TOKENS)
                changes = {"predicted_bound": prediction["bound"], "terms": prediction["terms"]}
            hit_rates = [each["hit_rate"] for each in prediction["texts"]]
            yield {
                **row,
                **changes,
                **compared(row["what"], prediction, row["measured_s"]),
                "predicted_hit_rates": hit_rates,
                "predicted_by": provenance()["commit"],
            }


# Tables


def tables(rows: list[Row]) -> list[Table]:
    found = []
    for part in PARTS:
        own = select(rows, part=part)
        if own:
            found.append(Table(_title(part, own), HEADERS[part], tuple(map(CELLS[part], own))))
    return found


def _title(part: str, rows: Sequence[Row]) -> str:
    within = sum(row["is_within"] for row in rows)
    errors = sorted(row["error"] for row in rows)
    what = {
        "demo": "The bundled demo model",
        "shape": f"LLaDA2-mini's shape, {MOE_LAYERS} MoE layers, routing replayed ({REPLAY})",
    }[part]
    busy = " The machine was busy with other work." if rows[0]["is_disturbed"] else ""
    return (
        f"{what}: {within} of {len(rows)} measured values lie within the predicted range; "
        f"predicted ÷ measured from {errors[0]:.2f} to {errors[-1]:.2f}, median "
        f"{errors[len(errors) // 2]:.2f}. Times in ms.{busy}"
    )


HEADERS = {
    "demo": (
        "experts in memory", "text", "what", "predicted", "likely", "measured",
        "likely ÷ measured", "within", "tokens/forward", "hit rate",
    ),
    "shape": (
        "experts per layer", "policy", "what", "predicted", "likely", "measured",
        "likely ÷ measured", "within", "hit rate", "predicted hit rate", "bound",
    ),
}  # fmt: skip


def _common(row: Row) -> tuple[str, ...]:
    return (
        row["what"],
        f"{ms(row['low_s'])} to {ms(row['high_s'])}",
        ms(row["likely_s"]),
        ms(row["measured_s"]),
        f"{row['error']:.2f}",
        "yes" if row["is_within"] else "no",
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _demo_cells(row: Row) -> tuple[str, ...]:
    low, high = row["predicted_tokens_per_forward"]
    tokens = f"{row['tokens_per_forward']:.1f} (predicted {low:.1f} to {high:.1f})"
    return (row["share"], row["text"], *_common(row), tokens, _share(row["hit_rate"]))


def _shape_cells(row: Row) -> tuple[str, ...]:
    hits = row["predicted_hit_rates"]
    return (
        f"{row['capacity']:g}",
        f"`{row['policy']}`",
        *_common(row),
        _share(row["hit_rate"]),
        f"{_share(min(hits))} to {_share(max(hits))}",
        f"{row['bound']} (predicted {row['predicted_bound']})",
    )


CELLS = {"demo": _demo_cells, "shape": _shape_cells}
MAKERS = {"demo": demo_rows, "shape": shape_rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{STUDY}.run")
    parser.add_argument("--only", choices=PARTS, help="the other part's rows stay as they are")
    parser.add_argument("--tables-only", action="store_true")
    parser.add_argument("--predict-only", action="store_true", help="measured values stay")
    parser.add_argument("--out", type=Path, default=RAW)
    arguments = parser.parse_args()
    folder: Path = arguments.out
    rows = read_study(STUDY, folder) if study_path(STUDY, folder).is_file() else []
    if arguments.predict_only:
        rows = write_rows(STUDY, list(predicted_again(rows)), folder)
        os.replace(rows_path(STUDY, folder), study_path(STUDY, folder))
    elif not arguments.tables_only:
        common = {"experiment": STUDY, "version": 1, **provenance()}
        for part in PARTS if arguments.only is None else (arguments.only,):
            made = [{**common, **row} for row in MAKERS[part]()]
            rows = [row for row in rows if row["part"] != part] + made
        rows.sort(key=lambda row: PARTS.index(row["part"]))
        rows = write_rows(STUDY, rows, folder)
        os.replace(rows_path(STUDY, folder), study_path(STUDY, folder))
    found = tables(rows)
    if folder.resolve() == RAW:
        replace_tables(STUDY, found)
    print("\n\n".join(table.markdown() for table in found))


if __name__ == "__main__":
    main()
