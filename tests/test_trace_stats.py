"""Trace statistics against plain loops over small traces."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from oled_moe.synthesis import SynthesisParams, synthesize
from oled_moe.trace_stats import (
    KINDS,
    Overlap,
    TraceRows,
    activation,
    describe_trace,
    hidden_cosine,
    overlap_at_boundaries,
    overlap_by_gap,
    routing_consistency,
    routing_stability,
)
from oled_moe.traces import RoutingTrace

SMALL = SynthesisParams(
    num_layers=2,
    num_experts=12,
    top_k=3,
    block_length=4,
    num_requests=3,
    prompt_tokens=6,
    answer_tokens=14,
    threshold=0.9,
)


@pytest.fixture(scope="module", params=[1, 2])
def trace(request: pytest.FixtureRequest) -> RoutingTrace:
    return synthesize(SMALL, batch_size=request.param, seed=5)


def experts_of(trace: RoutingTrace, row: int, layer: int) -> set[int]:
    start, end = trace.row_token_offset[row : row + 2]
    return set(trace.expert_ids[start:end, layer].ravel().tolist()) - {-1}


def denoising_rows(trace: RoutingTrace) -> dict[tuple[int, int], list[int]]:
    blocks: dict[tuple[int, int], list[int]] = {}
    for row in range(trace.num_rows):
        if trace.row_phase[row] == 1:
            key = (int(trace.row_request[row]), int(trace.row_block[row]))
            blocks.setdefault(key, []).append(row)
    return blocks


def brute_overlap(trace: RoutingTrace, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    shares, jaccards = [], []
    for early, late in pairs:
        for layer in range(trace.num_moe_layers):
            before, after = experts_of(trace, early, layer), experts_of(trace, late, layer)
            if before and after:
                shares.append(len(before & after) / len(after))
                jaccards.append(len(before & after) / len(before | after))
    return float(np.mean(shares)), float(np.mean(jaccards))


def check(found: Overlap, trace: RoutingTrace, pairs: list[tuple[int, int]]) -> None:
    assert found.num_pairs == len(pairs) > 0
    assert (found.overlap, found.jaccard) == pytest.approx(brute_overlap(trace, pairs))


def test_overlap_by_gap(trace: RoutingTrace) -> None:
    gaps = overlap_by_gap(TraceRows(trace), 5)
    blocks = denoising_rows(trace)
    assert [found.label for found in gaps] == ["1", "2", "3", "4", "5"]
    for gap in (1, 2):
        pairs = [
            (early, late)
            for rows in blocks.values()
            for early, late in combinations(rows, 2)
            if rows.index(late) - rows.index(early) == gap
        ]
        check(gaps[gap - 1], trace, pairs)
    assert gaps[4] == Overlap("5", 0, None, None)


def test_overlap_at_boundaries(trace: RoutingTrace) -> None:
    blocks = denoising_rows(trace)
    commit = {
        (int(trace.row_request[row]), int(trace.row_block[row])): row
        for row in range(trace.num_rows)
        if trace.row_phase[row] == 2
    }
    follow = [(key, (key[0], key[1] + 1)) for key in blocks if (key[0], key[1] + 1) in blocks]
    to_commit, from_commit, to_first = overlap_at_boundaries(TraceRows(trace))
    check(to_commit, trace, [(blocks[key][-1], row) for key, row in commit.items()])
    check(from_commit, trace, [(commit[key], blocks[after][0]) for key, after in follow])
    check(to_first, trace, [(blocks[key][-1], blocks[after][0]) for key, after in follow])


def test_activation(trace: RoutingTrace) -> None:
    rows = [row for found in denoising_rows(trace).values() for row in found]
    layers = range(trace.num_moe_layers)
    sizes = np.array([[len(experts_of(trace, row, layer)) for layer in layers] for row in rows])
    found = activation(TraceRows(trace))
    assert found.mean == pytest.approx(sizes.mean())
    assert found.ratio == pytest.approx(sizes.mean() / 12)
    assert found.per_layer == pytest.approx(sizes.mean(axis=0).tolist())
    steps = trace.row_step[rows]
    assert found.by_step[1] == pytest.approx(sizes[steps == 1].mean())
    masks = np.array(
        [(trace.token_state[slice(*trace.row_token_offset[r : r + 2])] == 2).sum() for r in rows]
    )
    for many, mean in found.by_masks.items():
        assert mean == pytest.approx(sizes[masks == many].mean())
    assert found.over_one_token == pytest.approx(sizes.mean() / 3)
    assert found.flops_over_one_token == 4
    forwards: dict[int, list[int]] = {}
    for row in range(trace.num_rows):
        forwards.setdefault(int(trace.row_forward[row]), []).append(row)
    unions = [
        len(set().union(*(experts_of(trace, row, layer) for row in members)))
        for members in forwards.values()
        if any(trace.row_phase[row] == 1 for row in members)
        for layer in layers
    ]
    assert found.union == pytest.approx(np.mean(unions))


def test_stability(trace: RoutingTrace) -> None:
    """By hand: every token of every pair of following steps of a block."""
    seen: dict[str, list[tuple[float, list[int]]]] = {label: [] for label in ("all", *KINDS)}
    for rows in denoising_rows(trace).values():
        for early, late in zip(rows, rows[1:], strict=False):
            for i in range(4):
                a, b = trace.row_token_offset[early] + i, trace.row_token_offset[late] + i
                kept = [
                    len(set(trace.expert_ids[a, layer]) & set(trace.expert_ids[b, layer]))
                    for layer in range(2)
                ]
                kind = KINDS[2]
                if trace.token_state[a] == 2:
                    kind = KINDS[int(trace.token_accepted[a])]
                for label in ("all", kind):
                    seen[label].append((float(trace.token_confidence[a]), kept))
    for found in routing_stability(trace):
        tokens = seen[found.label]
        assert found.num_tokens == len(tokens) > 0
        values = np.array([kept for _, kept in tokens]) / 3
        assert found.mean == pytest.approx(values.mean())
        bins = np.array([min(int(confidence * 10), 9) for confidence, _ in tokens])
        for bin_id in range(10):
            here = values[bins == bin_id]
            table = found.table[bin_id]
            assert found.counts[bin_id] == len(here)
            if not len(here):
                assert found.means[bin_id] is None and table is None
                continue
            assert found.means[bin_id] == pytest.approx(here.mean())
            assert table is not None and sum(table) == pytest.approx(1)
            assert table[3] == pytest.approx((here == 1).mean())
        confidences = np.array([confidence for confidence, _ in tokens])
        expected = np.corrcoef(confidences, values.mean(axis=1))[0, 1]
        assert found.correlation == pytest.approx(expected)


def test_consistency(trace: RoutingTrace) -> None:
    rows = [row for found in denoising_rows(trace).values() for row in found]
    counts = np.zeros((len(rows), 2, 12), dtype=int)
    for index, row in enumerate(rows):
        for token in range(*trace.row_token_offset[row : row + 2]):
            for layer in range(2):
                counts[index, layer, trace.expert_ids[token, layer]] += 1

    def f1(counts: np.ndarray, least: int) -> float:
        taken = counts >= least
        return 2 * counts[taken].sum() / (4 * taken.sum() + counts.sum())

    found = routing_consistency(TraceRows(trace))
    assert found.srp == pytest.approx(max(f1(counts, least) for least in range(1, 5)))
    for layer, value in enumerate(found.srp_per_layer):
        assert value == pytest.approx(max(f1(counts[:, layer], least) for least in range(1, 5)))
    assert list(found.sch) == [3, 6]
    for size, share in found.sch.items():
        best = np.sort(counts, axis=2)[:, :, -size:].sum()
        assert share == pytest.approx(best / counts.sum())
    blocks: dict[tuple[int, int], np.ndarray] = {}
    for index, row in enumerate(rows):
        key = (int(trace.row_request[row]), int(trace.row_block[row]))
        blocks[key] = blocks.get(key, 0) + counts[index]
    by_block = np.array(list(blocks.values()))
    for size, share in found.block_sch.items():
        assert share == pytest.approx(np.sort(by_block, axis=2)[:, :, -size:].sum() / counts.sum())


def test_hidden_cosine() -> None:
    trace = synthesize(SMALL)
    assert hidden_cosine(trace) is None
    before = trace.previous_token()
    cosine = np.full((trace.num_tokens, 2), np.nan, dtype=np.float32)
    cosine[before >= 0] = (0.5, 0.7)
    kind = trace.token_accepted[before] == 1
    cosine[(before >= 0) & kind] = (0.1, 0.1)
    found = hidden_cosine(replace(trace, hidden_cosine=cosine))
    assert found is not None
    assert found.by_kind["just accepted"] == pytest.approx(0.1)
    assert found.by_kind["still masked"] == pytest.approx(0.6)
    assert found.by_kind["long fixed"] == pytest.approx(0.6)
    assert 0.1 < found.mean < 0.6


@pytest.mark.parametrize(
    "change",
    [
        lambda params: replace(params, num_layers=1, num_experts=2, top_k=1),
        lambda params: replace(params, num_experts=3),
        lambda params: replace(params, block_length=1, num_requests=1),
        lambda params: replace(params, prompt_tokens=0, answer_tokens=1, num_requests=1),
        lambda params: replace(params, block_length=64, answer_tokens=64),
    ],
)
def test_every_shape_is_described_in_json(
    change: Callable[[SynthesisParams], SynthesisParams],
) -> None:
    stats = describe_trace(synthesize(change(SMALL)))
    assert stats is not None
    json.dumps(stats.to_dict(), allow_nan=False)


def test_a_trace_that_only_prefills_has_no_statistics() -> None:
    trace = synthesize(SMALL)
    phase = np.zeros_like(trace.row_phase)
    assert describe_trace(replace(trace, row_phase=phase)) is None


def test_means_go_by_the_groups_there_are() -> None:
    from oled_moe.trace_stats import _group_means, _means_by

    groups, values = np.array([0, 2**31 - 1, 0]), np.array([1.0, 5.0, 3.0])
    assert _means_by(groups, values) == {0: 2.0, 2**31 - 1: 5.0}
    # A step that no block can have is not told one by one.
    assert _group_means(groups, values)[0] == 2.0 and len(_group_means(groups, values)) < 2000
