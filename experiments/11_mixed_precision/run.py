"""Mixed precision on the demo model: what it reads less, and what it costs in right answers.

    python -m experiments.11_mixed_precision.run

Packs the demo model in int4, and writes results/raw/11_mixed_precision.jsonl, one row for each
threshold, model and rule, and the README's tables. Counts and answers repeat exactly.
"""

import argparse
import importlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.paper.common import RAW, Row, Table, base_row, percent
from experiments.studies import read_study, replace_tables, study_path
from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.packing import pack_checkpoint
from oled_moe.types import LayerDemand, LayerPlan, Phase

STUDY = "11_mixed_precision"
FORM = "int4"
# A quarter of the bf16 experts: 144 slots of 24 KiB; models of another form get as many bytes.
MEMORY_BYTES = 576 // 4 * 24 * 1024
# Threshold 0.95 is how the model is meant to be run, one or two passes per block; 1.0 is above any
# probability: one token per pass, which gives the many passes per block that large models need.
RULES = (
    *(f"mixed:share={share},by=block" for share in (0.1, 0.2, 0.4, 1.0)),
    *(f"mixed:share={share},by=token" for share in (0.2, 0.4)),
    *(f"mixed:share=0.4,by=block,slots={slots}" for slots in (0, 24)),
)
SLOW_RULES = (
    *(f"mixed:share={share},by=block" for share in (0.1, 0.2, 0.4)),
    "mixed:share=0.4,by=token",
    *(f"mixed:share=0.4,by=block,slots={slots}" for slots in (0, 24)),
)
# Of each group of questions, where a block takes few forwards and where it takes many.
NUM_QUESTIONS = {0.95: 24, 1.0: 2}
NUM_WARM_UP = 3
BLOCK_LENGTH, MAX_TOKENS = 16, 96


@dataclass
class Counts:
    """What forwards that denoise ask for and read, all layers; observes demands and plans."""

    demanded: int = 0
    hits: int = 0
    loads: int = 0
    low_loads: int = 0
    low_runs: int = 0

    def __call__(self, demand: LayerDemand, plan: LayerPlan) -> None:
        if demand.context.rows[-1].phase != Phase.DENOISE:
            return
        self.demanded += plan.num_demanded
        self.hits += len(plan.hit_ids)
        self.loads += len(plan.load_ids)
        self.low_runs += len(plan.low_ids)
        self.low_loads += 0 if plan.low is None else len(plan.low.load_ids)


def measure(model: str, rule: str | None, low: str, threshold: float, limit: int) -> Row:
    """Questions of every group, `limit` of each at most, under one rule; `low` is the int4 pack."""
    sharing = importlib.import_module("experiments.09_lossy_sharing.run")
    grade = importlib.import_module("experiments.01_demo_model.tasks").grade
    records: list[dict[str, Any]] = sharing.questions(limit)
    warm_up = records[:: len(records) // NUM_WARM_UP]
    config = EngineConfig(
        expert_memory=MEMORY_BYTES,
        threads=1,
        lossy=rule,
        low_precision=None if rule is None else low,
    )
    params = SamplingParams(
        max_tokens=MAX_TOKENS,
        block_length=BLOCK_LENGTH,
        threshold=threshold,
        temperature=0,
        eos_early_stop=True,
    )
    counts, results, num_right = Counts(), [], 0
    with Engine(low if model == FORM else model, config) as engine:
        assert engine.tokenizer is not None
        for number, record in enumerate([*warm_up, *records]):
            messages = [{"role": "user", "content": record["question"]}]
            prefix = record.get("prefix", "")
            prompt = engine.tokenizer.apply_chat_template(messages) + prefix
            if number < len(warm_up):
                engine.generate(prompt, params)
                continue
            engine.experts.observers.append(counts)
            result = engine.generate(prompt, params)
            engine.experts.observers.remove(counts)
            results.append(result)
            answer = prefix + (result.text or "")
            num_right += result.finish_reason == "stop" and grade(record, answer)
        plan, policy, form = engine.memory_plan, engine.policy.name, engine.dtype_words
    low_bytes = 0 if plan.low is None else plan.low.shape.expert_bytes
    num_forwards = sum(each.stats.num_denoise_forwards for each in results)
    num_tokens = sum(len(each.token_ids) for each in results)
    read_bytes = counts.loads * plan.shape.expert_bytes + counts.low_loads * low_bytes

    def mean(name: str) -> float:
        """Over forwards."""
        parts = [getattr(r.stats, name) * r.stats.num_denoise_forwards for r in results]
        return sum(parts) / num_forwards

    return base_row("", None) | {
        "experiment": STUDY,
        "model": model,
        "dtype": form,
        "lossy": rule,
        "low_precision": None if rule is None else FORM,
        "expert_memory_bytes": plan.expert_memory_bytes,
        "num_slots": plan.num_slots,
        "num_low_slots": 0 if plan.low is None else plan.low.num_slots,
        "threshold": threshold,
        "block_length": BLOCK_LENGTH,
        "policy": policy,
        "num_questions": len(records),
        "warm_up": len(warm_up),
        "right": num_right,
        "num_tokens": num_tokens,
        "num_forwards": num_forwards,
        "tokens_per_forward": num_tokens / num_forwards,
        "hit_rate": counts.hits / counts.demanded,
        "low_rate": counts.low_runs / counts.demanded,
        "loads_per_forward": counts.loads / num_forwards,
        "low_loads_per_forward": counts.low_loads / num_forwards,
        "read_bytes_per_forward": read_bytes / num_forwards,
        "read_bytes_per_token": read_bytes / num_tokens,
        "replaced_share": mean("replaced_share"),
        "replaced_weight_share": mean("replaced_weight_share"),
    }


def cells() -> Iterator[tuple[float, str, str | None]]:
    """Threshold, model and rule of each row; the second is what fits as well without a rule."""
    for threshold, rules in ((0.95, RULES), (1.0, SLOW_RULES)):
        yield threshold, "demo", None
        yield from ((threshold, "demo", rule) for rule in rules)
        yield threshold, FORM, None


def tables(rows: Sequence[Row]) -> list[Table]:
    header = (
        *("rule", "right", "tokens per forward", "resident, %", "in int4, %"),
        *("read in full", "read in int4", "KiB read per forward", "per token"),
        *("choices replaced, %", "weight, %"),
    )
    found = []
    for threshold in dict.fromkeys(row["threshold"] for row in rows):
        here = [row for row in rows if row["threshold"] == threshold]
        passes = "One token per pass" if threshold == 1 else f"Threshold {threshold}"
        title = f"**{passes}, {here[0]['num_questions']} questions**"
        found.append(Table(title, header, tuple(map(_line, here))))
    return found


def _line(row: Row) -> tuple[str, ...]:
    name = f"`{row['lossy']}`" if row["lossy"] else "off"
    return (
        f"the {FORM} model, {name}" if row["model"] == FORM else name,
        str(row["right"]),
        f"{row['tokens_per_forward']:.2f}",
        percent(row["hit_rate"]),
        percent(row["low_rate"]),
        f"{row['loads_per_forward']:.1f}",
        f"{row['low_loads_per_forward']:.1f}",
        f"{row['read_bytes_per_forward'] / 1024:.0f}",
        f"{row['read_bytes_per_token'] / 1024:.0f}",
        percent(row["replaced_share"]),
        percent(row["replaced_weight_share"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{STUDY}.run")
    parser.add_argument("--tables-only", action="store_true", help="of the rows that are there")
    parser.add_argument("--out", type=Path, default=RAW, help="another folder leaves README alone")
    arguments = parser.parse_args()
    path = study_path(STUDY, arguments.out)
    if not arguments.tables_only:
        partial = path.with_suffix(".partial")
        with tempfile.TemporaryDirectory() as folder, partial.open("w", encoding="utf-8") as file:
            low = Path(folder) / FORM
            pack_checkpoint("demo", low, dtype=FORM)
            for threshold, model, rule in cells():
                row = measure(model, rule, str(low), threshold, NUM_QUESTIONS[threshold])
                file.write(json.dumps(row) + "\n")
                file.flush()
                said = f"{row['right']} of {row['num_questions']}"
                print(threshold, model, rule, said, flush=True)
        partial.replace(path)
    found = tables(read_study(STUDY, arguments.out))
    if arguments.out.resolve() == RAW:
        replace_tables(STUDY, found)
    print("\n\n".join(table.markdown() for table in found))


if __name__ == "__main__":
    main()
