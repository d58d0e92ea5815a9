"""Weights as small whole numbers: which forms there are, how they lie in memory, and the plain way
in and out of them.

A weight is (code - zero) · scale, with one scale, and where asymmetric one zero, for every group of
a row. A row shorter than a group is one group, and so is what is left at a row's end. The bytes
below are what kernels read, on any processor.

Legend: O outputs (rows of the matrix), K inputs, G groups of a row, P panels of 32 outputs.

    matrix | panel 0 | panel 1 | ..            outputs are padded to whole panels
    panel  | group 0 | group 1 | ..
    group  | scales bf16 [32] | zeros uint8 [32], where asymmetric | words uint32 [steps, 32] |
    word   codes of one output, the first in the lowest bits: 4 of int8, 8 of int4; all unsigned
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oled_moe.errors import CheckpointError, ConfigError

# Raised with every change of the bytes described above.
LAYOUT_VERSION = 1
# Outputs of a panel, and bytes of one word of each.
PANEL = 32
_STEP_BYTES = PANEL * 4
GROUP_SIZES = (32, 64, 128)
# Shares of a group's range that are tried.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
# What `QuantSpec.parse` takes.
FORM_WORDS = "int8 or int4, then -row, -g32, -g64 or -g128, then -asym, as in int4-g64-asym"
_FORM = re.compile(r"int([48])(?:-(row|g\d+))?(-asym)?")


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """A form of quantised weights. `group_size` None: one group a row; `is_symmetric`: zero is in
    the middle of the codes.

    Raises: ConfigError for a form that no kernel reads.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ConfigError(f"bits is {self.bits}; allowed: 4, 8")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            allowed = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(
                f"group_size is {self.group_size}; allowed: {allowed}, or None for whole rows"
            )

    @classmethod
    def parse(cls, text: str) -> "QuantSpec":
        """The form that `str` wrote; `int8` and `int4` alone are the defaults.

        Raises: ConfigError for any other text.
        """
        if text in DEFAULT_SPECS:
            return DEFAULT_SPECS[text]
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(f"{text!r} is no quantised form; allowed: {FORM_WORDS}")
        bits, group, asymmetric = found.groups()
        if group is None:
            default = DEFAULT_SPECS[f"int{bits}"]
            return cls(default.bits, default.group_size, is_symmetric=not asymmetric)
        group_size = None if group == "row" else int(group[1:])
        return cls(int(bits), group_size, is_symmetric=not asymmetric)

    def __str__(self) -> str:
        group = "row" if self.group_size is None else f"g{self.group_size}"
        return f"int{self.bits}-{group}{'' if self.is_symmetric else '-asym'}"

    @property
    def middle(self) -> int:
        """The zero of symmetric codes."""
        return 1 << (self.bits - 1)

    @property
    def codes_of_word(self) -> int:
        return 32 // self.bits

    @property
    def header_bytes(self) -> int:
        """Bytes of the scales and zeros of a group in a panel."""
        return PANEL * (2 if self.is_symmetric else 3)

    def group_length(self, num_inputs: int) -> int:
        """Weights of a whole group in rows of `num_inputs`."""
        return num_inputs if self.group_size is None else min(self.group_size, num_inputs)

    def num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // self.group_length(num_inputs))

    def group_bytes(self, num_weights: int) -> int:
        """Bytes of a group of `num_weights` of each output, in a panel."""
        return self.header_bytes + -(-num_weights // self.codes_of_word) * _STEP_BYTES

    def panel_bytes(self, num_inputs: int) -> int:
        """Bytes of 32 rows of `num_inputs`."""
        length = self.group_length(num_inputs)
        num_whole, rest = divmod(num_inputs, length)
        return num_whole * self.group_bytes(length) + (self.group_bytes(rest) if rest else 0)


DEFAULT_SPECS = {"int8": QuantSpec(8, None), "int4": QuantSpec(4, 64)}


def default_spec(name: str) -> QuantSpec:
    """What `int8` and `int4` mean. Raises: ConfigError for another name."""
    if name not in DEFAULT_SPECS:
        raise ConfigError(f"{name!r} is no quantised dtype; allowed: {', '.join(DEFAULT_SPECS)}")
    return DEFAULT_SPECS[name]


def matrix_bytes(spec: QuantSpec, num_outputs: int, num_inputs: int) -> int:
    """Bytes of a quantised matrix [O, K]."""
    return -(-num_outputs // PANEL) * spec.panel_bytes(num_inputs)


class Quantized(NamedTuple):
    """A quantised matrix in the open. Shapes: codes uint8 [O, K]; scales bf16 [O, G]; zeros uint8
    [O, G], None where symmetric."""

    codes_OK: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None


def quantize(weight_OK: Tensor, spec: QuantSpec, method: str = "searched") -> Tensor:
    """The packed form of a matrix, uint8 [matrix_bytes], by one of `METHODS`.

    Raises: CheckpointError where weights are not finite; ConfigError for another method.
    """
    if method not in METHODS:
        raise ConfigError(f"{method!r} is no way to quantise; allowed: {', '.join(METHODS)}")
    return encode(METHODS[method](weight_OK, spec), spec)


def dequantize(packed: Tensor, spec: QuantSpec, num_outputs: int, num_inputs: int) -> Tensor:
    """The weights that a packed matrix stands for, exact in fp32 [O, K]; what kernels are compared
    with."""
    return weights_of(decode(packed, spec, num_outputs, num_inputs), spec)


def weights_of(parts: Quantized, spec: QuantSpec) -> Tensor:
    """(code - zero) · scale in fp32 [O, K]."""
    num_inputs = parts.codes_OK.shape[1]
    length = spec.group_length(num_inputs)

    def spread(each_OG: Tensor) -> Tensor:
        return each_OG.float().repeat_interleave(length, dim=1)[:, :num_inputs]

    zeros = spec.middle if parts.zeros_OG is None else spread(parts.zeros_OG)
    return (parts.codes_OK.float() - zeros) * spread(parts.scales_OG)


def round_to_nearest(weight_OK: Tensor, spec: QuantSpec) -> Quantized:
    """Scales by the range of each group, then the nearest codes."""
    groups_OGL = grouped(weight_OK, spec)
    most = 2**spec.bits - 1
    if spec.is_symmetric:
        scales = groups_OGL.abs().amax(-1) / (spec.middle - 1)
        return nearest(weight_OK, spec, scales, None)
    # Zero is among the weights, so that it is among the codes.
    low, high = groups_OGL.amin(-1).clamp(max=0), groups_OGL.amax(-1).clamp(min=0)
    scales = ((high - low) / most).to(torch.bfloat16).float()
    zeros = torch.where(scales > 0, (-low / scales).round(), 0).clamp(0, most)
    return nearest(weight_OK, spec, scales, zeros)


def searched(weight_OK: Tensor, spec: QuantSpec) -> Quantized:
    """Of some ranges for each group, the one with the smallest sum of squared errors.

    A smaller range cuts the largest weights off and has finer steps for all others. A symmetric
    range has one code more below zero than above: which side gets it is tried too.
    """
    weight = weight_OK.float()
    best = round_to_nearest(weight, spec)
    if spec.bits == 8:
        # Steps are so fine that nothing is to be gained by cutting off.
        return best
    least_OG = _squared_errors(weight, best, spec)
    first = best.scales_OG.float()
    if spec.is_symmetric:
        groups_OGL = grouped(weight, spec)
        low, high = groups_OGL.amin(-1), groups_OGL.amax(-1)
        first = torch.where(-low >= high, 1.0, -1.0) * torch.maximum(-low, high) / spec.middle
    zeros_OG = None if best.zeros_OG is None else best.zeros_OG.float()
    for share in _SHARES:
        found = nearest(weight, spec, first * share, zeros_OG)
        errors_OG = _squared_errors(weight, found, spec)
        is_better = errors_OG < least_OG
        least_OG = torch.where(is_better, errors_OG, least_OG)
        best = chosen(is_better, found, best, spec)
    return best


def errors_of(weight_OK: Tensor, parts: Quantized, spec: QuantSpec) -> Tensor:
    """|error| of quantised weights, by groups [O, G, L]."""
    return grouped(weight_OK.float() - weights_of(parts, spec), spec).abs()


def _squared_errors(weight_OK: Tensor, parts: Quantized, spec: QuantSpec) -> Tensor:
    return errors_of(weight_OK, parts, spec).square().sum(-1)


def chosen(is_first_OG: Tensor, first: Quantized, other: Quantized, spec: QuantSpec) -> Quantized:
    """Group by group one of two."""
    num_inputs = first.codes_OK.shape[1]
    each_OK = is_first_OG.repeat_interleave(spec.group_length(num_inputs), dim=1)[:, :num_inputs]
    zeros_OG = None
    if first.zeros_OG is not None and other.zeros_OG is not None:
        zeros_OG = torch.where(is_first_OG, first.zeros_OG, other.zeros_OG)
    return Quantized(
        torch.where(each_OK, first.codes_OK, other.codes_OK),
        torch.where(is_first_OG, first.scales_OG, other.scales_OG),
        zeros_OG,
    )


def nearest(
    weight_OK: Tensor, spec: QuantSpec, scales_OG: Tensor, zeros_OG: Tensor | None
) -> Quantized:
    """The nearest codes for given scales and zeros; scales are rounded to bf16 first."""
    scales_OG = scales_OG.to(torch.bfloat16)
    scales = scales_OG.float()[..., None]
    zeros = spec.middle if zeros_OG is None else zeros_OG[..., None]
    groups_OGL = grouped(weight_OK, spec)
    codes = torch.where(scales != 0, groups_OGL / scales, 0).round() + zeros
    codes_OK = codes.clamp(0, 2**spec.bits - 1).flatten(1)[:, : weight_OK.shape[1]]
    return Quantized(
        codes_OK.to(torch.uint8),
        scales_OG,
        None if zeros_OG is None else zeros_OG.to(torch.uint8),
    )


def grouped(weight_OK: Tensor, spec: QuantSpec) -> Tensor:
    """The weights by groups in fp32 [O, G, L]; a last, shorter group is filled up with zeros.

    Raises: CheckpointError where weights are not finite.
    """
    weight = weight_OK.float()
    if not bool(weight.isfinite().all()):
        raise CheckpointError(
            "a matrix of an expert holds numbers that are not finite, which cannot be quantised; "
            "download the checkpoint again, or keep it as stored"
        )
    num_outputs, num_inputs = weight.shape
    length, num_groups = spec.group_length(num_inputs), spec.num_groups(num_inputs)
    padded = torch.nn.functional.pad(weight, (0, num_groups * length - num_inputs))
    return padded.view(num_outputs, num_groups, length)


# Ways to quantise that look at nothing but the weights.
METHODS: dict[str, Callable[[Tensor, QuantSpec], Quantized]] = {
    "nearest": round_to_nearest,
    "searched": searched,
}


def encode(parts: Quantized, spec: QuantSpec) -> Tensor:
    """The bytes of a matrix, uint8 [matrix_bytes]."""
    num_outputs, num_inputs = parts.codes_OK.shape
    assert (parts.zeros_OG is None) == spec.is_symmetric
    length = spec.group_length(num_inputs)
    num_whole, rest = divmod(num_inputs, length)
    codes_PLK = _in_panels(parts.codes_OK)
    headers = [_in_panels(parts.scales_OG.contiguous()).transpose(1, 2)]
    headers[0] = headers[0].contiguous().view(torch.uint8)
    if parts.zeros_OG is not None:
        headers.append(_in_panels(parts.zeros_OG).transpose(1, 2))
    header_PGB = torch.cat(headers, dim=2)
    whole = _encode_groups(codes_PLK[:, :, : num_whole * length], num_whole, spec)
    panels = [torch.cat((header_PGB[:, :num_whole], whole), dim=2).flatten(1)]
    if rest:
        last = _encode_groups(codes_PLK[:, :, num_whole * length :], 1, spec)
        panels.append(torch.cat((header_PGB[:, num_whole:], last), dim=2).flatten(1))
    packed = torch.cat(panels, dim=1).flatten()
    assert len(packed) == matrix_bytes(spec, num_outputs, num_inputs)
    return packed


def decode(packed: Tensor, spec: QuantSpec, num_outputs: int, num_inputs: int) -> Quantized:
    """The parts of a packed matrix."""
    assert packed.dtype == torch.uint8
    assert packed.shape == (matrix_bytes(spec, num_outputs, num_inputs),)
    length = spec.group_length(num_inputs)
    num_whole, rest = divmod(num_inputs, length)
    panels_PB = packed.view(-1, spec.panel_bytes(num_inputs))
    whole_bytes = num_whole * spec.group_bytes(length)
    pieces = [(torch.unflatten(panels_PB[:, :whole_bytes], 1, (num_whole, -1)), length)]
    if rest:
        pieces.append((panels_PB[:, None, whole_bytes:], rest))
    codes, headers = [], []
    for groups_PGB, size in pieces:
        headers.append(groups_PGB[:, :, : spec.header_bytes])
        codes.append(_decode_groups(groups_PGB[:, :, spec.header_bytes :], size, spec))
    header_PGB = torch.cat(headers, dim=1)
    scales_PGL = header_PGB[:, :, : 2 * PANEL].contiguous().view(torch.bfloat16)
    zeros_PGL = header_PGB[:, :, 2 * PANEL :]

    def by_output(each_PGL: Tensor) -> Tensor:
        return each_PGL.transpose(1, 2).flatten(0, 1)[:num_outputs].contiguous()

    return Quantized(
        torch.cat(codes, dim=2).flatten(0, 1)[:num_outputs].contiguous(),
        by_output(scales_PGL),
        None if spec.is_symmetric else by_output(zeros_PGL),
    )


def _in_panels(rows_OX: Tensor) -> Tensor:
    """[P, 32, X], the last panel filled up with zeros."""
    padding = -len(rows_OX) % PANEL
    padded = torch.cat((rows_OX, rows_OX.new_zeros(padding, rows_OX.shape[1])))
    return padded.view(-1, PANEL, rows_OX.shape[1])


def _encode_groups(codes_PLK: Tensor, num_groups: int, spec: QuantSpec) -> Tensor:
    """Words of equal groups as bytes [P, G, steps · 128]; K is G groups."""
    each = torch.unflatten(codes_PLK, 2, (num_groups, -1))
    padding = -each.shape[3] % spec.codes_of_word
    each = torch.nn.functional.pad(each, (0, padding))
    each = torch.unflatten(each, 3, (-1, spec.codes_of_word))
    # [P, 32, G, steps, codes of a word] -> [P, G, steps, 32, codes of a word]
    words = each.permute(0, 2, 3, 1, 4)
    if spec.bits == 4:
        words = words[..., 0::2] | words[..., 1::2] << 4
    return words.flatten(2)


def _decode_groups(bytes_PGB: Tensor, length: int, spec: QuantSpec) -> Tensor:
    """Codes [P, 32, G · length] of equal groups."""
    words = torch.unflatten(bytes_PGB, 2, (-1, PANEL, 4))
    if spec.bits == 4:
        words = torch.stack((words & 15, words >> 4), dim=-1).flatten(4)
    # [P, G, steps, 32, codes of a word] -> [P, 32, G, codes of a group]
    return words.permute(0, 3, 1, 2, 4).flatten(3)[..., :length].flatten(2)
