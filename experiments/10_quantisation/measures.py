"""What quantised experts do to the demo model: answers, tokens, logits, layers beside bfloat16's.

A *canvas* is a block of an answer as it is before its first pass: behind the prompt and bfloat16's
own earlier blocks, all its positions masked. Every form is shown the same ones.

Legend: T tokens, D hidden, K experts per token, N masked positions of a canvas, V vocabulary.
"""

import importlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.engine import RunningRequest
from oled_moe.layers import ForwardBatch, Segment
from oled_moe.model_paths import find_model
from oled_moe.types import ForwardContext, ForwardRow, Phase

Record = dict[str, Any]

BLOCK_LENGTH, MAX_TOKENS, THRESHOLD = 16, 96, 0.95
# Questions that share forwards; what they are answered does not depend on that.
NUM_TOGETHER, CANVASES_TOGETHER = 8, 4
# Questions of each form; of facts not many more are held out.
FURTHER = {
    "plain": 200,
    "story": 200,
    "json_asked": 200,
    "json_forced": 200,
    "code": 200,
    "facts": 30,
}
PARAMS = SamplingParams(
    max_tokens=MAX_TOKENS,
    block_length=BLOCK_LENGTH,
    threshold=THRESHOLD,
    temperature=0,
    eos_early_stop=True,
)


class Answer(NamedTuple):
    """`token_ids`: up to and including eos."""

    token_ids: tuple[int, ...]
    is_right: bool


class Canvas(NamedTuple):
    """`token_ids`: the sequence up to the block's end. `masked`: the answer's positions in it."""

    question: int
    token_ids: tuple[int, ...]
    masked: tuple[int, ...]


class LayerInput(NamedTuple):
    """What a layer's experts are given. Shapes: [T, D], int64 [T, K], fp32 [T, K].

    `norms_T`: length of the hidden state that their sum is added to, with it, fp32 [T].
    """

    hidden_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    norms_T: Tensor


def open_engine(model: Any, dtype: str | None = None) -> Engine:
    """With all experts resident: what is computed does not depend on that."""
    return Engine(
        model,
        EngineConfig(expert_memory="100%", threads=1, dtype=dtype, max_num_seqs=NUM_TOGETHER),
    )


def held_out() -> list[Record]:
    """The questions of experiment 01, of which no training sequence shows any."""
    lines = (find_model("demo") / "heldout.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def further() -> list[Record]:
    """Held-out questions besides those, for what needs no grades."""
    tasks = importlib.import_module("experiments.01_demo_model.tasks")
    known = {(record["form"], record["question"]) for record in held_out()}
    found: list[Record] = []
    for form, number in FURTHER.items():
        drawn = tasks.draw_held_out(form, random.Random(f"further {form}"))
        others = (each for each in drawn if (each.form, each.question) not in known)
        found += [question.to_record() for question in islice(others, number)]
    return found


def calibrating(number: int, seed: int = 0) -> list[Record]:
    """Questions as the model was trained with; none of them is held out."""
    tasks = importlib.import_module("experiments.01_demo_model.tasks")
    rng = random.Random(seed)
    return [tasks.draw_training_question(rng).to_record() for _ in range(number)]


def prompt_ids(engine: Engine, record: Record) -> list[int]:
    """The question as a user's turn; a forced prefix is the start of the reply."""
    assert engine.tokenizer is not None
    messages = [{"role": "user", "content": record["question"]}]
    text = engine.tokenizer.apply_chat_template(messages) + record.get("prefix", "")
    return engine.tokenizer.encode(text)


def answer_all(engine: Engine, records: Sequence[Record]) -> list[Answer]:
    """Greedy answers, as experiment 01 has and grades them."""
    grade = importlib.import_module("experiments.01_demo_model.tasks").grade
    answers: list[Answer] = []
    for first in range(0, len(records), NUM_TOGETHER):
        together = records[first : first + NUM_TOGETHER]
        for record, result in zip(together, _generate(engine, together), strict=True):
            text = record.get("prefix", "") + (result.text or "")
            is_right = result.finish_reason == "stop" and grade(record, text)
            answers.append(Answer(tuple(result.token_ids), is_right))
    return answers


def _generate(engine: Engine, records: Sequence[Record]) -> list[Any]:
    running: list[RunningRequest] = []
    results: dict[int, Any] = {}
    try:
        for record in records:
            running.append(engine.begin(engine.check(prompt_ids(engine, record), PARAMS)))
        for request in running:
            while request.num_to_prefill:
                engine.prefill([request])
        while len(results) < len(running):
            active = [request for request in running if request.request_id not in results]
            for request, event in zip(active, engine.denoise(active), strict=True):
                if request.sequence.error is not None:
                    raise request.sequence.error
                if event.result is not None:
                    results[request.request_id] = event.result
                    engine.end(request)
    finally:
        for request in running:
            engine.end(request)
    return [results[request.request_id] for request in running]


def agreement(answers: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """Share of the positions of all expected answers that hold the expected token."""
    num_same = sum(
        sum(a == b for a, b in zip(found.token_ids, wanted.token_ids, strict=False))
        for found, wanted in zip(answers, expected, strict=True)
    )
    return num_same / sum(len(wanted.token_ids) for wanted in expected)


def canvases(
    engine: Engine, records: Sequence[Record], answers: Sequence[Answer]
) -> Iterator[Canvas]:
    """Those of all blocks of the answers."""
    mask_id = engine.sampling_defaults.mask_token_id
    for number, (record, answer) in enumerate(zip(records, answers, strict=True)):
        prompt = prompt_ids(engine, record)
        end = len(prompt) + len(answer.token_ids)
        whole = (*prompt, *answer.token_ids)
        for start in range(len(prompt) // BLOCK_LENGTH * BLOCK_LENGTH, end, BLOCK_LENGTH):
            first = max(start, len(prompt))
            masks = (mask_id,) * (start + BLOCK_LENGTH - first)
            masked = tuple(range(first, min(start + BLOCK_LENGTH, end)))
            yield Canvas(number, whole[:first] + masks, masked)


@dataclass
class LayerInputs:
    """A probe of the model: what experts of every layer are given, forward by forward."""

    layers: dict[int, list[LayerInput]] = field(default_factory=dict)
    _parts: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, value: Tensor) -> None:
        if not name.startswith("layers."):
            return
        layer, part = name.removeprefix("layers.").split(".", 1)
        if part in ("mlp_input", "topk_idx", "topk_weight"):
            self._parts[part] = value.clone()
        if part == "layer_out" and "topk_weight" in self._parts:
            names = ("mlp_input", "topk_idx", "topk_weight")
            given = [self._parts.pop(each) for each in names]
            norms_T = value.float().norm(dim=-1)
            self.layers.setdefault(int(layer), []).append(LayerInput(*given, norms_T))

    def joined(self) -> list[LayerInput]:
        """All forwards of each MoE layer, in order of layers."""
        return [
            LayerInput(*map(torch.cat, zip(*self.layers[layer], strict=True)))
            for layer in sorted(self.layers)
        ]


def logits_of(engine: Engine, shown: Sequence[Canvas], probe: LayerInputs | None = None) -> Tensor:
    """Of all masked positions, in order, fp32 [N, V]; `probe` sees all tokens of the canvases."""
    engine.model.probe = probe
    try:
        parts = [
            _forward(engine, shown[first : first + CANVASES_TOGETHER])
            for first in range(0, len(shown), CANVASES_TOGETHER)
        ]
    finally:
        engine.model.probe = None
    return torch.cat(parts)


def _forward(engine: Engine, shown: Sequence[Canvas]) -> Tensor:
    """Whole sequences at once: attention is causal by blocks, as with keys and values kept."""
    sizes = [len(canvas.token_ids) for canvas in shown]
    segments = tuple(
        Segment(engine.model.new_kv(size), size, True, logit_tokens=torch.tensor(canvas.masked))
        for size, canvas in zip(sizes, shown, strict=True)
    )
    positions = np.concatenate([np.arange(size) for size in sizes])
    batch = ForwardBatch(
        torch.tensor([token for canvas in shown for token in canvas.token_ids]),
        torch.from_numpy(positions),
        segments,
        _context(sizes, positions),
    )
    engine.start_forward(batch.context)
    logits = engine.model.forward(batch)
    assert isinstance(logits, Tensor)
    return logits.float()


def _context(sizes: Sequence[int], positions: Any) -> ForwardContext:
    """Of a forward that no policy needs to understand: all experts are resident."""
    return ForwardContext(
        0,
        BLOCK_LENGTH,
        tuple(ForwardRow(number, 0, 0, Phase.DENOISE, size) for number, size in enumerate(sizes)),
        np.ones(sum(sizes), np.float32),
        np.zeros(sum(sizes), np.uint8),
        positions,
    )


def divergences(logits_NV: Tensor, expected_NV: Tensor) -> Tensor:
    """KL(expected ‖ found) of each row in nats, fp64 [N]."""
    expected = expected_NV.double().log_softmax(-1)
    found = logits_NV.double().log_softmax(-1)
    return (expected.exp() * (expected - found)).sum(-1)


def by_question(values_N: Tensor, shown: Sequence[Canvas]) -> list[float]:
    """Means over the masked positions of each question."""
    owners = torch.tensor([c.question for c in shown for _ in c.masked])
    count = int(owners.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, owners, values_N.double())
    return (sums / owners.bincount(minlength=count)).tolist()


def layer_outputs(engine: Engine, inputs: Sequence[LayerInput]) -> list[Tensor]:
    """What each MoE layer's routed experts add up to, fp32 [T, D], by the engine's own kernels."""
    outputs = []
    for layer, given in enumerate(inputs):
        parts = []
        for rows in torch.arange(len(given.hidden_TD)).split(256):
            context = _context([len(rows)], np.arange(len(rows)))
            hidden, ids, weights, _ = (each[rows] for each in given)
            shares = weights / weights.sum(-1, keepdim=True)
            pending = engine.experts.start(layer, hidden, ids, shares, context)
            parts.append(engine.experts.finish(pending, weights))
        outputs.append(torch.cat(parts))
    return outputs


def output_error(
    found: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[LayerInput]
) -> float:
    """Length of a token's error over that of its hidden state behind the layer, root of the mean
    square over tokens and layers."""
    shares = [
        float(((f - e).norm(dim=-1) / given.norms_T).square().mean())
        for f, e, given in zip(found, expected, inputs, strict=True)
    ]
    return (sum(shares) / len(shares)) ** 0.5
