"""Quantised weights as other tools store them: which tensors make one weight, and its values.

Read without packing: fp8 with scales of blocks, rows or tensors; GPTQ; compressed-tensors. A weight
is decoded in float32 each time it is read and rounded to what is asked for, bfloat16 as a rule; or
its codes go over into a form of quantization.py, which loses nothing (codes.py).
`quantization_config` is looked at here and nowhere else; every fault is a CheckpointError.

Legend: O outputs, K inputs, G groups of inputs, n values in an int32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Protocol

import torch
from torch import Tensor

from oled_moe.codes import (
    CodeGrid,
    CodesError,
    StoredCodes,
    StoredForm,
    common_form,
    hold,
    rows_of,
)
from oled_moe.errors import CheckpointError
from oled_moe.quantization import Quantized, QuantSpec, encode
from oled_moe.store import Encoding, ExpertLayout, FileSpan, Matrix, PlacedSpan
from oled_moe.tensor_files import TensorRecord

# What a decoded weight is where nobody asks for another dtype.
DECODED_DTYPE = torch.bfloat16
_ALIGNMENT = 64
READ_FORMATS = (
    "fp8 (weight and weight_scale_inv), gptq with 2, 4 or 8 bits, compressed-tensors with format "
    "pack-quantized, int-quantized, float-quantized or naive-quantized"
)


class Decoder(Protocol):
    """From the tensors of one weight, as they are stored, to its values float32 [O, K]; or to its
    codes, where `grid`, from headers alone, tells what they are and not why there are none."""

    def __call__(self, parts: Sequence[Tensor]) -> Tensor: ...

    def grid(self, parts: Sequence[TensorRecord]) -> CodeGrid | str: ...

    def codes(self, parts: Sequence[Tensor]) -> StoredCodes: ...


@dataclass(frozen=True, slots=True)
class EncodedRecord(TensorRecord):
    """A weight that is stored as several tensors; `dtype` and `shape` are those it is read as.

    `path` and `offset` are those of the first of `parts`.
    """

    parts: tuple[TensorRecord, ...] = ()
    decode: Decoder | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def read(self) -> Tensor:
        assert self.decode is not None
        parts = [part.read() for part in self.parts]
        return _decoded(self.decode, parts, f"{self.path}: {self.name}").to(self.dtype)


def _decoded(decode: Decoder, parts: Sequence[Tensor], where: str) -> Tensor:
    """A weight from its parts. Raises: CheckpointError that says where, if they make no numbers."""
    try:
        weight = decode(parts)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}; download it again") from None
    if not weight.isfinite().all():
        raise CheckpointError(
            f"{where} decodes to numbers that are not finite, so its scales are damaged; "
            "download it again"
        )
    return weight


def _check_groups(group_K: Tensor, num_groups: int) -> None:
    """Raises: CheckpointError where an input belongs to a group that has no scale."""
    if len(group_K) and not 0 <= int(group_K.min()) <= int(group_K.max()) < num_groups:
        raise CheckpointError(
            f"g_idx names a group that is not there; allowed: 0 to {num_groups - 1}"
        )


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One way of storing weights. `suffixes`: the tensors of a weight, the first always there;
    `make(name, parts)` checks them and says what they make; `hints` are read by it alone, `ignored`
    are of no use to weights."""

    words: str
    suffixes: tuple[str, ...]
    make: Callable[[str, Mapping[str, TensorRecord]], "tuple[tuple[int, int], Decoder]"]
    ignored: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


def decode_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, TensorRecord]
) -> tuple[dict[str, Any], dict[str, TensorRecord], str | None]:
    """A config without `quantization_config`, the tensors that it describes, and it in words.

    Raises: CheckpointError for a format, or a variant of one, that is not read.
    """
    plain, found = split_quantization(config)
    if found is None:
        return plain, dict(tensors), None
    decoded: dict[str, TensorRecord] = {}
    used: set[str] = set()
    for name, record in tensors.items():
        base = name.removesuffix(found.suffixes[0])
        is_first = base != name
        parts = {found.suffixes[0]: record}
        for suffix in (*found.suffixes[1:], *found.hints):
            if is_first and base + suffix in tensors:
                parts[suffix] = tensors[base + suffix]
        if not is_first or len(parts) == 1:
            continue
        if len(record.shape) != 2:
            raise CheckpointError(
                f"{record.path}: tensor {name!r:.200} stacks quantised experts, which this version "
                "does not read; allowed: one tensor for each matrix of an expert"
            )
        shape, decoder = found.make(name, parts)
        used.update(base + suffix for suffix in (*parts, *found.ignored))
        decoded[f"{base}.weight"] = EncodedRecord(
            f"{base}.weight",
            record.path,
            DECODED_DTYPE,
            shape,
            record.offset,
            prod(shape) * DECODED_DTYPE.itemsize,
            parts=tuple(part for end, part in parts.items() if end not in found.hints),
            decode=decoder,
        )
    rest = {name: record for name, record in tensors.items() if name not in used}
    if not decoded:
        raise CheckpointError(
            f"config.json: quantization_config says {found.words}, and no tensor is stored so; "
            "take the config.json that belongs to these weights"
        )
    return plain, {**rest, **decoded}, found.words


def split_quantization(config: Mapping[str, Any]) -> tuple[dict[str, Any], QuantFormat | None]:
    """A config without what it says of quantisation, and that."""
    plain = dict(config)
    settings = plain.pop("quantization_config", None)
    if settings is None:
        return plain, None
    if not isinstance(settings, Mapping):
        raise _refused(settings)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise _refused(f"quant_method {method!r:.80}")
    return plain, _METHODS[method](settings)


def _refused(what: object, hint: str = "") -> CheckpointError:
    return CheckpointError(
        f"config.json: quantization_config has {str(what)[:200]}, which this version does not "
        f"read; allowed: {hint or READ_FORMATS}; take another quantisation, or the checkpoint in "
        "bfloat16 and `oled-moe pack --dtype int4`"
    )


# Values and their scales


@dataclass(frozen=True, slots=True)
class ScaledDecoder:
    """Values [O, K] times scales, each of a block of values. A third part are zero points."""

    block: tuple[int, int]

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        values = _to_float32(parts[0])
        if len(parts) > 2:
            values -= _spread(parts[2].to(torch.float32), self.block, values.shape)
        return values.mul_(_spread(parts[1].to(torch.float32), self.block, values.shape))

    def grid(self, parts: Sequence[TensorRecord]) -> CodeGrid | str:
        if parts[0].dtype != torch.int8:
            return "they are floating-point numbers of 8 bits"
        size = _group_size(self.block[1], parts[0].shape[1])
        return CodeGrid(8, size, len(parts) < 3, parts[1].dtype)

    def codes(self, parts: Sequence[Tensor]) -> StoredCodes:
        shape = parts[0].shape
        zeros = _rows(parts[2], self.block, shape) if len(parts) > 2 else None
        return StoredCodes(
            parts[0],
            _rows(parts[1], self.block, shape),
            zeros,
            _group_size(self.block[1], shape[1]),
        )


def _to_float32(values: Tensor) -> Tensor:
    """As torch converts; fp8 by a table, which takes a twentieth of the time."""
    if values.dtype != torch.float8_e4m3fn:
        return values.to(torch.float32)
    table = torch.arange(256, dtype=torch.uint8).view(values.dtype).to(torch.float32)
    codes = values.view(torch.uint8).flatten().int()
    return table.index_select(0, codes).view(values.shape)


def _spread(scales: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """One number for each value [O, K], or less where it broadcasts."""
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    for axis, (size, length) in enumerate(zip(block, shape, strict=True)):
        if scales.shape[axis] not in (1, length):
            scales = scales.repeat_interleave(size, axis).narrow(axis, 0, length)
    return scales


def _group_size(size: int, num_inputs: int) -> int | None:
    """Inputs that share a scale; None where all of a row do."""
    return size if size < num_inputs else None


def _rows(each: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """One number for each output and group of inputs [O, G], from one for each block."""
    if each.numel() == 1:
        each = each.reshape(1, 1)
    if len(each) not in (1, shape[0]):
        each = each.repeat_interleave(block[0], 0)[: shape[0]]
    return each.expand(shape[0], -1)


def _check_scales(
    name: str, scales: TensorRecord, block: tuple[int, int], shape: tuple[int, int]
) -> None:
    """Raises: CheckpointError unless there is a scale for every block."""
    wanted = tuple(ceil(length / size) for length, size in zip(shape, block, strict=True))
    if prod(scales.shape) == 1 == prod(wanted):
        return
    if scales.shape != wanted:
        raise CheckpointError(
            f"{scales.path}: tensor {scales.name!r:.200} has shape {list(scales.shape)}, the "
            f"blocks of {name!r:.200} ask for {list(wanted)}; download both again"
        )


def _fp8(settings: Mapping[str, Any]) -> QuantFormat:
    """Source: quantization_config of DeepSeek-V3 and of Transformers' FineGrainedFP8Config."""
    block = settings.get("weight_block_size")
    if block is not None and not _is_block(block):
        raise _refused(f"weight_block_size {block!r:.80}", "two whole numbers, null")
    if settings.get("fmt", "e4m3") != "e4m3":
        raise _refused(f"fmt {settings['fmt']!r:.80}", "e4m3")

    def make(name: str, parts: Mapping[str, TensorRecord]) -> tuple[tuple[int, int], ScaledDecoder]:
        weight, scales = parts[".weight"], parts[".weight_scale_inv"]
        _check_dtype(weight, torch.float8_e4m3fn)
        shape = _pair(weight)
        size = shape if block is None else (block[0], block[1])
        _check_scales(name, scales, size, shape)
        return shape, ScaledDecoder(size)

    words = "fp8 (e4m3), " + (
        "a scale for each tensor" if block is None else f"blocks of {block[0]} x {block[1]}"
    )
    return QuantFormat(words, (".weight", ".weight_scale_inv"), make, (".input_scale",))


# GPTQ


@dataclass(frozen=True, slots=True)
class GptqDecoder:
    """qweight [K/n, O], qzeros [G, O/n], scales [G, O] and, as the case may be, g_idx [K]."""

    bits: int
    group_size: int
    zero_offset: int
    is_symmetric: bool
    is_reordered: bool

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        values_KO = _unpack(parts[0], self.bits, axis=0)
        zeros_GO = _unpack(parts[1], self.bits, axis=1) + self.zero_offset
        scales_GO = parts[2].to(torch.float32)
        group_K = torch.arange(len(values_KO)) // self.group_size
        if len(parts) > 3:
            group_K = parts[3].long()
        _check_groups(group_K, len(scales_GO))
        zeros_GO = zeros_GO[:, : values_KO.shape[1]]
        values_KO -= zeros_GO.index_select(0, group_K)
        return (values_KO * scales_GO.index_select(0, group_K)).T

    def grid(self, parts: Sequence[TensorRecord]) -> CodeGrid | str:
        size = self.group_size if parts[2].shape[0] > 1 else None
        if self.is_reordered and size is not None and len(parts) > 3:
            return "act-order has put inputs that are no neighbours into one group"
        return CodeGrid(self.bits, size, self.is_symmetric, parts[2].dtype)

    def codes(self, parts: Sequence[Tensor]) -> StoredCodes:
        codes_KO, middle = _unpack(parts[0], self.bits, axis=0), 1 << self.bits - 1
        zeros_GO = _unpack(parts[1], self.bits, axis=1)[:, : codes_KO.shape[1]] + self.zero_offset
        if len(parts) > 3:
            _check_order(parts[3], self.group_size)
        size = self.group_size if len(zeros_GO) > 1 else None
        return StoredCodes(codes_KO.T - middle, parts[2].T, zeros_GO.T - middle, size)


def _check_order(group_K: Tensor, group_size: int) -> None:
    """Raises: CheckpointError unless groups are of neighbours."""
    if not torch.equal(group_K.long(), torch.arange(len(group_K)) // group_size):
        raise CodesError("g_idx puts inputs that are no neighbours into one group")


def _gptq(settings: Mapping[str, Any]) -> QuantFormat:
    """Source: AutoGPTQ's and GPTQModel's QuantLinear; format gptq stores zero points less one."""
    bits, group_size = settings.get("bits"), settings.get("group_size", -1)
    if bits not in (2, 4, 8):
        raise _refused(f"gptq with bits {bits!r:.40}", "2, 4, 8")
    if type(group_size) is not int or (group_size < 1 and group_size != -1):
        raise _refused(f"group_size {group_size!r:.40}", "a whole number from 1, or -1")
    version = settings.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise _refused(f"checkpoint_format {version!r:.40}", "gptq, gptq_v2")
    num_packed = 32 // bits
    is_symmetric = settings.get("sym") is True
    # Static groups are of neighbours, whatever the order in which inputs were rounded.
    is_reordered = bool(settings.get("desc_act")) and not settings.get("static_groups")

    def make(name: str, parts: Mapping[str, TensorRecord]) -> tuple[tuple[int, int], GptqDecoder]:
        needed = {".qweight", ".qzeros", ".scales"} - parts.keys()
        if needed:
            raise CheckpointError(f"{name!r:.200} lacks {min(needed)}; download it again")
        rows, outputs = _pair(parts[".qweight"])
        inputs = rows * num_packed
        size = group_size if group_size > 0 else inputs
        num_groups = ceil(inputs / size)
        _check_dtype(parts[".qweight"], torch.int32)
        _check_dtype(parts[".qzeros"], torch.int32)
        _check_shape(parts[".qzeros"], (num_groups, ceil(outputs / num_packed)))
        _check_shape(parts[".scales"], (num_groups, outputs))
        if ".g_idx" in parts:
            _check_dtype(parts[".g_idx"], torch.int32)
            _check_shape(parts[".g_idx"], (inputs,))
        zero_offset = 1 if version == "gptq" else 0
        return (outputs, inputs), GptqDecoder(bits, size, zero_offset, is_symmetric, is_reordered)

    words = f"GPTQ, {bits} bits, " + (
        f"groups of {group_size}" if group_size > 0 else "one scale for each output"
    )
    return QuantFormat(words, (".qweight", ".qzeros", ".scales", ".g_idx"), make)


# compressed-tensors


@dataclass(frozen=True, slots=True)
class PackedDecoder:
    """weight_packed [O, K/n], weight_scale, and if there zero points [O/n, G], g_idx."""

    bits: int
    block: tuple[int, int]
    shape: tuple[int, int]
    has_zeros: bool
    has_groups: bool
    is_reordered: bool

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        middle = 1 << self.bits - 1
        values_OK = _unpack(parts[0], self.bits, axis=1)[:, : self.shape[1]] - middle
        scales_OG = parts[1].to(torch.float32)
        # All −1 is how compressed-tensors writes that inputs are in order.
        if self.has_groups and not (parts[-1] == -1).all():
            group_K = parts[-1].long()
            _check_groups(group_K, scales_OG.shape[1])
            return (values_OK - self._zeros(parts)[:, group_K]) * scales_OG[:, group_K]
        values_OK = values_OK.to(torch.float32)
        if self.has_zeros:
            values_OK -= _spread(self._zeros(parts).to(torch.float32), self.block, self.shape)
        return values_OK * _spread(scales_OG, self.block, self.shape)

    def grid(self, parts: Sequence[TensorRecord]) -> CodeGrid | str:
        size = _group_size(self.block[1], self.shape[1])
        if self.has_groups and self.is_reordered and size is not None:
            return "act-order has put inputs that are no neighbours into one group"
        return CodeGrid(self.bits, size, not self.has_zeros, parts[1].dtype)

    def codes(self, parts: Sequence[Tensor]) -> StoredCodes:
        codes_OK = _unpack(parts[0], self.bits, axis=1)[:, : self.shape[1]] - (1 << self.bits - 1)
        if self.has_groups and not (parts[-1] == -1).all():
            _check_order(parts[-1], self.block[1])
        zeros = _rows(self._zeros(parts), self.block, self.shape) if self.has_zeros else None
        size = _group_size(self.block[1], self.shape[1])
        return StoredCodes(codes_OK, _rows(parts[1], self.block, self.shape), zeros, size)

    def _zeros(self, parts: Sequence[Tensor]) -> Tensor:
        if not self.has_zeros:
            return torch.zeros(1, dtype=torch.int32).expand(parts[1].shape)
        middle = 1 << self.bits - 1
        return _unpack(parts[2], self.bits, axis=0)[: self.shape[0]] - middle


def _compressed(settings: Mapping[str, Any]) -> QuantFormat:
    """Source: the compressed-tensors project, compressors/quantized_compressors."""
    form = settings.get("format")
    scheme = _scheme(settings)
    bits, strategy = scheme.get("num_bits"), scheme.get("strategy")
    blocks = {
        "tensor": None,
        "channel": (1, 0),
        "group": (1, scheme.get("group_size")),
        "block": scheme.get("block_structure"),
    }
    if strategy not in blocks:
        raise _refused(f"strategy {strategy!r:.40}", ", ".join(blocks))
    block: Any = blocks[strategy]
    if strategy in ("group", "block") and not _is_block(block):
        raise _refused(f"{strategy} of {block!r:.40}", "whole numbers from 1")

    def size_of(shape: tuple[int, int]) -> tuple[int, int]:
        return shape if block is None else (block[0], block[1] or shape[1])

    if form == "pack-quantized":
        if bits not in (2, 4, 8) or scheme.get("type") != "int":
            raise _refused(f"{form} with {bits!r:.40} bits", "int with 2, 4 or 8 bits")
        # Groups by the weight's own order are of neighbours; older files say so by no order at all.
        is_reordered = scheme.get("actorder") not in ("weight", "static")
        return _pack_quantized(bits, str(strategy), size_of, block, is_reordered)
    if form in ("int-quantized", "float-quantized", "naive-quantized"):
        return _plain_quantized(str(form), str(strategy), size_of)
    raise _refused(
        f"compressed-tensors format {form!r:.40}",
        "pack-quantized, int-quantized, float-quantized, naive-quantized",
    )


def _scheme(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one way in which all weights are quantised."""
    groups = settings.get("config_groups")
    values = list(groups.values()) if isinstance(groups, Mapping) else []
    schemes = [group.get("weights") for group in values if isinstance(group, Mapping)]
    if len(schemes) != 1 or not isinstance(schemes[0], Mapping):
        raise _refused(f"{len(schemes)} config_groups of weights", "one")
    return schemes[0]


def _pack_quantized(
    bits: int,
    strategy: str,
    size_of: Callable[[tuple[int, int]], tuple[int, int]],
    block: Sequence[int] | None,
    is_reordered: bool,
) -> QuantFormat:
    num_packed = 32 // bits

    def make(name: str, parts: Mapping[str, TensorRecord]) -> tuple[tuple[int, int], PackedDecoder]:
        packed, scales = parts[".weight_packed"], parts.get(".weight_scale")
        if scales is None or ".weight_shape" not in parts:
            raise CheckpointError(f"{name!r:.200} lacks weight_scale or weight_shape")
        values = [int(value) for value in parts[".weight_shape"].read().flatten()]
        if len(values) != 2 or packed.shape != (values[0], ceil(values[1] / num_packed)):
            raise CheckpointError(
                f"{packed.path}: tensor {packed.name!r:.200} has shape {list(packed.shape)}, which "
                f"does not hold a weight of shape {values}; download it again"
            )
        _check_dtype(packed, torch.int32)
        shape = (values[0], values[1])
        size = size_of(shape)
        _check_scales(name, scales, size, shape)
        zeros, groups = parts.get(".weight_zero_point"), parts.get(".weight_g_idx")
        if zeros is not None:
            _check_dtype(zeros, torch.int32)
            _check_shape(zeros, (ceil(shape[0] / num_packed), *scales.shape[1:]))
        if groups is not None:
            _check_shape(groups, (shape[1],))
        has_zeros, has_groups = zeros is not None, groups is not None
        return shape, PackedDecoder(bits, size, shape, has_zeros, has_groups, is_reordered)

    words = f"compressed-tensors pack-quantized, {bits} bits, {_strategy_words(strategy, block)}"
    names = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx")
    return QuantFormat(words, names, make, hints=(".weight_shape",))


def _plain_quantized(
    form: str, strategy: str, size_of: Callable[[tuple[int, int]], tuple[int, int]]
) -> QuantFormat:
    def make(name: str, parts: Mapping[str, TensorRecord]) -> tuple[tuple[int, int], ScaledDecoder]:
        weight, scales = parts[".weight"], parts.get(".weight_scale")
        if scales is None:
            raise CheckpointError(f"{name!r:.200} lacks weight_scale; download it again")
        if weight.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise CheckpointError(
                f"{weight.path}: tensor {name!r:.200} is {weight.dtype}; allowed for {form}: I8, "
                "F8_E4M3"
            )
        shape = _pair(weight)
        _check_scales(name, scales, size_of(shape), shape)
        if ".weight_zero_point" in parts:
            _check_shape(parts[".weight_zero_point"], scales.shape)
        return shape, ScaledDecoder(size_of(shape))

    words = f"compressed-tensors {form}, a scale for each {strategy}"
    ignored = (".input_scale", ".input_zero_point")
    return QuantFormat(words, (".weight", ".weight_scale", ".weight_zero_point"), make, ignored)


def _strategy_words(strategy: str, block: Sequence[int] | None) -> str:
    return f"groups of {block[1]}" if strategy == "group" and block else f"by {strategy}"


_METHODS: dict[str, Callable[[Mapping[str, Any]], QuantFormat]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
}


def _unpack(packed: Tensor, bits: int, axis: int) -> Tensor:
    """Unsigned values of `bits` bits, lowest first, that lie in int32s along an axis."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed.unsqueeze(axis + 1) >> shifts.view(-1, *[1] * (packed.ndim - axis - 1))) & (
        (1 << bits) - 1
    )
    return values.flatten(axis, axis + 1)


def _is_block(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(size) is int and 0 < size < 2**31 for size in value)
    )


def _pair(record: TensorRecord) -> tuple[int, int]:
    return record.shape[0], record.shape[1]


def _check_dtype(record: TensorRecord, dtype: torch.dtype) -> None:
    if record.dtype != dtype:
        raise CheckpointError(
            f"{record.path}: tensor {record.name!r:.200} is {record.dtype}, quantization_config "
            f"asks for {dtype}; take the config.json that belongs to these weights"
        )


def _check_shape(record: TensorRecord, shape: tuple[int, ...]) -> None:
    if record.shape != shape:
        raise CheckpointError(
            f"{record.path}: tensor {record.name!r:.200} has shape {list(record.shape)}, "
            f"quantization_config asks for {list(shape)}; take the config.json that belongs to "
            "these weights"
        )


# Experts

# The tensors of a weight as they lie in a buffer.
Parts = Sequence[Tensor]


def stored_form(records: Sequence[TensorRecord]) -> StoredForm | str:
    """The form that keeps the codes of all these weights, or in words why none does."""
    grids: set[CodeGrid] = set()
    for record in records:
        if not isinstance(record, EncodedRecord) or record.decode is None:
            return "not all of them are quantised"
        grid = record.decode.grid(record.parts)
        if isinstance(grid, str):
            return grid
        grids.add(grid)
    return common_form(grids) if grids else "there are none"


@dataclass(frozen=True, slots=True)
class _Piece:
    """One matrix of an expert as it lies in a store's buffer."""

    matrix: Matrix
    decode: Decoder | None
    parts: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]


def place_encoded(
    layout: ExpertLayout, owners: Mapping[tuple[int, int, Matrix], TensorRecord]
) -> tuple[Encoding, list[list[list[PlacedSpan]]]]:
    """How a store reads experts that are encoded, each in its own way.

    Where `layout` is quantised slots hold the codes that are stored, else their values. `owners`:
    the record of each matrix (layer, expert, matrix), of that alone or of all experts of the layer.
    """
    num_layers = 1 + max(layer for layer, _, _ in owners)
    num_experts = 1 + max(expert for _, expert, _ in owners)
    num_bytes = 0
    # Few forms are different; most experts share one.
    known: dict[tuple[_Piece, ...], tuple[_Piece, ...]] = {}
    forms: list[list[tuple[_Piece, ...]]] = []
    spans: list[list[list[PlacedSpan]]] = []
    for layer in range(num_layers):
        forms.append([])
        spans.append([])
        for expert in range(num_experts):
            pieces, placed, end = _place_one(layer, expert, owners)
            forms[-1].append(known.setdefault(pieces, pieces))
            spans[-1].append(placed)
            num_bytes = max(num_bytes, end)

    def pieces_of(layer: int, expert: int, buffer: Tensor) -> Iterator[tuple[_Piece, Parts, str]]:
        for piece in forms[layer][expert]:
            parts = [
                buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for dtype, shape, start in piece.parts
            ]
            where = f"layer {layer}, expert {expert} (counting MoE layers from 0): {piece.matrix}"
            yield piece, parts, where

    def decode(layer: int, expert: int, buffer: Tensor, slot: Tensor) -> None:
        gate_up, down = layout.views(slot)
        middle = layout.intermediate_size
        targets = {"gate": gate_up[:middle], "up": gate_up[middle:], "down": down}
        targets["gate_up"] = gate_up
        for piece, parts, where in pieces_of(layer, expert, buffer):
            weight = parts[0] if piece.decode is None else _decoded(piece.decode, parts, where)
            targets[piece.matrix].copy_(weight)

    def keep_codes(layer: int, expert: int, buffer: Tensor, slot: Tensor) -> None:
        assert layout.quant is not None
        gate, up, down = layout.packed_views(slot)
        targets = {"gate": (gate,), "up": (up,), "gate_up": (gate, up), "down": (down,)}
        for piece, parts, where in pieces_of(layer, expert, buffer):
            assert piece.decode is not None
            held = _held(piece.decode, parts, layout.quant, where)
            num_rows = len(held.codes_OK) // len(targets[piece.matrix])
            for i, target in enumerate(targets[piece.matrix]):
                rows = slice(i * num_rows, (i + 1) * num_rows)
                target.copy_(encode(rows_of(held, rows), layout.quant))

    return Encoding(num_bytes, decode if layout.quant is None else keep_codes), spans


def _held(decode: Decoder, parts: Parts, spec: QuantSpec, where: str) -> Quantized:
    """The codes of a weight in a form. Raises: CheckpointError that says where, if it has none."""
    try:
        return hold(decode.codes(parts), spec)
    except CodesError as error:
        raise CheckpointError(
            f"{where}: {error}, which {spec} does not hold; pack it with --dtype bf16, or with "
            "--dtype int4 --method searched to have it rounded anew"
        ) from None


def _place_one(
    layer: int, expert: int, owners: Mapping[tuple[int, int, Matrix], TensorRecord]
) -> tuple[tuple[_Piece, ...], list[PlacedSpan], int]:
    """The matrices of an expert, where their bytes come from, and how many these are."""
    records: dict[Matrix, TensorRecord] = {
        "gate": owners[layer, expert, "gate"],
        "up": owners[layer, expert, "up"],
        "down": owners[layer, expert, "down"],
    }
    if records["gate"] is records["up"]:
        records = {"gate_up": records["gate"], "down": records["down"]}
    pieces, placed, end = [], [], 0
    for matrix, record in records.items():
        decode = record.decode if isinstance(record, EncodedRecord) else None
        parts = []
        for source in record.parts if isinstance(record, EncodedRecord) else (record,):
            shape, offset = source.shape, source.offset
            # All experts of a layer, one after another.
            if len(record.shape) == 3:
                shape = shape[1:]
                offset += expert * prod(shape) * source.dtype.itemsize
            size = prod(shape) * source.dtype.itemsize
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + size
            parts.append((source.dtype, shape, start))
            placed.append((FileSpan(source.path, offset, size), start))
        pieces.append(_Piece(matrix, decode, tuple(parts)))
    return tuple(pieces), placed, end
