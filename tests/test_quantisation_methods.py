"""What the engine's way to quantise is compared with does what it says."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from test_quantization import SPECS

from oled_moe.quantization import METHODS, QuantSpec, errors_of, grouped, weights_of

sys.path.insert(0, str(Path(__file__).parents[1]))
try:
    methods = importlib.import_module("experiments.10_quantisation.methods")
finally:
    sys.path.pop(0)


@bounded(20)
@given(SPECS, st.integers(1, 40), st.integers(1, 200), st.integers(0, 9))
def test_half_quadratic_makes_the_small_norm_no_larger(
    spec: QuantSpec, num_outputs: int, num_inputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=generator) ** 3
    norms = [
        grouped(weight - weights_of(way(weight, spec), spec), spec).abs().pow(0.7).sum(-1)
        for way in (methods.half_quadratic, METHODS["nearest"])
    ]
    assert (norms[0] <= norms[1]).all()


@pytest.mark.parametrize("form", ["int4-g32", "int4-g64-asym", "int8"])
def test_compensated_is_nearer_for_correlated_activations(form: str) -> None:
    """Activations of few directions, and others than those that calibrate."""
    spec = QuantSpec.parse(form)
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(12, 100, generator=generator)
    rows = torch.randn(800, 12, generator=generator) @ mixing
    rows += 0.1 * torch.randn(800, 100, generator=generator)
    weight = torch.randn(48, 100, generator=generator)
    seen, other = rows.split(400)
    found = weights_of(methods.compensated(weight, spec, seen.T @ seen), spec)
    plain = weights_of(METHODS["searched"](weight, spec), spec)
    errors = [((each - weight) @ other.T).norm() for each in (found, plain)]
    assert errors[0] < 0.6 * errors[1]


@bounded(20)
@given(SPECS, st.integers(1, 40), st.integers(1, 200), st.integers(0, 9))
def test_weighted_makes_the_weighted_error_no_larger(
    spec: QuantSpec, num_outputs: int, num_inputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=generator) ** 3
    importance = torch.rand(num_inputs, generator=generator) ** 4
    counts = grouped(importance.expand_as(weight), spec)
    errors = [
        (errors_of(weight, parts, spec).square() * counts).sum()
        for parts in (methods.weighted(weight, spec, importance), METHODS["searched"](weight, spec))
    ]
    assert errors[0] <= errors[1] * (1 + 1e-6)


def test_an_expert_that_was_never_seen_is_calibrated_like_its_layer() -> None:
    layer = torch.eye(4) * torch.tensor([1.0, 4, 9, 16])
    assert torch.equal(methods.Seen(0, torch.zeros(4, 4), layer).shrunk(), layer)
    often = methods.Seen(10**6, 10**6 * torch.eye(4), layer).shrunk()
    assert torch.allclose(often, torch.eye(4), atol=1e-3)
