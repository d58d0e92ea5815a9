"""Figure 18a: two versions of a model. A stand-in: two decoding loops of one model.

python -m experiments.paper.fig_18a.run
"""

import dataclasses
import json
from collections.abc import Iterator

from experiments.paper.common import (
    DEMO_FAMILIES,
    HARDWARE,
    ROOT,
    Row,
    Table,
    mean_of,
    num_warmup,
    percent,
    run_figure,
    select,
    simulate_row,
    without_warmup,
)
from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.chat import chat_request, with_face_defaults
from oled_moe.recording import PromptToRecord, record_trace
from oled_moe.trace_stats import TraceRows, activation, overlap_by_gap
from oled_moe.traces import RoutingTrace
from oled_moe.types import Phase

FIGURE = "18a"
QUESTIONS = ROOT / "src" / "oled_moe" / "demo" / "heldout.jsonl"
# The loops that LLaDA2.0 and LLaDA2.1 are decoded with.
ALGORITHMS = {"2.0": "low_confidence", "2.1": "joint_threshold"}
# The model's own threshold, where a block takes one or two steps, and one token a step.
THRESHOLDS = (0.95, 1.0)
NUM_QUESTIONS, NUM_WARMUP = 5, 1
POLICIES = ("naive-lru", "priority", "priority+adapt", "belady")
# As many slots per demanded expert as mini has at 40 and 100; see figure 15a.
SIZES = (28, 70)


def make_rows(is_quick: bool) -> Iterator[Row]:
    for version, algorithm in ALGORITHMS.items():
        for threshold in THRESHOLDS:
            trace = record(algorithm, threshold, 2 if is_quick else NUM_QUESTIONS)
            found = numbers(trace)
            labels = {"loop": version, "algorithm": algorithm, "threshold": threshold}
            for policy in POLICIES:
                for capacity in SIZES:
                    row = simulate_row(FIGURE, trace, policy, capacity, HARDWARE["mini"], **labels)
                    yield row | found


def record(algorithm: str, threshold: float, num_questions: int) -> RoutingTrace:
    """The demo model's answers, warm-up questions of each family first; greedy."""
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    chosen: list[tuple[int, dict[str, str]]] = []
    for family in DEMO_FAMILIES:
        mine = [question for question in questions if question["family"] == family]
        mine = mine[:: len(mine) // num_questions][:num_questions]
        chosen += list(enumerate(mine))
    chosen.sort(key=lambda item: item[0])
    with Engine("demo", EngineConfig(experts_per_layer=96, threads=1)) as engine:
        params = with_face_defaults(
            engine, SamplingParams(max_tokens=128, threshold=threshold, algorithm=algorithm)
        )
        prompts = []
        for _, question in chosen:
            prompt, used = chat_request(engine, question["question"], params)
            prompts.append(PromptToRecord(prompt, question["key"], question["family"]))
        trace = record_trace(engine, prompts, used, model_name="demo")
    warmup = NUM_WARMUP * len(DEMO_FAMILIES)
    return dataclasses.replace(trace, extra={**trace.extra, "warmup_requests": warmup})


def numbers(trace: RoutingTrace) -> Row:
    """What the loop does, whatever the policy."""
    measured = without_warmup(trace)
    rows = TraceRows(measured)
    steps = int((measured.row_phase == Phase.DENOISE).sum())
    tokens = sum(request.num_generated_tokens for request in measured.requests)
    return {
        "active": activation(rows).mean,
        "adjacent_overlap": overlap_by_gap(rows, 1)[0].overlap,
        "steps": steps,
        "tokens": tokens,
        "tokens_per_step": tokens / steps,
        "measured_requests": len(trace.requests) - num_warmup(trace),
    }


def tables(rows: list[Row]) -> list[Table]:
    lines, loops = [], []
    for threshold in THRESHOLDS:
        for version, algorithm in ALGORITHMS.items():
            here = select(rows, loop=version, threshold=threshold)
            first = here[0]
            loops.append(
                (
                    f"{version}, `{algorithm}`",
                    f"{threshold:g}",
                    str(first["tokens"]),
                    str(first["steps"]),
                    f"{first['tokens_per_step']:.2f}",
                    f"{first['active']:.1f}",
                    percent(first["adjacent_overlap"]),
                )
            )
            for policy in POLICIES:
                texts = []
                for capacity in SIZES:
                    mine = select(here, policy=policy, capacity=capacity)
                    loads = mean_of(mine, "denoise_expert_loads") / first["tokens"]
                    texts += [
                        f"{percent(mean_of(mine, 'hit_rate'))} / "
                        f"{percent(mean_of(mine, 'expert_cache_utilization'))}",
                        f"{loads:.1f}",
                    ]
                lines.append((version, f"{threshold:g}", policy, *texts))
    header = ("loop", "threshold", "tokens", "steps", "tokens a step", "active", "overlap, %")
    about = Table("The loops on the demo model.", header, tuple(loops))
    header = (
        "loop", "threshold", "policy", "28 of 96: hit rate / utilisation, %", "copies a token",
        "70 of 96: the same", "copies a token",
    )  # fmt: skip
    return [about, Table("Policies under both.", header, tuple(lines))]


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
