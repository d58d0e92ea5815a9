"""What a grammar costs in forwards and milliseconds, and whether its answers are valid.

    python -m experiments.08_structured_output.run

Writes results/raw/08_structured_output.jsonl: one row for each way to ask the demo model its
held-out questions, and one for each model and budget with random schemas.
"""

import argparse
import importlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
from torch import Tensor

from experiments.paper.common import RAW, base_row
from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.config import Grammar
from oled_moe.constrained import GrammarConstraint
from oled_moe.engine import GenerationResult
from oled_moe.grammar import GrammarCompiler
from oled_moe.model_paths import find_model
from oled_moe.random_checkpoint import make_random_checkpoint
from oled_moe.sampling import ConfidenceArray
from oled_moe.types import BoolArray, FloatArray, IntArray
from oled_moe.unmasking import BlockState, BlockUpdate, UnmaskingPolicy

schemas = importlib.import_module("experiments.08_structured_output.schemas")
ROWS = RAW / "08_structured_output.jsonl"
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
}
GRAMMARS: dict[str, Grammar | None] = {
    "free": None,
    "json_schema": Grammar.json_schema(ANSWER),
    "json_object": Grammar("json_object"),
    "regex": Grammar("regex", r'\{"answer": -?[0-9]{1,3}\}'),
    # What the model never says by itself.
    "number alone": Grammar("regex", "-?[0-9]{1,3}"),
}
BASE = SamplingParams(max_tokens=96, block_length=16, threshold=0.95, eos_early_stop=True)
NUM_SCHEMAS = 200


class TimedConstraint:
    """A constraint that counts the seconds spent in it, by block and by step."""

    def __init__(self, inner: GrammarConstraint) -> None:
        self.inner = inner
        self.step_s: list[float] = []
        self.block_s: list[float] = []

    def start_block(self, state: BlockState, num_left: int) -> None:
        start_s = time.perf_counter()
        self.inner.start_block(state, num_left)
        self.block_s.append(time.perf_counter() - start_s)

    def update(
        self,
        state: BlockState,
        logits_NV: Tensor,
        is_looked_at: BoolArray,
        unmasking: UnmaskingPolicy,
        draws_N: FloatArray | None,
    ) -> tuple[IntArray, ConfidenceArray, BlockUpdate]:
        start_s = time.perf_counter()
        found = self.inner.update(state, logits_NV, is_looked_at, unmasking, draws_N)
        self.step_s.append(time.perf_counter() - start_s)
        return found

    def wants_forward(self, state: BlockState) -> bool:
        return self.inner.wants_forward(state)

    def num_final(self, state: BlockState) -> int:
        return self.inner.num_final(state)

    @property
    def num_tokens(self) -> int | None:
        return self.inner.num_tokens

    @property
    def is_complete(self) -> bool:
        return self.inner.is_complete


@dataclass(frozen=True)
class Answered:
    """One answer, what it took, and what the grammar did; None where there was none."""

    result: GenerationResult
    total_s: float
    compile_s: float
    constraint: TimedConstraint | None

    @property
    def num_forwards(self) -> int:
        return self.result.stats.num_denoise_forwards + self.result.stats.num_commit_forwards


def answer(
    engine: Engine, prompt: str | Sequence[int], params: SamplingParams, *, renormalises: bool
) -> Answered:
    """As `Engine.generate`, with a look at the constraint."""
    start_s = time.perf_counter()
    prepared = engine.check(prompt, params)
    compile_s, timed = time.perf_counter() - start_s, None
    if prepared.params.grammar is not None:
        compiler = GrammarCompiler(engine.tokenizer, engine.model_config.vocab_size)
        timed = TimedConstraint(compiler.constraint(prepared.params, renormalises=renormalises))
        prepared = replace(prepared, constraint=timed)
    start_s = time.perf_counter()
    request = engine.begin(prepared)
    try:
        while request.num_to_prefill:
            engine.prefill([request])
        result = None
        while result is None:
            (event,) = engine.denoise([request])
            result = event.result
    finally:
        engine.end(request)
    return Answered(result, time.perf_counter() - start_s, compile_s, timed)


# Questions


def is_right(record: dict[str, Any], text: str | None, name: str) -> bool:
    """JSON with the right number; a free answer to a plain question just ends with it."""
    expected = int(record["expected"])
    if name == "number alone" or (name == "free" and not record["form"].startswith("json")):
        words = (text or "").replace("=", " ").split()
        return bool(words) and words[-1] == str(expected)
    try:
        return bool(json.loads(text or "") == {"answer": expected})
    except ValueError:
        return False


def ask_all(
    engine: Engine, records: list[dict[str, Any]], name: str, *, renormalises: bool
) -> dict[str, Any]:
    """One row's numbers: every question once, greedily."""
    assert engine.tokenizer is not None
    params = replace(BASE, grammar=GRAMMARS[name])
    found = []
    for record in records:
        messages = [{"role": "user", "content": record["question"]}]
        prompt = engine.tokenizer.apply_chat_template(messages)
        found.append(answer(engine, prompt, params, renormalises=renormalises))
    num_right = sum(
        is_right(record, each.result.text, name)
        for record, each in zip(records, found, strict=True)
    )
    return {"num": len(records), "num_exact": num_right} | costs(found)


def costs(found: list[Answered]) -> dict[str, Any]:
    """Forwards and tokens an answer, and what the grammar did and took. Units: ms."""
    num_tokens = sum(len(each.result.token_ids) for each in found)
    row: dict[str, Any] = {
        "forwards_per_answer": round(statistics.fmean(e.num_forwards for e in found), 3),
        "tokens_per_answer": round(num_tokens / len(found), 2),
    }
    timed = [each.constraint for each in found if each.constraint is not None]
    if not timed:
        return row
    counters = [each.inner.counters for each in timed]
    steps = sorted(s for each in timed for s in each.step_s) or [0.0]
    return row | {
        "forced_share": round(sum(c.num_forced for c in counters) / num_tokens, 3),
        "num_chosen": sum(c.num_chosen for c in counters),
        "num_overruled": sum(c.num_overruled for c in counters),
        "num_taken_back": sum(c.num_taken_back for c in counters),
        "num_closing": sum(c.num_closing for c in counters),
        "compile_ms": round(1e3 * statistics.median(each.compile_s for each in found), 3),
        "step_ms_median": round(1e3 * statistics.median(steps), 3),
        "step_ms_p95": round(1e3 * steps[int(len(steps) * 0.95)], 3),
        "share_of_time": round(
            sum(sum(each.step_s) + sum(each.block_s) for each in timed)
            / sum(each.total_s for each in found),
            3,
        ),
    }


def question_rows(engine: Engine, limit: int) -> Iterator[dict[str, Any]]:
    lines = (find_model("demo") / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for form in ("json_asked", "plain"):
        chosen = [record for record in records if record["form"] == form][:limit]
        for name in GRAMMARS:
            for renormalises in (False, True) if name != "free" else (False,):
                row = ask_all(engine, chosen, name, renormalises=renormalises)
                acceptance = "among allowed" if renormalises else "among all"
                yield {
                    "part": "questions",
                    "questions": form,
                    "answers": name,
                    "confidence": acceptance if name != "free" else "among all",
                } | row


# Random schemas


@contextmanager
def random_model() -> Iterator[Path]:
    """The demo model's shape and tokenizer with random weights."""
    demo = find_model("demo")
    config = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        path = make_random_checkpoint(config, Path(folder) / "random")
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(demo / name, path / name)
        yield path


def schema_rows(engine: Engine, model: str, num_schemas: int) -> Iterator[dict[str, Any]]:
    """Answers to one prompt under each schema, in budgets from the least that is known on."""
    assert engine.tokenizer is not None
    budgets: dict[str, list[int]] = {"shortest": [], "small value": [], "small value + 40": []}
    drawn, search_s, num_proven = [], [], 0
    compiler = GrammarCompiler(engine.tokenizer, engine.model_config.vocab_size)
    for seed in range(num_schemas):
        schema, text = schemas.draw_schema(seed)
        jsonschema.validate(json.loads(text), schema)
        drawn.append(schema)
        prepared = engine.check([0], SamplingParams(grammar=Grammar.json_schema(schema)))
        start_s = time.perf_counter()
        closing = compiler.state(prepared.params).shortest_closing()
        search_s.append(time.perf_counter() - start_s)
        assert closing is not None
        num_proven += closing.is_proven
        size = len(engine.tokenizer.encode(text))
        sizes = (min(size, len(closing.token_ids)), size, size + 40)
        for own, budget in zip(budgets.values(), sizes, strict=True):
            own.append(budget)
    prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": "What is 12 + 30?"}])
    for name, sizes in budgets.items():
        found = [
            answer(
                engine,
                prompt,
                replace(BASE, grammar=Grammar.json_schema(schema), max_tokens=size),
                renormalises=False,
            )
            for schema, size in zip(drawn, sizes, strict=True)
        ]
        num_valid = sum(
            each.result.finish_reason == "stop" and is_valid(each.result.text, schema)
            for each, schema in zip(found, drawn, strict=True)
        )
        yield {
            "part": "random schemas",
            "model": model,
            "budget": name,
            "num": num_schemas,
            "num_valid": num_valid,
            "num_proven_shortest": num_proven,
            "search_ms_median": round(1e3 * statistics.median(search_s), 2),
            "search_ms_max": round(1e3 * max(search_s), 1),
        } | costs(found)


def is_valid(text: str | None, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text or ""), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def rows(limit: int, num_schemas: int) -> Iterator[dict[str, Any]]:
    config = EngineConfig(expert_memory="25%", threads=1)
    with Engine("demo", config) as engine:
        yield from question_rows(engine, limit)
        yield from schema_rows(engine, "demo", num_schemas)
    with random_model() as path, Engine(path, config) as engine:
        yield from schema_rows(engine, "random weights", num_schemas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=10**6, help="questions of each kind")
    parser.add_argument("--schemas", type=int, default=NUM_SCHEMAS, help="random schemas")
    parser.add_argument("--no-rows", action="store_true", help="do not write the rows")
    arguments = parser.parse_args()
    labels = {"experiment": "08_structured_output", "block_length": 16, "threshold": 0.95}
    base = base_row("08_structured_output") | labels
    written = []
    for row in rows(arguments.limit, arguments.schemas):
        print(json.dumps(row), flush=True)
        written.append(base | row)
    if not arguments.no_rows:
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")


if __name__ == "__main__":
    main()
