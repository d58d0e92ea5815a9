"""What the demo model's experts are given while it answers questions that it was trained with, and
packs of it whose experts were rounded by any way of methods.py.

Legend: T tokens, D hidden, F hidden of one expert, K inputs of a matrix.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from oled_moe.model_paths import find_model
from oled_moe.pack_writer import open_journal, write_pack
from oled_moe.packing import plan_pack
from oled_moe.quantization import QuantSpec, encode
from oled_moe.store import ExpertLayout, memory_of

measures = importlib.import_module("experiments.10_quantisation.measures")
methods = importlib.import_module("experiments.10_quantisation.methods")

MATRICES = ("gate", "up", "down")
# Of an expert: what gate and up were given, then what down was given.
Statistics = dict[tuple[int, int], tuple[Any, Any]]


def matrices() -> dict[tuple[int, int], list[Tensor]]:
    """Gate, up and down of each (MoE layer, expert) of the demo model, fp32."""
    tensors = load_file(find_model("demo") / "model.safetensors")
    config = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    num_experts = sum("layers.1.mlp.experts." in name and "gate" in name for name in tensors)
    num_layers = sum("experts.0.gate" in name for name in tensors)
    return {
        (layer, expert): [
            tensors[config.format(layer + 1, expert, each)].float() for each in MATRICES
        ]
        for layer in range(num_layers)
        for expert in range(num_experts)
    }


def statistics_of(num_questions: int, seed: int = 0) -> Statistics:
    """Of all experts, over the canvases of bfloat16's answers to training questions."""
    records, probe = measures.calibrating(num_questions, seed), measures.LayerInputs()
    with measures.open_engine("demo") as engine:
        answers = measures.answer_all(engine, records)
        measures.logits_of(engine, list(measures.canvases(engine, records, answers)), probe)
    return _statistics(matrices(), probe.joined())


def _statistics(weights: dict[tuple[int, int], list[Tensor]], inputs: Sequence[Any]) -> Statistics:
    found: Statistics = {}
    for layer, given in enumerate(inputs):
        hidden = given.hidden_TD.float()
        layer_DD = hidden.T @ hidden / len(hidden)
        own: dict[int, tuple[int, Tensor, Tensor]] = {}
        experts = [expert for at, expert in weights if at == layer]
        for expert in experts:
            gate, up, _ = weights[layer, expert]
            rows = hidden[(given.ids_TK == expert).any(1)]
            inner = F.silu(rows @ gate.T) * (rows @ up.T)
            own[expert] = len(rows), rows.T @ rows, inner.T @ inner
        width = weights[layer, experts[0]][2].shape[1]
        num_rows = sum(count for count, _, _ in own.values())
        squares = sum(float(inner.diagonal().sum()) for _, _, inner in own.values())
        layer_FF = torch.eye(width) * squares / (num_rows * width)
        for expert, (count, outer, inner) in own.items():
            found[layer, expert] = (
                methods.Seen(count, outer, layer_DD),
                methods.Seen(count, inner, layer_FF),
            )
    return found


def write_quantized(out: Path, form: str, method: str, statistics: Statistics | None) -> None:
    """A pack of the demo model as `oled-moe pack` writes it, its experts rounded by `method`;
    calibrated ones need statistics."""
    spec, weights = QuantSpec.parse(form), matrices()
    job = plan_pack(find_model("demo"), form)
    files = [job.files[0]]
    for layer, file in enumerate(job.files[1:]):
        pieces = []
        for expert, piece in enumerate(file.pieces):
            key = layer, expert
            seen = (None, None) if statistics is None else statistics[key]
            make = _slot_maker(job.layout, spec, method, weights[key], seen)
            pieces.append(piece._replace(make=make))
        files.append(replace(file, pieces=tuple(pieces)))
    job = replace(job, files=tuple(files), method=method)
    try:
        with open_journal(out, job) as journal:
            write_pack(job, out, journal, None, None, 1)
    finally:
        job.close()


def _slot_maker(
    layout: ExpertLayout,
    spec: QuantSpec,
    method: str,
    weights: Sequence[Tensor],
    seen: tuple[Any, Any],
) -> Callable[[], memoryview]:
    def make() -> memoryview:
        slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
        given = (seen[0], seen[0], seen[1])
        views = layout.packed_views(slot)
        for target, weight, inputs in zip(views, weights, given, strict=True):
            target.copy_(encode(methods.quantized_by(method, weight, spec, inputs), spec))
        return memory_of(slot)

    return make
