"""What surrounds the products: native code and torch against float64, on every path here."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oled_moe.kernels import native, rows
from oled_moe.kernels.native import ISAS, NativeKernels, Segment

KERNELS = native.native_kernels()
needs_native = pytest.mark.skipif(KERNELS is None, reason="native kernels are not built here")
SEEDS = st.integers(0, 2**16)


def paths() -> list[str]:
    """The instruction sets that run here."""
    if KERNELS is None:
        return []
    return [isa for isa in ISAS if KERNELS._library.oled_has_isa(ISAS.index(isa))]


def with_threads(isa: str) -> Iterator[NativeKernels]:
    for num_threads in (1, 3):
        kernels = NativeKernels(isa)
        kernels.num_threads = num_threads
        yield kernels


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The functions of `rows`, with and without native code."""
    if request.param == "torch":
        monkeypatch.setattr(rows, "native_kernels", lambda: None)
    return str(request.param)


def check_same(found: list[Tensor], expected: Tensor, *, rtol: float, atol: float) -> None:
    """Equal to the bit among themselves, close to the truth."""
    assert all(torch.equal(one, found[0]) for one in found[1:])
    torch.testing.assert_close(found[0].double(), expected, rtol=rtol, atol=atol)


# Sums of experts' rows


@needs_native
@pytest.mark.parametrize("isa", paths())
@given(num_tokens=st.integers(1, 9), top_k=st.integers(1, 8), width=st.integers(1, 70), seed=SEEDS)
@bounded(25)
def test_native_combine(isa: str, num_tokens: int, top_k: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    out_ND = torch.randn(num_tokens * top_k, width, generator=generator).bfloat16()
    places_TK = torch.randperm(num_tokens * top_k, generator=generator).view(num_tokens, top_k)
    weights_TK = torch.rand(num_tokens, top_k, generator=generator)
    expected = (out_ND[places_TK].double() * weights_TK[..., None].double()).sum(1)
    found = [each.combine(out_ND, places_TK, weights_TK) for each in with_threads(isa)]
    check_same(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine(path: str, dtype: torch.dtype) -> None:
    out_ND, weights_TK = torch.randn(24, 40).to(dtype), torch.rand(6, 4)
    places_TK = torch.randperm(24).view(6, 4)
    found = rows.combine(out_ND, places_TK, weights_TK)
    expected = (out_ND[places_TK].double() * weights_TK[..., None].double()).sum(1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    out_ND[int(places_TK[2, 1])] = float("nan")
    is_nan = rows.combine(out_ND, places_TK, weights_TK).isnan().all(1)
    assert is_nan.tolist() == [False, False, True, False, False, False]


# The choice among logits


def best_of(logits_NV: Tensor, banned_id: int) -> tuple[Tensor, Tensor]:
    allowed = logits_NV.double().clone()
    allowed[:, banned_id] = -torch.inf
    best = allowed.max(-1)
    return best.indices, (best.values - logits_NV.double().logsumexp(-1)).exp()


@needs_native
@pytest.mark.parametrize("isa", paths())
@given(
    num_rows=st.integers(1, 5),
    num_logits=st.integers(2, 3000),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    data=st.data(),
    seed=SEEDS,
)
@bounded(40)
def test_native_choice(
    isa: str, num_rows: int, num_logits: int, scale: float, data: st.DataObject, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_NV = scale * torch.randn(num_rows, num_logits, generator=generator)
    banned = data.draw(st.integers(0, num_logits - 1))
    if data.draw(st.booleans()):
        logits_NV[:, banned] = 2 * logits_NV.max() + 1
    ids_N, probabilities_N = best_of(logits_NV, banned)
    for kernels in with_threads(isa):
        found = kernels.choose(logits_NV, banned)
        assert torch.equal(found[0], ids_N) and found[2]
        torch.testing.assert_close(found[1].double(), probabilities_N, rtol=1e-5, atol=1e-37)


@needs_native
@pytest.mark.parametrize("isa", paths())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 31, 32, 1023, 1024, 2049])
def test_native_choice_tells_of_numbers_that_are_not_finite(
    isa: str, value: float, place: int
) -> None:
    logits_NV = torch.randn(3, 2050)
    assert NativeKernels(isa).choose(logits_NV, 5)[2]
    logits_NV[1, place] = value
    assert not NativeKernels(isa).choose(logits_NV, 5)[2]


def test_choice(path: str) -> None:
    logits_NV = torch.randn(4, 500)
    logits_NV[0, 7] = logits_NV[0, 400] = 9.0  # the first of equals
    logits_NV[1, 3] = 50.0  # banned
    ids_N, probabilities_N, is_finite = rows.choose(logits_NV.clone(), 3)
    expected = best_of(logits_NV, 3)
    assert torch.equal(ids_N, expected[0]) and bool(is_finite) and int(ids_N[0]) == 7
    torch.testing.assert_close(probabilities_N.double(), expected[1], rtol=2e-6, atol=0)
    logits_NV[2, 499] = float("nan")
    assert not rows.choose(logits_NV, 3)[2]


# Norms


@needs_native
@pytest.mark.parametrize("isa", paths())
@given(
    num_rows=st.integers(0, 7),
    num_heads=st.integers(1, 3),
    width=st.integers(1, 100),
    is_by_head=st.booleans(),
    seed=SEEDS,
)
@bounded(25)
def test_native_norm(
    isa: str, num_rows: int, num_heads: int, width: int, is_by_head: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_heads, width, generator=generator).bfloat16()
    shape = (num_heads, width) if is_by_head else (width,)
    weight = torch.randn(shape, generator=generator).bfloat16()
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    found = [each.norm(x, weight, 1e-6) for each in with_threads(isa)]
    # Two roundings to 8 bits, each half a unit, and one more where the first falls otherwise.
    check_same(found, normed * weight.double(), rtol=1.5 * 2**-7, atol=1e-30)


def test_norm(path: str) -> None:
    x = torch.randn(5, 4, 48).bfloat16()
    weight = torch.randn(4, 48).bfloat16()
    for source in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        wide = source.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        found = rows.rms_norm(source, weight, 1e-6)
        torch.testing.assert_close(found.double(), expected, rtol=1.5 * 2**-7, atol=0)
    x[1, 2, 3] = float("nan")
    assert rows.rms_norm(x, weight, 1e-6)[1, 2].isnan().all()


# Routers


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 5, 130])
def test_router_logits(
    path: str, hidden_dtype: torch.dtype, stored_dtype: torch.dtype, num_tokens: int
) -> None:
    hidden_TD = torch.randn(num_tokens, 96).to(hidden_dtype)
    stored_ED = torch.randn(24, 96).to(stored_dtype)
    weight_ED = rows.router_weight(stored_ED, hidden_dtype)
    found = rows.router_logits(hidden_TD, weight_ED)
    assert found.dtype == torch.float32
    expected = hidden_TD.double() @ stored_ED.double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


# Attention


def attention_of(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    wide = [part.double()[None] for part in (queries.transpose(0, 1), keys, values)]
    return F.scaled_dot_product_attention(*wide, enable_gqa=True)[0].transpose(0, 1).flatten(1)


@needs_native
@pytest.mark.parametrize("isa", paths())
@given(
    num_tokens=st.integers(0, 20),
    num_groups=st.integers(1, 3),
    num_heads=st.integers(1, 4),
    num_keys=st.integers(1, 100),
    head_size=st.sampled_from([1, 8, 24, 64, 80, 128, 256]),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    seed=SEEDS,
)
@bounded(30)
def test_native_attention(
    isa: str,
    num_tokens: int,
    num_groups: int,
    num_heads: int,
    num_keys: int,
    head_size: int,
    scale: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, num_groups * num_heads, head_size)
    queries = (scale * torch.randn(shape, generator=generator)).bfloat16()
    # As in a cache: room for more positions behind those that are there.
    room = torch.randn(2, num_groups, num_keys + 3, head_size, generator=generator).bfloat16()
    keys, values = room[:, :, :num_keys]
    segments = [Segment(num_tokens, *room, num_keys)]
    found = [each.attend(queries, segments) for each in with_threads(isa)]
    expected = attention_of(queries, keys, values)
    check_same(found, expected, rtol=2**-7, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(path: str, dtype: torch.dtype) -> None:
    queries = torch.randn(7, 8, 64).to(dtype)
    keys, values = (torch.randn(2, 33, 64).to(dtype) for _ in range(2))
    found = rows.attend(queries, [Segment(7, keys, values, 33)])
    expected = attention_of(queries, keys, values)
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2e-3)
    values[1, 5, 3] = float("nan")
    is_nan = rows.attend(queries, [Segment(7, keys, values, 33)]).view(7, 8, 64).isnan()
    assert is_nan[:, 4:, 3].all() and not is_nan[:, :4].any()


@needs_native
@pytest.mark.parametrize("isa", paths())
def test_a_row_of_attention_does_not_depend_on_others(isa: str) -> None:
    queries = torch.randn(37, 4, 128).bfloat16()
    keys, values = (torch.randn(2, 50, 128).bfloat16() for _ in range(2))
    kernels = NativeKernels(isa)
    together = kernels.attend(queries, [Segment(37, keys, values, 50)])
    for first, end in ((0, 1), (5, 20), (36, 37)):
        part = kernels.attend(
            queries[first:end].contiguous(), [Segment(end - first, keys, values, 50)]
        )
        assert torch.equal(part, together[first:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_several_segments_is_that_of_each(path: str, dtype: torch.dtype) -> None:
    queries = torch.randn(30, 4, 32).to(dtype)
    sizes = [(8, 20), (1, 3), (16, 65), (5, 5)]
    # Keys lie in caches of different lengths.
    rooms = [torch.randn(2, 2, keys + 9, 32).to(dtype) for _, keys in sizes]
    segments = [
        Segment(tokens, *room, keys) for (tokens, keys), room in zip(sizes, rooms, strict=True)
    ]
    found = rows.attend(queries, segments).split([tokens for tokens, _ in sizes])
    parts = queries.split([tokens for tokens, _ in sizes])
    for part, segment, out in zip(parts, segments, found, strict=True):
        alone = rows.attend(part, [segment])
        assert torch.equal(alone, out)
        keys = segment.keys_GSH[:, : segment.num_keys]
        values = segment.values_GSH[:, : segment.num_keys]
        torch.testing.assert_close(
            out.double(), attention_of(part, keys, values), rtol=2**-7, atol=2e-3
        )


# Turned heads


@needs_native
@pytest.mark.parametrize("isa", paths())
@given(
    num_tokens=st.integers(1, 40),
    num_heads=st.integers(1, 5),
    half=st.integers(1, 9),
    rest=st.integers(0, 20),
    seed=SEEDS,
)
@bounded(25)
def test_native_rotation_is_torchs_to_the_bit(
    isa: str, num_tokens: int, num_heads: int, half: int, rest: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, num_heads, 2 * half + rest)
    heads = (4 * torch.randn(shape, generator=generator)).bfloat16()
    angles = 100 * torch.rand(num_tokens, half, generator=generator)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "native_kernels", lambda: None)
        expected = rows.rotate(heads, cos, sin)
    for kernels in with_threads(isa):
        assert torch.equal(kernels.rotate(heads, cos, sin), expected)


# Routing


@needs_native
@pytest.mark.parametrize("isa", paths())
@given(
    num_tokens=st.integers(1, 30),
    num_groups=st.sampled_from([1, 2, 4, 8]),
    group_size=st.integers(2, 33),
    has_bias=st.booleans(),
    data=st.data(),
)
@bounded(40)
def test_native_routing(
    isa: str, num_tokens: int, num_groups: int, group_size: int, has_bias: bool, data: st.DataObject
) -> None:
    num_kept = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, min(10, num_kept * group_size)))
    generator = torch.Generator().manual_seed(data.draw(SEEDS))
    num_experts = num_groups * group_size
    logits = 3 * torch.randn(num_tokens, num_experts, generator=generator)
    bias = 0.3 * torch.randn(num_experts, generator=generator) if has_bias else None
    sizes = {"num_groups": num_groups, "num_kept_groups": num_kept, "top_k": top_k}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "native_kernels", lambda: None)
        ids, weights, scores = rows.route(logits, bias, torch.bfloat16, **sizes)
    first: tuple[Tensor, ...] = ()
    for kernels in with_threads(isa):
        found = kernels.route(logits, bias, **sizes)
        first = first or found
        assert all(torch.equal(*pair) for pair in zip(found, first, strict=True))
    torch.testing.assert_close(first[2], scores, rtol=1e-6, atol=1e-7)
    # Scores that differ in the last bit may change places.
    choice = scores if bias is None else scores + bias
    torch.testing.assert_close(
        choice.gather(1, first[0]), choice.gather(1, ids), rtol=1e-5, atol=1e-6
    )
    assert all(len(set(row)) == top_k for row in first[0].tolist())
    same = (first[0] == ids).all(1)
    torch.testing.assert_close(first[1][same], weights[same], rtol=1e-5, atol=1e-7)
    assert same.float().mean() > 0.9


def test_routing_takes_the_first_of_equals_and_survives_nan(path: str) -> None:
    sizes = {"num_groups": 2, "num_kept_groups": 1, "top_k": 2}
    ids, weights, _ = rows.route(torch.zeros(3, 8), None, torch.bfloat16, **sizes)
    if path == "native":
        assert ids.tolist() == [[0, 1]] * 3
    torch.testing.assert_close(weights, torch.full((3, 2), 0.5))
    logits = torch.full((2, 8), float("nan"))
    ids, _, scores = rows.route(logits, None, torch.bfloat16, **sizes)
    assert ((ids >= 0) & (ids < 8)).all() and scores.isnan().all()


@needs_native
@pytest.mark.parametrize("isa", paths())
def test_routing_of_a_row_does_not_depend_on_others(isa: str) -> None:
    logits = torch.randn(37, 64)
    kernels = NativeKernels(isa)
    sizes = {"num_groups": 8, "num_kept_groups": 4, "top_k": 8}
    together = kernels.route(logits, None, **sizes)
    for row in (0, 9, 36):
        alone = kernels.route(logits[row : row + 1], None, **sizes)
        assert all(
            torch.equal(one[0], all_[row]) for one, all_ in zip(alone, together, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_go_where_their_segments_end(path: str, dtype: torch.dtype) -> None:
    # As a model has them: heads of queries, keys and values side by side.
    fused = torch.randn(9, 8, 16).to(dtype)
    keys, values = fused[:, 4:6], fused[:, 6:8]
    rooms = torch.zeros(3, 2, 2, 12, 16, dtype=dtype)
    sizes = [(4, 4), (2, 11), (3, 7)]
    segments = [Segment(n, *room, end) for (n, end), room in zip(sizes, rooms, strict=True)]
    rows.store(keys, values, segments)
    first = 0
    for (count, end), room in zip(sizes, rooms, strict=True):
        for written, source in zip(room, (keys, values), strict=True):
            expected = torch.zeros(2, 12, 16, dtype=dtype)
            expected[:, end - count : end] = source[first : first + count].transpose(0, 1)
            assert torch.equal(written, expected)
        first += count
