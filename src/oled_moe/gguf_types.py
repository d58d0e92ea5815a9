"""The number types of GGUF files: how many bytes a block of values takes, and its values.

Each type is decoded in float32 by the same operations, in the same order, as the project that
defines it, so the values are the same to the bit.
Source: llama.cpp, ggml/src/ggml-common.h (the blocks) and gguf-py/gguf/quants.py (the order).

Legend: N blocks, B bytes of a block, V values of a block, O outputs, K inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oled_moe.codes import CodeGrid, StoredCodes
from oled_moe.tensor_files import TensorRecord

# From blocks uint8 [N, B] to values float32 [N, V], or to codes, whole numbers around 0 [N, V].
BlockDecoder = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class GgufType:
    """A type of number. `dtype`: what it is to torch; without one, `decode` makes it values, or
    `codes` of `bits` bits, each to be multiplied with the half with which its block begins."""

    name: str
    block_values: int
    block_bytes: int
    dtype: torch.dtype | None = None
    decode: BlockDecoder | None = None
    codes: BlockDecoder | None = None
    bits: int = 0


@dataclass(frozen=True, slots=True)
class GgufDecoder:
    """Rows of blocks, uint8 [O, bytes of a row], to values float32 [O, K]."""

    type: GgufType

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        rows = parts[0]
        if self.type.dtype is not None:
            return rows.view(self.type.dtype).to(torch.float32)
        blocks = rows.reshape(-1, self.type.block_bytes)
        if self.type.codes is not None:
            values = self.type.codes(blocks).to(torch.float32).mul_(_halves(blocks, 0))
        else:
            assert self.type.decode is not None
            values = self.type.decode(blocks)
        return values.view(len(rows), -1)

    def grid(self, parts: Sequence[TensorRecord]) -> CodeGrid | str:
        if self.type.dtype is not None:
            return f"some are {self.type.name}, plain numbers"
        if self.type.codes is None:
            return f"{self.type.name} has minima beside its scales, or scales of 16 values"
        return CodeGrid(self.type.bits, self.type.block_values, True, torch.float16)

    def codes(self, parts: Sequence[Tensor]) -> StoredCodes:
        assert self.type.codes is not None
        num_outputs = len(parts[0])
        blocks = parts[0].reshape(-1, self.type.block_bytes)
        return StoredCodes(
            self.type.codes(blocks).view(num_outputs, -1),
            _halves(blocks, 0).view(num_outputs, -1),
            None,
            self.type.block_values,
        )


def _halves(blocks: Tensor, start: int) -> Tensor:
    """A float16 of each block: float32 [N, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _parts(fields: Tensor, count: int, length: int) -> Tensor:
    """What each block has, in parts: [N, count, length]."""
    return fields.reshape(len(fields), count, length)


def _shifted(fields: Tensor, bits: int, count: int) -> Tensor:
    """`count` numbers of `bits` bits from each byte [N, G, L], low bits first: [N, G, count, L]."""
    shifts = torch.arange(0, bits * count, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    return (fields.unsqueeze(2) >> shifts) & ((1 << bits) - 1)


def _nibbles(blocks: Tensor, start: int, group: int) -> Tensor:
    """The bytes from `start` on, `group` at a time: the low halves of these, then the high."""
    return _shifted(_parts(blocks[:, start:], -1, group), 4, 2).flatten(1)


def _high_bits(blocks: Tensor, start: int) -> Tensor:
    """32 bits of a block, one for each of its 32 values: [N, 32]."""
    fields = blocks[:, start : start + 4].unsqueeze(2)
    return ((fields >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks, 2, 16).to(torch.int8).sub_(8)


def _q4_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks, 4, 16).to(torch.float32)
    return values.mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks, 6, 16) | (_high_bits(blocks, 2) << 4)
    return codes.to(torch.int8).sub_(16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks, 8, 16) | (_high_bits(blocks, 4) << 4)
    return codes.to(torch.float32).mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    codes = _shifted(_parts(blocks[:, 16:80], 2, 32), 2, 4)
    scale = _halves(blocks, 80) * (scales & 15).to(torch.float32)
    least = _halves(blocks, 82) * (scales >> 4).to(torch.float32)
    return _affine(codes, scale, least)


def _q3_k(blocks: Tensor) -> Tensor:
    # Of each scale's six bits four lie in the first eight bytes, two in the last four.
    low = _shifted(blocks[:, 96:104].unsqueeze(1), 4, 2).flatten(1)
    high = _shifted(blocks[:, 104:108].unsqueeze(1), 2, 4).flatten(1)
    scale = _halves(blocks, 108) * ((low | (high << 4)).to(torch.float32) - 32)
    codes = _shifted(_parts(blocks[:, 32:96], 2, 32), 2, 4).flatten(1)
    # A bit that is not set takes four away.
    bits = _shifted(blocks[:, :32].unsqueeze(1), 1, 8).flatten(1)
    values = (codes | (bits << 2)).to(torch.float32).sub_(4)
    return _parts(values, 16, 16).mul_(scale.unsqueeze(2)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, least = _six_bits(blocks)
    return _affine(_nibbles(blocks, 16, 32), scale, least)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, least = _six_bits(blocks)
    bits = _shifted(blocks[:, 16:48].unsqueeze(1), 1, 8).flatten(1)
    return _affine(_nibbles(blocks, 48, 32) | (bits << 4), scale, least)


def _q6_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    low = _nibbles(blocks[:, :128], 0, 64)
    high = _shifted(_parts(blocks[:, 128:192], 2, 32), 2, 4).flatten(1)
    values = (low | (high << 4)).to(torch.float32).sub_(32)
    scale = _halves(blocks, 208) * scales
    return _parts(values, 16, 16).mul_(scale.unsqueeze(2)).flatten(1)


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the eight parts of a block, each of six bits, times its two halves."""
    first, second, both = _parts(blocks[:, 4:16], 3, 4).unbind(1)
    scales = torch.cat([first & 63, (both & 15) | ((first >> 2) & 48)], 1)
    least = torch.cat([second & 63, (both >> 4) | ((second >> 2) & 48)], 1)
    return (
        _halves(blocks, 0) * scales.to(torch.float32),
        _halves(blocks, 2) * least.to(torch.float32),
    )


def _affine(codes: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Codes of 256 values times the scales [N, S] of their parts, less these parts' minima."""
    values = _parts(codes.to(torch.float32), scale.shape[1], -1)
    return values.mul_(scale.unsqueeze(2)).sub_(least.unsqueeze(2)).flatten(1)


# By the number that stands for a type in a file.
TYPES: dict[int, GgufType] = {
    0: GgufType("F32", 1, 4, torch.float32),
    1: GgufType("F16", 1, 2, torch.float16),
    2: GgufType("Q4_0", 32, 18, codes=_q4_0, bits=4),
    3: GgufType("Q4_1", 32, 20, decode=_q4_1),
    6: GgufType("Q5_0", 32, 22, codes=_q5_0, bits=5),
    7: GgufType("Q5_1", 32, 24, decode=_q5_1),
    8: GgufType("Q8_0", 32, 34, codes=_q8_0, bits=8),
    10: GgufType("Q2_K", 256, 84, decode=_q2_k),
    11: GgufType("Q3_K", 256, 110, decode=_q3_k),
    12: GgufType("Q4_K", 256, 144, decode=_q4_k),
    13: GgufType("Q5_K", 256, 176, decode=_q5_k),
    14: GgufType("Q6_K", 256, 210, decode=_q6_k),
    30: GgufType("BF16", 1, 2, torch.bfloat16),
}
# Known by name and not read.
OTHER_TYPES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
