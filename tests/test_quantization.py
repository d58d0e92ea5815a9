"""Quantised weights: what the bytes say, and how near they are."""

import pytest
import torch
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st

from oled_moe.errors import CheckpointError, ConfigError
from oled_moe.quantization import (
    DEFAULT_SPECS,
    GROUP_SIZES,
    METHODS,
    PANEL,
    Quantized,
    QuantSpec,
    decode,
    default_spec,
    dequantize,
    encode,
    grouped,
    matrix_bytes,
    quantize,
    weights_of,
)

SPECS = st.builds(
    QuantSpec, st.sampled_from([4, 8]), st.sampled_from([None, *GROUP_SIZES]), st.booleans()
)


def random_parts(spec: QuantSpec, num_outputs: int, num_inputs: int, seed: int) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    num_groups = spec.num_groups(num_inputs)

    def numbers(most: int, width: int) -> torch.Tensor:
        shape = (num_outputs, width)
        return torch.randint(most + 1, shape, dtype=torch.uint8, generator=generator)

    scales = torch.randn(num_outputs, num_groups, generator=generator).to(torch.bfloat16)
    codes = numbers(2**spec.bits - 1, num_inputs)
    # GPTQ has zeros that are one more than the largest code.
    zeros = None if spec.is_symmetric else numbers(min(2**spec.bits, 255), num_groups)
    return Quantized(codes, scales, zeros)


@bounded(60)
@given(SPECS, st.integers(1, 70), st.integers(1, 300), st.integers(0, 9))
def test_what_is_encoded_is_decoded(
    spec: QuantSpec, num_outputs: int, num_inputs: int, seed: int
) -> None:
    parts = random_parts(spec, num_outputs, num_inputs, seed)
    packed = encode(parts, spec)
    assert packed.dtype == torch.uint8
    assert packed.shape == (matrix_bytes(spec, num_outputs, num_inputs),)
    for found, expected in zip(decode(packed, spec, num_outputs, num_inputs), parts, strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_bytes_lie_where_the_drawing_says(bits: int, is_symmetric: bool) -> None:
    """Written down by hand from the module's drawing: kernels in C and Triton rely on it."""
    spec = QuantSpec(bits, 64, is_symmetric)
    num_outputs, num_inputs = 40, 150
    parts = random_parts(spec, num_outputs, num_inputs, 1)
    memory = bytes(encode(parts, spec).numpy())
    header = 64 if is_symmetric else 96
    per_word = 32 // bits
    steps = [64 // per_word, 64 // per_word, -(-22 // per_word)]
    panel_bytes = sum(header + 128 * count for count in steps)
    assert len(memory) == 2 * panel_bytes
    for output, column in ((0, 0), (31, 149), (32, 64), (39, 127), (5, 129), (17, 71)):
        group = column // 64
        start = output // 32 * panel_bytes + sum(header + 128 * count for count in steps[:group])
        lane = output % 32
        scale = int.from_bytes(memory[start + 2 * lane :][:2], "little")
        assert scale == int(parts.scales_OG[output, group].view(torch.uint16))
        if parts.zeros_OG is not None:
            assert memory[start + 64 + lane] == parts.zeros_OG[output, group]
        step, place = divmod(column % 64, per_word)
        word = int.from_bytes(memory[start + header + 128 * step + 4 * lane :][:4], "little")
        assert word >> (bits * place) & (2**bits - 1) == parts.codes_OK[output, column]


@bounded(60)
@given(SPECS, st.integers(1, 70), st.integers(1, 300), st.floats(1e-4, 100.0), st.integers(0, 9))
def test_every_weight_is_within_half_a_step(
    spec: QuantSpec, num_outputs: int, num_inputs: int, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = size * torch.randn(num_outputs, num_inputs, generator=generator)
    packed = quantize(weight, spec, "nearest")
    found = dequantize(packed, spec, num_outputs, num_inputs)
    parts = decode(packed, spec, num_outputs, num_inputs)
    length = spec.group_length(num_inputs)
    step = parts.scales_OG.float().abs().repeat_interleave(length, dim=1)[:, :num_inputs]
    # Scales are rounded to 8 bits, so the outermost codes may miss by 2^-8 of the range more; an
    # asymmetric zero is rounded too.
    slack = 0.5 + 2.0 ** (spec.bits - 8) + (0.0 if spec.is_symmetric else 0.5)
    assert ((found - weight).abs() <= slack * step + 1e-12).all()


@bounded(30)
@given(SPECS, st.integers(1, 40), st.integers(1, 200), st.integers(0, 9))
def test_what_fits_the_codes_is_exact(
    spec: QuantSpec, num_outputs: int, num_inputs: int, seed: int
) -> None:
    """Weights that are whole numbers of a power of two already come back as they were."""
    symmetric = QuantSpec(spec.bits, spec.group_size)
    most = symmetric.middle - 1
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-most, most + 1, (num_outputs, num_inputs), generator=generator) / 64.0
    # The end of the range is there in every group, so the step is 1/64.
    weight[:, :: symmetric.group_length(num_inputs)] = most / 64.0
    found = dequantize(quantize(weight, symmetric), symmetric, num_outputs, num_inputs)
    assert torch.equal(found, weight)


def test_a_row_of_zeros_stays_one() -> None:
    for spec in (QuantSpec(4, 32), QuantSpec(4, 32, False), QuantSpec(8, None)):
        weight = torch.zeros(3, 70)
        weight[1, 40] = 2.0
        found = dequantize(quantize(weight, spec), spec, 3, 70)
        assert torch.equal(found != 0, weight != 0)
        torch.testing.assert_close(found, weight, rtol=2.0**-8, atol=0)


def test_weights_that_are_not_finite_are_refused() -> None:
    for bad in (float("nan"), float("inf")):
        weight = torch.zeros(2, 8)
        weight[1, 3] = bad
        with pytest.raises(CheckpointError, match="not finite"):
            quantize(weight, DEFAULT_SPECS["int8"])


def sum_of_squares(weight: torch.Tensor, parts: Quantized, spec: QuantSpec) -> torch.Tensor:
    return grouped(weight - weights_of(parts, spec), spec).square().sum(-1)


@bounded(30)
@given(SPECS, st.integers(1, 40), st.integers(1, 200), st.integers(0, 9))
def test_searched_is_no_worse_in_any_group(
    spec: QuantSpec, num_outputs: int, num_inputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    nearest = sum_of_squares(weight, METHODS["nearest"](weight, spec), spec)
    searched = sum_of_squares(weight, METHODS["searched"](weight, spec), spec)
    assert (searched <= nearest).all()
    if spec.bits == 4 and num_outputs * num_inputs > 500:
        assert searched.sum() < nearest.sum()


def test_another_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="nearest, searched"):
        quantize(torch.zeros(2, 2), DEFAULT_SPECS["int8"], "guessed")


def test_weights_are_code_less_zero_times_scale() -> None:
    spec = QuantSpec(4, 32, False)
    parts = Quantized(
        torch.tensor([[0, 15, 7]], dtype=torch.uint8),
        torch.tensor([[0.5]], dtype=torch.bfloat16),
        torch.tensor([[7]], dtype=torch.uint8),
    )
    assert weights_of(parts, spec).tolist() == [[-3.5, 4.0, 0.0]]


@pytest.mark.parametrize(
    ("text", "spec", "written"),
    [
        ("int8", QuantSpec(8, None), "int8-row"),
        ("int4", QuantSpec(4, 64), "int4-g64"),
        ("int8-row", QuantSpec(8, None), "int8-row"),
        ("int8-g128", QuantSpec(8, 128), "int8-g128"),
        ("int4-g32-asym", QuantSpec(4, 32, False), "int4-g32-asym"),
        ("int4-asym", QuantSpec(4, 64, False), "int4-g64-asym"),
        ("int8-asym", QuantSpec(8, None, False), "int8-row-asym"),
    ],
)
def test_forms_have_names(text: str, spec: QuantSpec, written: str) -> None:
    assert QuantSpec.parse(text) == spec
    assert str(spec) == written
    assert QuantSpec.parse(written) == spec


@pytest.mark.parametrize("text", ["int5", "int4-g48", "int4-64", "asym", "", "int8-g128-sym"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        QuantSpec.parse(text)


def test_defaults() -> None:
    assert default_spec("int8") == DEFAULT_SPECS["int8"]
    with pytest.raises(ConfigError, match="int8, int4"):
        default_spec("bf16")


def test_sizes() -> None:
    """Of LLaDA2-mini's gate: 8 bits and a scale a row; 4 bits and a scale every 64 weights."""
    assert matrix_bytes(QuantSpec(8, None), 512, 2048) == 512 * (2048 + 2)
    assert matrix_bytes(QuantSpec(4, 64), 512, 2048) == 512 * 2048 // 2 + 512 * 32 * 2
    assert matrix_bytes(QuantSpec(4, 64, False), 512, 2048) == 512 * 2048 // 2 + 512 * 32 * 3
    assert matrix_bytes(QuantSpec(4, 64), 1, 1) == PANEL * (2 + 4)
