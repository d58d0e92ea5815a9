"""Lossy expert sharing on the demo model: what it saves, and what it costs in right answers.

    python -m experiments.09_lossy_sharing.run

Writes results/raw/09_lossy_sharing.jsonl, one row for each threshold, memory and rule, and the
README's tables. Counts and answers repeat exactly; times depend on the machine and its load.
"""

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.paper.common import RAW, Row, Table, base_row, percent
from experiments.studies import read_study, replace_tables, study_path
from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.engine import find_model
from oled_moe.types import LayerDemand, LayerPlan, Phase

STUDY = "09_lossy_sharing"
GROUPS = ("plain", "story", "json_asked", "json_forced", "code", "facts")
BLOCK_RULES = (
    *(f"des-vote:experts={count}" for count in (16, 24, 32, 48)),
    *(f"des-seq:top={top}" for top in (1, 2, 3)),
    *(f"dmoe:coverage={share},minimum=6" for share in (0.4, 0.6, 0.8)),
)
RESIDENT_RULES = tuple(f"resident:threshold={share}" for share in (0.6, 1.0))
# Threshold 0.95 is how the model is meant to be run, one or two passes per block; 1.0 is above any
# probability: one token per pass, which gives the many passes per block that large models need.
SLOW_RULES = (
    *("des-vote:experts=16", "des-vote:experts=32"),
    *("des-seq:top=1", "des-seq:top=2", "dmoe:coverage=0.6,minimum=6"),
)
# Of each group where forwards are many, or answers are those of another row.
FEW_QUESTIONS = 8
NUM_WARM_UP = 3
BLOCK_LENGTH, MAX_TOKENS = 16, 96


@dataclass
class Counts:
    """What an engine's forwards that denoise ask for, all layers; observes demands and plans.

    `forward` counts distinct experts of whole forwards, commits that ride along included; `block`
    those of the block at work alone.
    """

    forward: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)

    def __call__(self, demand: LayerDemand, plan: LayerPlan) -> None:
        row = demand.context.rows[-1]
        if row.phase != Phase.DENOISE:
            return
        self.forward.append(len(demand.expert_ids))
        self.block.append(len(np.unique(demand.topk_ids[-row.num_tokens :])))


def questions(limit: int | None) -> list[dict[str, Any]]:
    """Held-out questions, so many of each group at most."""
    lines = (find_model("demo") / "heldout.jsonl").read_text("utf-8").splitlines()
    by_group: dict[str, list[dict[str, Any]]] = {name: [] for name in GROUPS}
    for record in map(json.loads, lines):
        by_group[group_of(record)].append(record)
    return [record for records in by_group.values() for record in records[:limit]]


def group_of(record: dict[str, Any]) -> str:
    """As experiments/01_demo_model reports them."""
    return str(record["form" if record["family"] == "arithmetic" else "family"])


def measure(rule: str | None, memory: str, threshold: float, records: list[dict[str, Any]]) -> Row:
    """All questions under one rule."""
    grade = importlib.import_module("experiments.01_demo_model.tasks").grade
    counts, results, times, answers = Counts(), [], [], []
    config = EngineConfig(expert_memory=memory, threads=1, lossy=rule)
    params = SamplingParams(
        max_tokens=MAX_TOKENS,
        block_length=BLOCK_LENGTH,
        threshold=threshold,
        temperature=0,
        eos_early_stop=True,
    )
    with Engine("demo", config) as engine:
        assert engine.tokenizer is not None
        for number, record in enumerate([*records[:: len(records) // NUM_WARM_UP], *records]):
            if number == len(records[:: len(records) // NUM_WARM_UP]):
                engine.experts.observers.append(counts)
            messages = [{"role": "user", "content": record["question"]}]
            prefix = record.get("prefix", "")
            prompt = engine.tokenizer.apply_chat_template(messages) + prefix
            start_s = time.perf_counter()
            result = engine.generate(prompt, params)
            if counts in engine.experts.observers:
                times.append(time.perf_counter() - start_s)
                results.append(result)
                answers.append(prefix + (result.text or ""))
        policy, num_experts = engine.policy.name, engine.model_config.num_experts
    is_right = [
        result.finish_reason == "stop" and grade(record, answer)
        for record, result, answer in zip(records, results, answers, strict=True)
    ]
    stats = [result.stats for result in results]
    forwards = [s.num_denoise_forwards + s.num_commit_forwards for s in stats]
    prefills = [s.num_prefill_forwards for s in stats]
    num_tokens = sum(len(result.token_ids) for result in results)
    each_s = [t / (n + p) for t, n, p in zip(times, forwards, prefills, strict=True)]
    return base_row("", None) | {
        "experiment": STUDY,
        "model": "demo",
        "lossy": rule,
        "expert_memory": memory,
        "threshold": threshold,
        "block_length": BLOCK_LENGTH,
        "policy": policy,
        "num_experts": num_experts,
        "num_questions": len(records),
        "warm_up": NUM_WARM_UP,
        "right": sum(is_right),
        "right_by_group": {
            name: [
                sum(ok for ok, r in zip(is_right, records, strict=True) if group_of(r) == name),
                sum(group_of(r) == name for r in records),
            ]
            for name in GROUPS
        },
        "tokens_per_forward": num_tokens / sum(forwards),
        "experts_per_forward": statistics.fmean(counts.forward),
        "experts_per_block": statistics.fmean(counts.block),
        "loads_per_token": sum(s.expert_loads for s in stats) / num_tokens,
        "hit_rate": statistics.fmean(s.hit_rate for s in stats),
        "replaced_share": statistics.fmean(s.replaced_share for s in stats),
        "forward_s_median": statistics.median(each_s),
        "load_average": os.getloadavg()[0],
    }


def cells() -> Iterator[tuple[float, str, str | None]]:
    """Threshold, memory and rule of each row; where all is resident, `resident` changes nothing."""
    yield from ((0.95, "25%", rule) for rule in (None, *BLOCK_RULES, *RESIDENT_RULES))
    yield from ((1.0, "25%", rule) for rule in (None, *SLOW_RULES, *RESIDENT_RULES))
    yield from ((0.95, "100%", rule) for rule in (None, *BLOCK_RULES, RESIDENT_RULES[-1]))


def tables(rows: Sequence[Row]) -> list[Table]:
    header = (
        *("rule", "right", *(name.replace("_", " ") for name in GROUPS), "tokens per forward"),
        *("experts of the block", "of the forward", "loads per token", "replaced, %"),
        "ms per forward*",
    )
    found = []
    for threshold, memory in dict.fromkeys((r["threshold"], r["expert_memory"]) for r in rows):
        here = [r for r in rows if (r["threshold"], r["expert_memory"]) == (threshold, memory)]
        passes = "one token per pass" if threshold == 1 else f"threshold {threshold}"
        share = "all experts" if memory == "100%" else f"{memory} of the experts"
        title = (
            f"**{passes.capitalize()}, {share} in memory, {here[0]['num_questions']} questions**"
        )
        found.append(Table(title, header, tuple(map(_line, here))))
    return found


def _line(row: Row) -> tuple[str, ...]:
    def share(right: int, total: int) -> str:
        return f"{100 * right / total:.1f}"

    return (
        f"`{row['lossy']}`" if row["lossy"] else "off",
        share(row["right"], row["num_questions"]),
        *(share(*row["right_by_group"][name]) for name in GROUPS),
        f"{row['tokens_per_forward']:.2f}",
        f"{row['experts_per_block']:.1f}",
        f"{row['experts_per_forward']:.1f}",
        f"{row['loads_per_token']:.2f}",
        percent(row["replaced_share"]),
        f"{1e3 * row['forward_s_median']:.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{STUDY}.run")
    parser.add_argument("--tables-only", action="store_true", help="of the rows that are there")
    parser.add_argument("--out", type=Path, default=RAW, help="another folder leaves README alone")
    parser.add_argument("--limit", type=int, help="questions of each group; default: all")
    arguments = parser.parse_args()
    path = study_path(STUDY, arguments.out)
    if not arguments.tables_only:
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            for threshold, memory, rule in cells():
                few = None if (threshold, memory) == (0.95, "25%") else FEW_QUESTIONS
                row = measure(rule, memory, threshold, questions(arguments.limit or few))
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(
                    threshold, memory, rule, f"{row['right']} of {row['num_questions']}", flush=True
                )
        partial.replace(path)
    found = tables(read_study(STUDY, arguments.out))
    if arguments.out.resolve() == RAW:
        replace_tables(STUDY, found)
    print("\n\n".join(table.markdown() for table in found))


if __name__ == "__main__":
    main()
