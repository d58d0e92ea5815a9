"""Ways to quantise that the engine does not use, to compare its own with.

Legend: O outputs, K inputs, G groups of a row, L weights of a group.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from oled_moe.quantization import (
    METHODS,
    Quantized,
    QuantSpec,
    chosen,
    errors_of,
    grouped,
    nearest,
    round_to_nearest,
    searched,
    weights_of,
)

_HQQ_NORM, _HQQ_STEPS = 0.7, 20
# Shares of a group's range that are tried.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
# Added to the moments' diagonal, in shares of its mean. 0.01, as published, does worse than
# rounding to the nearest where a few hundred rows calibrate (README.md).
DAMPING, SHRUNK_DAMPING = 1.0, 0.1
# Rows of its layer's mean that an expert's own rows are joined by, so that one that was hardly
# seen is calibrated like its layer.
PRIOR_ROWS = 32
# Fewer rows of an expert calibrate nothing by themselves.
MIN_ROWS = 256


class Seen(NamedTuple):
    """What a matrix of an expert was multiplied with while some prompts were answered.

    `moments_KK`: sum of x · xᵀ over `num_rows` rows. `layer_KK`: the mean of x · xᵀ over all rows
    of the layer; for the second matrix, where experts have nothing in common, their mean square
    on the diagonal. fp32.
    """

    num_rows: int
    moments_KK: Tensor
    layer_KK: Tensor

    def shrunk(self) -> Tensor:
        """Mean of x · xᵀ, the nearer to the layer's the fewer rows there are."""
        whole = self.moments_KK + PRIOR_ROWS * self.layer_KK
        return whole / (self.num_rows + PRIOR_ROWS)


def half_quadratic(weight_OK: Tensor, spec: QuantSpec) -> Quantized:
    """Scales, and zeros where asymmetric, that make the p-norm of errors small for p < 1, so that
    few large weights count less; by alternating between errors and their best fit.

    Source: HQQ (Badri and Shaji 2023), equations 4 to 8; here zeros are whole numbers, and where
    symmetric the scale is fitted instead.
    """
    groups_OGL = grouped(weight_OK, spec)
    best = found = round_to_nearest(weight_OK, spec)
    least_OG = errors_of(weight_OK, best, spec).pow(_HQQ_NORM).sum(-1)
    sharpness = 10.0
    for _ in range(_HQQ_STEPS):
        errors_OGL = groups_OGL - grouped(weights_of(found, spec), spec)
        size = errors_OGL.abs()
        shrunk = (size - (size + 1e-12).pow(_HQQ_NORM - 1) / sharpness).clamp(min=0)
        target_OGL = groups_OGL - shrunk * errors_OGL.sign()
        codes_OGL = grouped(found.codes_OK, spec)
        scales_OG, zeros_OG = found.scales_OG.float(), None
        if found.zeros_OG is None:
            numbers = codes_OGL - spec.middle
            scales_OG = (target_OGL * numbers).sum(-1) / numbers.square().sum(-1).clamp(min=1)
        else:
            safe_OG = torch.where(scales_OG != 0, scales_OG, 1)
            zeros_OG = (codes_OGL - target_OGL / safe_OG[..., None]).mean(-1).round()
            zeros_OG = zeros_OG.clamp(0, 2**spec.bits - 1)
        found = nearest(weight_OK, spec, scales_OG, zeros_OG)
        norms_OG = errors_of(weight_OK, found, spec).pow(_HQQ_NORM).sum(-1)
        is_better = norms_OG < least_OG
        least_OG = torch.where(is_better, norms_OG, least_OG)
        best = chosen(is_better, found, best, spec)
        sharpness *= 1.01
    return best


def weighted(weight_OK: Tensor, spec: QuantSpec, importance_K: Tensor) -> Quantized:
    """`searched`, but errors count by the mean square of the inputs that they meet, in int8 too.

    `importance_K`: mean squares of the inputs, fp32, none negative.
    """
    weight = weight_OK.float()
    counts_OGL = grouped(importance_K.expand_as(weight), spec)
    best = round_to_nearest(weight, spec)
    least_OG = (errors_of(weight, best, spec).square() * counts_OGL).sum(-1)
    first = best.scales_OG.float()
    if spec.is_symmetric:
        groups_OGL = grouped(weight, spec)
        low, high = groups_OGL.amin(-1), groups_OGL.amax(-1)
        first = torch.where(-low >= high, 1.0, -1.0) * torch.maximum(-low, high) / spec.middle
    zeros_OG = None if best.zeros_OG is None else best.zeros_OG.float()
    for share in _SHARES:
        found = nearest(weight, spec, first * share, zeros_OG)
        errors_OG = (errors_of(weight, found, spec).square() * counts_OGL).sum(-1)
        is_better = errors_OG < least_OG
        least_OG = torch.where(is_better, errors_OG, least_OG)
        best = chosen(is_better, found, best, spec)
    return best


def compensated(
    weight_OK: Tensor,
    spec: QuantSpec,
    moments_KK: Tensor,
    damping: float = DAMPING,
    base: Quantized | None = None,
) -> Quantized:
    """Column after column is rounded, and what that does to outputs is made good by the columns
    still to come; scales are those of `base`, or of `searched`.

    `moments_KK`: sum of x · xᵀ over rows of activations that the matrix was seen with, fp32.
    Source: GPTQ (Frantar et al. 2023), algorithm 1, columns one at a time.
    """
    base = base or searched(weight_OK, spec)
    weight, num_inputs = weight_OK.float().clone(), weight_OK.shape[1]
    moments = moments_KK.double()
    added = damping * moments.diagonal().mean().clamp(min=1e-12)
    moments = moments + added * torch.eye(num_inputs, dtype=torch.float64)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    upper_KK = torch.linalg.cholesky(inverse, upper=True).float()
    length = spec.group_length(num_inputs)
    scales_OG = base.scales_OG.float()
    codes_OK = torch.empty_like(base.codes_OK)
    for column in range(num_inputs):
        scale = scales_OG[:, column // length]
        zeros = base.zeros_OG
        zero = spec.middle if zeros is None else zeros[:, column // length].float()
        safe = torch.where(scale != 0, scale, 1)
        code = ((weight[:, column] / safe).round() + zero).clamp(0, 2**spec.bits - 1)
        codes_OK[:, column] = code.to(torch.uint8)
        error = (weight[:, column] - (code - zero) * scale) / upper_KK[column, column]
        weight[:, column + 1 :] -= error[:, None] * upper_KK[column, column + 1 :]
    return Quantized(codes_OK, base.scales_OG, base.zeros_OG)


# Ways that are shown what was seen too


def _weighted(weight_OK: Tensor, spec: QuantSpec, seen: Seen) -> Quantized:
    return weighted(weight_OK, spec, seen.shrunk().diagonal())


def _compensated(weight_OK: Tensor, spec: QuantSpec, seen: Seen) -> Quantized:
    if seen.num_rows < MIN_ROWS:
        return searched(weight_OK, spec)
    return compensated(weight_OK, spec, seen.moments_KK)


def _both(weight_OK: Tensor, spec: QuantSpec, seen: Seen) -> Quantized:
    moments_KK = seen.shrunk()
    base = weighted(weight_OK, spec, moments_KK.diagonal())
    return compensated(weight_OK, spec, moments_KK, SHRUNK_DAMPING, base)


def _by_layer(weight_OK: Tensor, spec: QuantSpec, seen: Seen) -> Quantized:
    """What fits on a disk for large models: correlations of the layer, mean squares of experts."""
    squares_K = seen.shrunk().diagonal()
    scale_K = (squares_K / seen.layer_KK.diagonal().clamp(min=1e-12)).sqrt()
    moments_KK = seen.layer_KK * scale_K[:, None] * scale_K
    base = weighted(weight_OK, spec, squares_K)
    return compensated(weight_OK, spec, moments_KK, SHRUNK_DAMPING, base)


PLAIN = {**METHODS, "half-quadratic": half_quadratic}
CALIBRATED: dict[str, Callable[[Tensor, QuantSpec, Seen], Quantized]] = {
    "weighted": _weighted,
    "compensated": _compensated,
    "weighted, compensated": _both,
    "weighted, compensated by layer": _by_layer,
}


def quantized_by(method: str, weight_OK: Tensor, spec: QuantSpec, seen: Seen | None) -> Quantized:
    """A matrix by the named way; `seen` is there for calibrated ones."""
    if method in PLAIN:
        return PLAIN[method](weight_OK, spec)
    assert seen is not None
    return CALIBRATED[method](weight_OK, spec, seen)
