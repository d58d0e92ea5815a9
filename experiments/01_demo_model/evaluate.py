"""Score the exported demo model on held-out questions and write the small files beside it.

``score_records`` takes any model that ``decode`` can drive; ``main`` reads the exported folder and
reports exact answers and answer tokens per forward, by form and by family.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tasks
import torch
from model import DemoConfig, DemoModel, decode, from_checkpoint, to_checkpoint
from safetensors.torch import load_file, save_file
from tokenizer import EOS, MASK, render_prompt, save_tokenizer
from tokenizers import Tokenizer

DEMO_FOLDER = Path(__file__).resolve().parents[2] / "src" / "oled_moe" / "demo"
BLOCK_LENGTH, THRESHOLD = 16, 0.95
MAX_NEW_TOKENS = 96
HELD_OUT_COUNTS = {
    "plain": 60,
    "story": 60,
    "json_asked": 50,
    "json_forced": 50,
    "code": 110,
    "facts": 110,
}
SAMPLE_COUNTS = {"plain": 2, "story": 1, "json_asked": 1, "code": 4, "facts": 4}
BATCH_SIZE = 25


@dataclass(frozen=True, slots=True)
class Scored:
    record: dict[str, Any]
    answer: str
    is_right: bool
    num_tokens: int
    num_forwards: int


def draw_records(num_per_form: int, *, seed: int, forms: tuple[str, ...]) -> list[dict[str, str]]:
    """Held-out questions, ``num_per_form`` of each form that is evaluated."""
    records = []
    for form in forms:
        if form == "drill":
            continue
        rng = random.Random(f"{seed} {form}")
        questions = islice(tasks.draw_held_out(form, rng), num_per_form)
        records += [question.to_record() for question in questions]
    return records


def score_records(
    model: DemoModel,
    tokenizer: Tokenizer,
    records: list[dict[str, Any]],
    *,
    block_length: int = BLOCK_LENGTH,
    threshold: float = THRESHOLD,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[Scored]:
    """Decode and grade; a given prefix counts as prompt, and as part of the graded answer."""
    scored = []
    for first in range(0, len(records), BATCH_SIZE):
        chunk = records[first : first + BATCH_SIZE]
        prompts = [
            tokenizer.encode(render_prompt(r["question"]) + r.get("prefix", "")).ids for r in chunk
        ]
        answers = decode(
            model,
            prompts,
            mask_id=tokenizer.token_to_id(MASK),
            eos_id=tokenizer.token_to_id(EOS),
            block_length=block_length,
            threshold=threshold,
            max_new_tokens=max_new_tokens,
        )
        for record, decoded in zip(chunk, answers, strict=True):
            text = record.get("prefix", "") + tokenizer.decode(decoded.ids)
            is_right = tasks.grade(record, text)
            scored.append(Scored(record, text, is_right, len(decoded.ids), decoded.num_forwards))
    return scored


def group_name(record: dict[str, Any]) -> str:
    """The forms of arithmetic are reported one by one, code and facts as a whole."""
    return str(record["form" if record["family"] == "arithmetic" else "family"])


def family_name(record: dict[str, Any]) -> str:
    """The family, with JSON answers apart."""
    form = str(record["form"])
    return f"{record['family']} as JSON" if form.startswith("json") else str(record["family"])


def summarise(
    scored: list[Scored], name_of: Callable[[dict[str, Any]], str] = group_name
) -> dict[str, dict[str, float]]:
    """Accuracy and answer tokens per forward of each group."""
    groups: dict[str, list[Scored]] = {}
    for item in scored:
        groups.setdefault(name_of(item.record), []).append(item)
    return {
        name: {
            "num": len(items),
            "accuracy": round(sum(s.is_right for s in items) / len(items), 3),
            "tokens_per_forward": sum(s.num_tokens for s in items)
            / sum(s.num_forwards for s in items),
        }
        for name, items in groups.items()
    }


def export_model(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the weights, both configs and the tokenizer files of one checkpoint."""
    save_tokenizer(tokenizer, folder)
    mask_id, eos_id = tokenizer.token_to_id(MASK), tokenizer.token_to_id(EOS)
    config = model.config.to_json(mask_id=mask_id, eos_id=eos_id)
    generation = {
        "block_length": BLOCK_LENGTH,
        "threshold": THRESHOLD,
        "temperature": 0.0,
        "mask_token_id": mask_id,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    partial = folder / "model.safetensors.partial"
    save_file(to_checkpoint(model), partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")


def load_model(folder: Path, dtype: torch.dtype) -> tuple[DemoModel, Tokenizer]:
    config = DemoConfig.from_json(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    model = from_checkpoint(config, tensors, dtype)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def limit_each_group(records: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(group_name(record), []).append(record)
    return [record for group in groups.values() for record in group[:limit]]


def draw_held_out_set(seed: int) -> list[dict[str, str]]:
    return [
        record
        for form, count in HELD_OUT_COUNTS.items()
        for record in draw_records(count, seed=seed, forms=(form,))
    ]


def write_held_out(folder: Path) -> None:
    """Draw heldout.jsonl and questions.json, without looking at any answer."""
    records = draw_held_out_set(2)
    lines = [json.dumps(record) for record in records]
    (folder / "heldout.jsonl").write_text("\n".join(lines) + "\n")
    samples = []
    for form, count in SAMPLE_COUNTS.items():
        rng = random.Random(f"questions {form}")
        for question in islice(tasks.draw_held_out(form, rng), count):
            samples.append(
                {
                    "question": question.question,
                    "family": question.family,
                    "expected": expected_substring(question),
                }
            )
    (folder / "questions.json").write_text(json.dumps(samples, indent=2) + "\n")


def expected_substring(question: tasks.Question) -> str:
    """A string that every right answer in the trained style contains."""
    if question.form.startswith("json"):
        return question.answer
    if question.family == "code":
        return question.answer.split("return ")[1]
    if question.family == "arithmetic":
        return f"= {question.expected}"
    return question.expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DEMO_FOLDER)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--block-length", type=int, default=BLOCK_LENGTH)
    parser.add_argument("--threshold", type=float, default=THRESHOLD)
    parser.add_argument("--limit", type=int, default=0, help="questions of each group, 0 for all")
    parser.add_argument("--fresh", type=int, help="seed of a new draw instead of heldout.jsonl")
    parser.add_argument("--errors", action="store_true", help="print every wrong answer")
    parser.add_argument("--write-held-out", action="store_true", help="draw the question files")
    arguments = parser.parse_args()
    if arguments.write_held_out:
        write_held_out(arguments.folder)
        return
    model, tokenizer = load_model(arguments.folder, getattr(torch, arguments.dtype))
    if arguments.fresh is None:
        records = read_records(arguments.folder / "heldout.jsonl")
    else:
        records = list(draw_held_out_set(arguments.fresh))
    if arguments.limit:
        records = limit_each_group(records, arguments.limit)
    started = time.monotonic()
    scored = score_records(
        model,
        tokenizer,
        records,
        block_length=arguments.block_length,
        threshold=arguments.threshold,
    )
    for item in scored:
        if arguments.errors and not item.is_right:
            print(json.dumps({**item.record, "answer": item.answer}))
    summaries = {**summarise(scored), **summarise(scored, family_name)}
    for name, entry in summaries.items():
        print(
            f"{name:20} {entry['accuracy']:6.1%} of {entry['num']:4.0f}"
            f"  {entry['tokens_per_forward']:.2f} tokens/forward"
        )
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
