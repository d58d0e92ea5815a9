"""Writes checkpoints as tools that quantise do, by their layouts, and says what they stand for."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoints import synthetic_llada2, write_checkpoint
from torch import Tensor

CONFIG = {
    "model_type": "llada2_moe",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "vocab_size": 40,
    "mask_token_id": 37,
}
# From a weight [O, K] to its tensors by the ends of their names, and the values they stand for.
Writer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def is_quantised(name: str) -> bool:
    """As tools do it: linear layers but for router, embeddings and head."""
    return name.endswith(("_proj.weight", "attention.dense.weight"))


def to_int32(codes: Tensor, bits: int, axis: int) -> Tensor:
    """Codes along an axis, the first in the lowest bits; filled up with zeros."""
    rows = codes if axis == 0 else codes.T
    num_packed = 32 // bits
    packed = []
    for start in range(0, len(rows), num_packed):
        word = torch.zeros(rows.shape[1], dtype=torch.int64)
        for i, row in enumerate(rows[start : start + num_packed]):
            word += row.long() << bits * i
        packed.append(torch.where(word >= 2**31, word - 2**32, word))
    whole = torch.stack(packed).int()
    return (whole if axis == 0 else whole.T).contiguous()


def gptq(
    bits: int,
    group_size: int,
    *,
    is_v2: bool = False,
    order: bool = False,
    is_symmetric: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> Writer:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        size = inputs if group_size < 0 else group_size
        most = 2**bits - 1
        # With act-order neighbours are of different groups.
        group = torch.arange(inputs) // size
        if order:
            group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
        num_groups = -(-inputs // size)
        scales = torch.zeros(num_groups, outputs, dtype=scale_dtype)
        zeros = torch.full((num_groups, outputs), 2 ** (bits - 1), dtype=torch.int32)
        for g in range(num_groups):
            columns = weight[:, group == g].float()
            if is_symmetric:
                scales[g] = columns.abs().amax(1).clamp(min=1e-3) * 2 / most
                continue
            scales[g] = (columns.amax(1) - columns.amin(1)).clamp(min=1e-3) / most
            zeros[g] = (-columns.amin(1) / scales[g].float()).round().clamp(1, most)
        codes = (weight.float().T / scales.float()[group] + zeros[group]).round().clamp(0, most)
        values = (codes - zeros[group]) * scales.float()[group]
        stored_zeros = zeros if is_v2 else zeros - 1
        tensors = {
            ".qweight": to_int32(codes, bits, 0),
            ".qzeros": to_int32(stored_zeros, bits, 1),
            ".scales": scales,
            ".g_idx": group.int(),
        }
        return tensors, values.T

    return write


def compressed(
    bits: int, group_size: int | None, *, has_zeros: bool = False, order: bool = False
) -> Writer:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        size = group_size or inputs
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        group = torch.arange(inputs) // size
        if order:
            group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(2))]
        num_groups = -(-inputs // size)
        scales = torch.zeros(outputs, num_groups, dtype=torch.bfloat16)
        zeros = torch.zeros(outputs, num_groups, dtype=torch.int32)
        for g in range(num_groups):
            columns = weight[:, group == g].float()
            scales[:, g] = columns.abs().amax(1).clamp(min=1e-3) / high
            if has_zeros:
                zeros[:, g] = torch.arange(outputs) % 5 - 2
        wide = scales.float()[:, group]
        codes = (weight.float() / wide + zeros[:, group]).round().clamp(low, high)
        tensors = {
            ".weight_packed": to_int32(codes - low, bits, 1),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([outputs, inputs]),
        }
        if has_zeros:
            tensors[".weight_zero_point"] = to_int32(zeros - low, bits, 0)
        if order:
            tensors[".weight_g_idx"] = group.int()
        return tensors, (codes - zeros[:, group]) * wide

    return write


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    codes = (weight.float() / scales.float()).round().clamp(-128, 127)
    return {".weight": codes.to(torch.int8), ".weight_scale": scales}, codes * scales.float()


def fp8(block: tuple[int, int] | None, suffix: str = ".weight_scale_inv") -> Writer:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = block or weight.shape
        num_rows, num_columns = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(num_rows, num_columns)
        values = torch.zeros(weight.shape)
        for r in range(num_rows):
            for c in range(num_columns):
                place = (
                    slice(r * rows, r * rows + rows),
                    slice(c * columns, c * columns + columns),
                )
                scales[r, c] = weight[place].float().abs().max().clamp(min=1e-6) / 448
                codes[place] = (weight[place].float() / scales[r, c]).to(torch.float8_e4m3fn)
                values[place] = codes[place].float() * scales[r, c]
        stored = scales if block else scales.reshape(())
        return {".weight": codes, suffix: stored}, values

    return write


def gptq_config(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def packed_config(bits: int, **more: Any) -> dict[str, Any]:
    return compressed_config("pack-quantized", num_bits=bits, type="int", **more)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 12]}
GROUP8 = {"strategy": "group", "group_size": 8}
CASES: dict[str, tuple[Writer, dict[str, Any]]] = {
    "fp8 blocks": (fp8((8, 12)), FP8),
    "fp8 tensors": (fp8(None), FP8 | {"weight_block_size": None}),
    "gptq": (gptq(4, 8), gptq_config(4, 8)),
    "gptq 8 bits rows": (gptq(8, -1), gptq_config(8, -1)),
    "gptq 2 bits": (gptq(2, 8), gptq_config(2, 8)),
    "gptq v2": (gptq(4, 8, is_v2=True), gptq_config(4, 8, checkpoint_format="gptq_v2")),
    "gptq order": (gptq(4, 8, order=True), gptq_config(4, 8, desc_act=True)),
    "compressed": (compressed(4, 8), packed_config(4, **GROUP8)),
    "compressed rows": (compressed(4, None), packed_config(4, strategy="channel")),
    "compressed zeros": (compressed(4, 8, has_zeros=True), packed_config(4, **GROUP8)),
    "compressed order": (compressed(4, 8, order=True), packed_config(4, **GROUP8)),
    "compressed order and zeros": (
        compressed(4, 8, has_zeros=True, order=True),
        packed_config(4, **GROUP8),
    ),
    "compressed 8 bits": (compressed(8, 8), packed_config(8, **GROUP8)),
    "compressed int8": (
        int8,
        compressed_config("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "compressed fp8 blocks": (
        fp8((8, 8), ".weight_scale"),
        compressed_config(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[8, 8]
        ),
    ),
    "compressed fp8 tensors": (
        fp8(None, ".weight_scale"),
        compressed_config("naive-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
}


def write(
    path: Path, case: str, change: Callable[[dict[str, Tensor]], object] = lambda _: None
) -> dict[str, Tensor]:
    """Write the checkpoint of a case; returns what its weights are."""
    return write_quantised(path, *CASES[case], CONFIG, change)


def write_quantised(
    path: Path,
    writer: Writer,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    change: Callable[[dict[str, Tensor]], object] = lambda _: None,
) -> dict[str, Tensor]:
    """Write a checkpoint whose linear layers are quantised; returns what its weights are."""
    tensors, values = {}, {}
    for name, weight in synthetic_llada2(config, dtype=torch.bfloat16, seed=4).items():
        if not is_quantised(name):
            tensors[name] = values[name] = weight
            continue
        parts, values[name] = writer(weight)
        tensors.update({name.removesuffix(".weight") + end: part for end, part in parts.items()})
    change(tensors)
    write_checkpoint(path, tensors, {**config, "quantization_config": settings})
    return values
