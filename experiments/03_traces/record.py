"""Records the demo model's traces: three workloads, each at two thresholds.

Writes results/traces/demo-WORKLOAD[-slow].trace.safetensors and prints a table for their README.
"""

import argparse
import json
import time
from pathlib import Path

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.chat import chat_request, with_face_defaults
from oled_moe.recording import PromptToRecord, record_trace
from oled_moe.trace_stats import TraceStats, describe_trace
from oled_moe.traces import save_trace

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "src/oled_moe/demo/heldout.jsonl"
WORKLOADS = ("arithmetic", "code", "facts")
# At the default threshold the model fills a block in one or two steps; at 1 it takes one token a
# step, so that there is something to see within a block.
THRESHOLDS = {"": None, "-slow": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results/traces")
    parser.add_argument("--num-requests", type=int, default=60)
    parser.add_argument("--num-slow", type=int, default=12)
    arguments = parser.parse_args()
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    print(
        "| trace | forwards | steps/block | active | gap 1 | gap 2 | gap 4 | to first | unrelated "
        "| stability | masked | accepted | fixed | size |"
    )
    print("|" + "---|" * 14)
    with Engine("demo", EngineConfig(experts_per_layer=96, threads=1)) as engine:
        for workload in WORKLOADS:
            for suffix, threshold in THRESHOLDS.items():
                count = arguments.num_slow if suffix else arguments.num_requests
                record(engine, questions, workload, suffix, threshold, count, arguments.out)


def record(
    engine: Engine,
    questions: list[dict[str, str]],
    workload: str,
    suffix: str,
    threshold: float | None,
    count: int,
    out: Path,
) -> None:
    start_s = time.perf_counter()
    params = with_face_defaults(engine, SamplingParams(max_tokens=128, threshold=threshold))
    chosen = [entry for entry in questions if entry["family"] == workload]
    # Spread over the file, whose entries are sorted by form.
    chosen = chosen[:: len(chosen) // count][:count]
    prompts = []
    for entry in chosen:
        prompt, params = chat_request(engine, entry["question"], params)
        prompts.append(PromptToRecord(prompt, entry["key"], workload))
    # Cosines are between steps; with one or two steps a block they say little for their bytes.
    include = ("token_ids", "hidden_cosine") if suffix else ("token_ids",)
    trace = record_trace(engine, prompts, params, include=include, model_name="demo")
    path = out / f"demo-{workload}{suffix}.trace.safetensors"
    save_trace(trace, path)
    stats = describe_trace(trace)
    assert stats is not None
    print(row(path, stats), f"<!-- {time.perf_counter() - start_s:.1f} s -->", flush=True)


def row(path: Path, stats: TraceStats) -> str:
    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    cells = [
        path.name.removesuffix(".trace.safetensors"),
        str(stats.num_forwards),
        f"{stats.steps_per_block:.1f}",
        f"{stats.activation.mean:.1f}",
        *(cell(stats.gaps[gap - 1].overlap) for gap in (1, 2, 4)),
        cell(stats.boundaries[2].overlap),
        cell(stats.unrelated.overlap),
        *(cell(item.mean) for item in stats.stability),
        f"{path.stat().st_size / 1e6:.2f} MB",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
