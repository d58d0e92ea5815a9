"""Kernels agree with the reference, and rows come in few sizes."""

import pytest
import torch

from oled_moe.kernels import KERNELS, reference
from oled_moe.kernels.cpu import padded_rows
from oled_moe.store import ExpertWeights

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("name", sorted(KERNELS))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 16, 17, 31, 130])
def test_kernels_agree_with_the_reference(name: str, dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    rows, weights = draw(num_rows, 96), ExpertWeights(draw(2 * 40, 96), draw(96, 40))
    expected = reference.expert_mlp(rows, weights)
    narrow = ExpertWeights(*(matrix.to(dtype) for matrix in weights))
    found = KERNELS[name](rows.to(dtype), narrow)
    assert found.shape == (num_rows, 96) and found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=0)


def test_rows_are_padded_to_few_sizes() -> None:
    sizes = [padded_rows(n) for n in range(1, 2049)]
    assert all(n <= size for n, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 32
    beyond = [(n, size) for n, size in enumerate(sizes, start=1) if n > 16]
    assert all(size - n < max(16, n / 2) for n, size in beyond)
    assert all(padded_rows(size) == size for size in sizes)
