"""Output tokens per second when several sequences share forwards, on the bundled demo model.

The same questions go through a scheduler that runs 1, 2, 4, 8 or 16 of them at a time. Repetitions
go round all of these in turn, so that what drifts on the machine meets all alike; the first round
warms up and is not counted.

    python benchmarks/serving.py --output results/raw/serving.jsonl
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import provenance

import oled_moe
from oled_moe import Engine, EngineConfig
from oled_moe.chat import chat_request, with_face_defaults
from oled_moe.config import SamplingParams
from oled_moe.environment import Load
from oled_moe.scheduler import Scheduler, StepReport

NUM_SEQUENCES = (1, 2, 4, 8, 16)
TARGET_SEQUENCES, TARGET_RATIO = 8, 3.0
QUESTIONS = Path(oled_moe.__file__).parent / "demo" / "heldout.jsonl"


@dataclass(frozen=True, slots=True)
class Round:
    """All questions once. Units: seconds."""

    wall_s: float
    forwards_s: float
    num_forwards: int
    answers: Sequence[Sequence[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.wall_s


def answer_all(engine: Engine, questions: Sequence[str], params: SamplingParams) -> Round:
    """Ask all questions at once and wait for the last answer."""
    answers: list[Sequence[int]] = [()] * len(questions)
    failures: list[BaseException] = []
    forwards: list[float] = []
    is_done = threading.Semaphore(0)

    def count(report: StepReport) -> None:
        forwards.append(report.forward_s)

    with Scheduler(engine, max_waiting=len(questions)) as scheduler:
        scheduler.observers.append(count)

        def ask(index: int, question: str) -> None:
            def on_event(event: Any) -> None:
                if event.result is not None:
                    answers[index] = event.result.token_ids
                    is_done.release()

            def on_error(error: BaseException) -> None:
                failures.append(error)
                is_done.release()

            prompt, own = chat_request(engine, question, with_face_defaults(engine, params))
            scheduler.submit(prompt, own, on_event=on_event, on_error=on_error)

        start_s = time.perf_counter()
        for index, question in enumerate(questions):
            ask(index, question)
        for _ in questions:
            is_done.acquire()
        wall_s = time.perf_counter() - start_s
    if failures:
        raise failures[0]
    return Round(wall_s, sum(forwards), len(forwards), answers)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    # The file goes family by family; steps over it take some of each.
    step = max(1, len(lines) // args.questions)
    questions = [json.loads(line)["question"] for line in lines[::step]][: args.questions]
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=args.ignore_eos or None)
    rounds: dict[int, list[Round]] = {num: [] for num in args.sequences}
    with ExitStack() as stack:
        engines = {
            num: stack.enter_context(
                Engine("demo", EngineConfig(max_num_seqs=num, threads=args.threads))
            )
            for num in args.sequences
        }
        load = Load()
        for repetition in range(args.repetitions + 1):
            for num, engine in engines.items():
                done = answer_all(engine, questions, params)
                if repetition:
                    rounds[num].append(done)
        machine = load.facts()
        num_threads = engines[args.sequences[0]].num_threads
    return {
        "num_questions": len(questions),
        "num_tokens": sum(map(len, rounds[args.sequences[0]][0].answers)),
        "max_tokens": args.max_tokens,
        "ignore_eos": args.ignore_eos,
        "num_threads": num_threads,
        "repetitions": args.repetitions,
        "warm_up_rounds": 1,
        "machine": machine,
        "cases": {num: summary(done, rounds[args.sequences[0]]) for num, done in rounds.items()},
    }


def summary(rounds: Sequence[Round], base: Sequence[Round]) -> dict[str, Any]:
    """One case: medians, and ratios to the first case, repetition by repetition."""
    rates = [each.tokens_per_s for each in rounds]
    ratios = [
        each.tokens_per_s / other.tokens_per_s for each, other in zip(rounds, base, strict=True)
    ]
    pairs = zip(rounds[0].answers, base[0].answers, strict=True)
    num_tokens = sum(map(len, rounds[0].answers))
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_min": min(rates),
        "tokens_per_s_max": max(rates),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "num_forwards": rounds[0].num_forwards,
        "tokens_per_forward": num_tokens / rounds[0].num_forwards,
        "forward_s": statistics.median(each.forwards_s / each.num_forwards for each in rounds),
        # Near ties may fall the other way in company: sums are rounded in another order.
        "num_same_answers": sum(list(one) == list(other) for one, other in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=list(NUM_SEQUENCES))
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--ignore-eos", action="store_true", help="answers of equal length")
    parser.add_argument("--threads", type=int, help="default: the engine's own choice")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", type=Path, help="append one JSON row")
    args = parser.parse_args()
    row = {"benchmark": "serving", "model": "demo", **provenance(), **measure(args)}
    print(json.dumps(row, indent=2))
    if args.output:
        with args.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    target = row["cases"].get(TARGET_SEQUENCES)
    if target is not None:
        print(
            f"{TARGET_SEQUENCES} sequences: {target['ratio']:.2f} times the throughput of "
            f"{args.sequences[0]} (wanted: {TARGET_RATIO:g} times)"
        )


if __name__ == "__main__":
    main()
