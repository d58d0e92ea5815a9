"""Norm, rotary, attention, MLP and router against slow loops written from models.md 2."""

import math

import numpy as np
import pytest
import torch
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oled_moe.kv_cache import SequenceKv
from oled_moe.layers import (
    ForwardBatch,
    Segment,
    grouped_sigmoid_router,
    query_slices,
    rms_norm,
    rotary_table,
    rotate,
    sliced_attention,
    swiglu,
    write_kv,
)
from oled_moe.types import ForwardContext, ForwardRow, Phase


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_casts_before_it_scales() -> None:
    hidden, weight = randn(3, 8).to(torch.bfloat16), randn(8, seed=1).to(torch.bfloat16)
    wide = hidden.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    found = rms_norm(hidden, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, normed.to(torch.bfloat16) * weight, atol=0, rtol=0.008)
    assert torch.isfinite(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6)).all()


def test_rotary_turns_pairs_and_leaves_the_rest() -> None:
    size, theta = 4, 100.0
    cos, sin = rotary_table(10, size, theta, torch.float32)
    heads = randn(10, 2, 6)
    found = rotate(heads, cos, sin)
    assert torch.equal(found[..., size:], heads[..., size:])
    for position in range(10):
        for j in range(size // 2):
            angle = position * theta ** (-2 * j / size)
            left, right = heads[position, :, j], heads[position, :, j + size // 2]
            turned = left * math.cos(angle) - right * math.sin(angle)
            torch.testing.assert_close(found[position, :, j], turned, atol=1e-5, rtol=1e-5)
            turned = right * math.cos(angle) + left * math.sin(angle)
            torch.testing.assert_close(
                found[position, :, j + size // 2], turned, atol=1e-5, rtol=1e-5
            )


def test_rotary_over_all_dimensions() -> None:
    cos, sin = rotary_table(5, 8, 10000.0, torch.float32)
    heads = randn(5, 1, 8)
    found = rotate(heads, cos, sin)
    assert found.shape == heads.shape
    torch.testing.assert_close(found.norm(dim=-1), heads.norm(dim=-1))


@bounded(40)
@given(
    num_keys=st.integers(1, 14),
    num_queries=st.integers(1, 14),
    block_length=st.integers(1, 6),
    group=st.integers(1, 3),
)
def test_attention_is_block_causal(
    num_keys: int, num_queries: int, block_length: int, group: int
) -> None:
    num_queries = min(num_queries, num_keys)
    kv_heads, size = 2, 4
    queries = randn(num_queries, kv_heads * group, size)
    keys = randn(kv_heads, num_keys, size, seed=1)
    values = randn(kv_heads, num_keys, size, seed=2)
    start = num_keys - num_queries
    slices = query_slices(start, num_queries, block_length)
    found = sliced_attention(queries, [(part, (keys, values)) for part in slices])
    for t in range(num_queries):
        last = ((start + t) // block_length + 1) * block_length
        for head in range(kv_heads * group):
            kv = head // group
            scores = keys[kv, :last] @ queries[t, head] / math.sqrt(size)
            expected = scores.softmax(-1) @ values[kv, :last]
            torch.testing.assert_close(
                found[t, head * size : (head + 1) * size], expected, atol=1e-5, rtol=1e-4
            )


def test_swiglu() -> None:
    hidden, gate, up, down = randn(3, 4), randn(6, 4, seed=1), randn(6, 4, seed=2), randn(4, 6)
    gated = hidden @ gate.T
    expected = (gated * torch.sigmoid(gated) * (hidden @ up.T)) @ down.T
    torch.testing.assert_close(swiglu(hidden, gate, up, down), expected, atol=1e-5, rtol=1e-4)


@bounded(60)
@given(
    seed=st.integers(0, 1000),
    groups=st.sampled_from([(1, 1), (4, 2), (4, 1), (4, 4), (2, 1)]),
    top_k=st.integers(1, 3),
    has_bias=st.booleans(),
)
def test_router_equals_the_steps_of_the_reference(
    seed: int, groups: tuple[int, int], top_k: int, has_bias: bool
) -> None:
    num_groups, kept = groups
    num_experts, hidden = 12, randn(5, 6, seed=seed)
    weight = randn(num_experts, 6, seed=seed + 1)
    bias = 0.3 * randn(num_experts, seed=seed + 2) if has_bias else None
    ids, weights, _ = grouped_sigmoid_router(
        hidden, weight, bias, num_groups=num_groups, num_kept_groups=kept, top_k=top_k
    )
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    size = num_experts // num_groups
    for token in range(5):
        scores = torch.sigmoid(weight @ hidden[token]).tolist()
        choice = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
        group_score = [
            sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:2])
            for g in range(num_groups)
        ]
        best = sorted(range(num_groups), key=lambda g: -group_score[g])[:kept]
        allowed = [e for e in range(num_experts) if e // size in best]
        expected = sorted(allowed, key=lambda e: -choice[e])[:top_k]
        assert ids[token].tolist() == expected
        total = sum(scores[e] for e in expected) if top_k > 1 else 1.0
        # The bias chooses; it does not weigh.
        assert weights[token].tolist() == pytest.approx(
            [scores[e] / total for e in expected], rel=1e-4
        )


def test_router_works_in_fp32_whatever_is_stored() -> None:
    hidden, weight = randn(4, 8), randn(6, 8, seed=1)
    bias = 0.1 * randn(6, seed=2)
    rounded = [tensor.to(torch.bfloat16) for tensor in (hidden, weight, bias)]
    options = {"num_groups": 1, "num_kept_groups": 1, "top_k": 2}
    found = grouped_sigmoid_router(*rounded, **options)
    expected = grouped_sigmoid_router(*(tensor.float() for tensor in rounded), **options)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)


# --- keys and values, batches


def new_kv(capacity: int = 8) -> SequenceKv:
    return SequenceKv(
        num_layers=2, num_heads=1, head_size=1, capacity=capacity, dtype=torch.float32
    )


def write(kv: SequenceKv, layer: int, keys: Tensor, values: Tensor, offset: int = 0) -> None:
    """Keys and values [G, N, H] behind the finished ones."""
    segment = Segment(kv, keys.shape[1], False, offset)
    write_kv(layer, keys.transpose(0, 1), values.transpose(0, 1), [segment])


def test_keys_and_values_replace_what_is_not_finished() -> None:
    kv = new_kv()
    for start in (1.0, 5.0):
        for layer in range(2):
            rows = (start + 10 * layer + torch.arange(4.0)).view(1, 4, 1)
            write(kv, layer, rows, -rows)
    kv.advance(4)
    write(kv, 1, torch.full((1, 2, 1), 9.0), torch.full((1, 2, 1), -9.0))
    keys, values = kv.written(1, 2)
    assert keys.flatten().tolist() == [15, 16, 17, 18, 9, 9]
    assert torch.equal(values, -keys)
    assert kv.written(0, 0)[0].flatten().tolist() == [5, 6, 7, 8]
    assert (kv.length, kv.capacity) == (4, 8)


def test_keys_and_values_behind_those_of_another_segment() -> None:
    kv = new_kv()
    write(kv, 0, torch.full((1, 2, 1), 1.0), torch.full((1, 2, 1), -1.0))
    write(kv, 0, torch.full((1, 3, 1), 2.0), torch.full((1, 3, 1), -2.0), offset=2)
    assert kv.written(0, 5)[0].flatten().tolist() == [1, 1, 2, 2, 2]
    kv.advance(2)
    write(kv, 0, torch.full((1, 3, 1), 3.0), torch.full((1, 3, 1), -3.0))
    assert kv.written(0, 3)[1].flatten().tolist() == [-1, -1, -3, -3, -3]
    with pytest.raises(AssertionError, match="outgrew"):
        write(kv, 0, torch.zeros(1, 3, 1), torch.zeros(1, 3, 1), offset=4)


def test_keys_and_values_have_an_end() -> None:
    kv = new_kv(4)
    rows = torch.zeros(1, 3, 1)
    write(kv, 0, rows, rows)
    kv.advance(3)
    with pytest.raises(AssertionError, match="outgrew"):
        write(kv, 0, rows, rows)


def test_the_wanted_part_of_a_batch() -> None:
    sizes, wants = (2, 3, 1), (False, True, True)
    rows = tuple(
        ForwardRow(i, 0, 0, Phase.DENOISE if want else Phase.COMMIT, size)
        for i, (size, want) in enumerate(zip(sizes, wants, strict=True))
    )
    context = ForwardContext(
        3, 4, rows, np.arange(6, dtype=np.float32), np.arange(6, dtype=np.uint8)
    )
    segments = tuple(Segment(new_kv(), size, want) for size, want in zip(sizes, wants, strict=True))
    batch = ForwardBatch(torch.arange(6) + 10, torch.arange(6) + 20, segments, context)
    assert batch.wants_logits and not batch.all_want_logits
    assert batch.wanted(torch.arange(6)).tolist() == [2, 3, 4, 5]
    assert batch.logit_tokens() is None
    part = batch.wanted_part()
    assert part.all_want_logits and part.segments == segments[1:]
    assert part.token_ids.tolist() == [12, 13, 14, 15]
    assert part.positions.tolist() == [22, 23, 24, 25]
    assert part.context.rows == rows[1:] and part.context.forward_id == 3
    assert part.context.token_confidence.tolist() == [2, 3, 4, 5]
    assert part.context.token_state.tolist() == [2, 3, 4, 5]


def test_tokens_whose_logits_are_wanted_count_within_the_wanted_part() -> None:
    context = ForwardContext(
        0,
        4,
        tuple(ForwardRow(i, 0, 0, Phase.DENOISE, 4) for i in range(3)),
        np.ones(12, dtype=np.float32),
        np.zeros(12, dtype=np.uint8),
    )
    segments = (
        Segment(new_kv(), 4, True, 0, torch.tensor([1, 3])),
        Segment(new_kv(), 4, False, 0, torch.tensor([], dtype=torch.int64)),
        Segment(new_kv(), 4, True),
    )
    batch = ForwardBatch(torch.arange(12), torch.arange(12), segments, context)
    for each in (batch, batch.wanted_part()):
        tokens = each.logit_tokens()
        assert tokens is not None and tokens.tolist() == [1, 3, 4, 5, 6, 7]
