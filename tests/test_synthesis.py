"""The generator: the paper's statistics, the engine's forms, the same seed the same trace."""

from typing import Any

import numpy as np
import pytest

from oled_moe.errors import ConfigError
from oled_moe.synthesis import PRESETS, WORKLOADS, SynthesisParams, synthesize
from oled_moe.trace_stats import TraceStats, describe_trace
from oled_moe.traces import RoutingTrace, load_trace, save_trace
from oled_moe.types import Phase, TokenState

TINY: dict[str, Any] = {
    "num_layers": 2,
    "num_experts": 8,
    "top_k": 2,
    "block_length": 4,
    "num_requests": 3,
    "prompt_tokens": 6,
    "answer_tokens": 10,
}


def stats_of(preset: str, seed: int, **changes: Any) -> TraceStats:
    stats = describe_trace(synthesize(preset, seed=seed, **changes))
    assert stats is not None
    return stats


@pytest.mark.parametrize(("preset", "num_active"), [("llada2-mini", 60), ("llada2-flash", 90)])
@pytest.mark.parametrize("seed", [0, 1])
def test_presets_have_the_papers_statistics(preset: str, num_active: int, seed: int) -> None:
    """policies.md 9.10, and the shares of figure 10b."""
    stats = stats_of(preset, seed, num_requests=6, prompt_tokens=32)
    overall = stats.stability[0]
    low, high = overall.means[0], overall.means[9]
    assert low is not None and abs(low - 0.60) < 0.03
    assert high is not None and abs(high - 0.81) < 0.03
    means = [mean for mean in overall.means if mean is not None]
    assert all(later > earlier - 0.02 for earlier, later in zip(means, means[1:], strict=False))
    adjacent, boundary = stats.gaps[0].overlap, stats.boundaries[1].overlap
    assert adjacent is not None and 0.85 <= adjacent <= 0.90
    assert boundary is not None and boundary >= 0.65
    assert abs(stats.activation.mean - num_active) < 3
    layers = [value for value in stats.activation.per_layer if value is not None]
    assert max(layers) - min(layers) > 10
    overlaps = [gap.overlap for gap in stats.gaps[:6] if gap.overlap is not None]
    assert overlaps == sorted(overlaps, reverse=True)
    first, last = overall.table[0], overall.table[9]
    assert first is not None and abs(first[-1] - 0.13) < 0.04
    assert last is not None and abs(last[-1] - 0.42) < 0.08


def test_state_matters_as_parameterised() -> None:
    """A token that was just accepted keeps less, all else being equal."""
    flat = stats_of("llada2-mini", 0, num_layers=4, num_requests=3, flip=0.0, settle=0.0)
    steep = stats_of("llada2-mini", 0, num_layers=4, num_requests=3, flip=0.6)
    for stats, least, most in ((flat, -0.03, 0.03), (steep, 0.4, 0.8)):
        _, masked, accepted, _ = stats.stability
        assert masked.means[9] is not None and accepted.means[9] is not None
        assert least < masked.means[9] - accepted.means[9] < most


def test_workloads_differ_as_in_figure_4a() -> None:
    found = stats_of("llada2-mini", 0, num_requests=9, num_layers=8).workloads
    assert found["math"] < found["quiz"] < found["code"]
    assert found["code"] / found["math"] == pytest.approx(25.5 / 22.6, abs=0.06)


def test_same_seed_same_trace() -> None:
    one, two = synthesize(**TINY), synthesize(**TINY)
    assert one.header() == two.header()
    for name, array in one.tensors().items():
        np.testing.assert_array_equal(array, two.tensors()[name])
    other = synthesize(**TINY, seed=1)
    assert other.expert_ids.shape != one.expert_ids.shape or (
        (other.expert_ids != one.expert_ids).any()
    )


def test_a_batch_holds_the_same_requests() -> None:
    """Who shares a forward changes nothing but the order of rows."""
    single, batch = synthesize(**TINY), synthesize(**TINY, batch_size=2)
    assert batch.num_forwards < single.num_forwards == single.num_rows == batch.num_rows
    for index in range(3):
        one, two = single.select_requests([index]), batch.select_requests([index])
        np.testing.assert_array_equal(one.expert_ids, two.expert_ids)
        np.testing.assert_array_equal(one.token_confidence, two.token_confidence)


def check_like_the_engines(trace: RoutingTrace) -> None:
    """Prefill whole blocks, then steps until no mask is left, then commit but for the last."""
    length = trace.block_length
    for index, request in enumerate(trace.requests):
        one = trace.select_requests([index])
        offset = one.row_token_offset
        num_blocks = -(-(request.num_prompt_tokens + request.num_generated_tokens) // length)
        commits = (one.row_phase == Phase.COMMIT).sum()
        num_prefilled = request.num_prompt_tokens // length
        assert commits == num_blocks - num_prefilled - 1
        assert one.row_phase[-1] == Phase.DENOISE
        for row in range(one.num_rows):
            here = slice(offset[row], offset[row + 1])
            phase, state = one.row_phase[row], one.token_state[here]
            is_skipped = one.expert_ids[here, :, 0] < 0
            assert is_skipped[:, -1].all() == (phase != Phase.DENOISE)
            assert not is_skipped[:, :-1].any()
            assert np.isnan(one.token_confidence[here]).all() == (phase != Phase.DENOISE)
            is_prompt = one.token_position[here] < request.num_prompt_tokens
            assert ((state == TokenState.PROMPT) == is_prompt).all()
            if phase == Phase.DENOISE:
                masked = state == TokenState.MASKED
                assert one.token_accepted[here].sum() >= 1
                confident = masked & (one.token_confidence[here] >= trace.threshold)
                assert (one.token_accepted[here][confident] == 1).all()
                is_last = row + 1 == one.num_rows or one.row_block[row + 1] != one.row_block[row]
                is_last |= row + 1 < one.num_rows and one.row_phase[row + 1] == Phase.COMMIT
                assert (masked.sum() == one.token_accepted[here].sum()) == is_last


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_length": 1},
        {"block_length": 64, "answer_tokens": 100},
        {"prompt_tokens": 0},
        {"num_layers": 1, "num_experts": 2, "top_k": 1},
        {"num_experts": 2, "top_k": 2},
        {"num_experts": 1, "top_k": 1},
        {"batch_size": 5, "workload": "code"},
        {"popularity": 0.0, "topic": 0.0, "role": 0.0},
        {"popularity": 0.5, "topic": 0.5, "role": 0.0},
        {"sharpness": 0.0, "threshold": 1.0, "dispersion": 0.5},
        {"stability_low": 0.0, "stability_high": 1.0, "flip": 1.0},
    ],
)
def test_any_parameters_give_a_valid_trace(changes: dict[str, Any], tmp_path: Any) -> None:
    trace = synthesize(**{**TINY, **changes})
    check_like_the_engines(trace)
    save_trace(trace, tmp_path / "x.trace.safetensors")
    loaded = load_trace(tmp_path / "x.trace.safetensors")
    assert loaded.extra["synthesis"]["seed"] == 0
    assert sum(len(forward.demands) for forward in loaded.forwards(["token_ids"])) > 0


def forwards_of(trace: RoutingTrace) -> list[Any]:
    return list(trace.forwards(["token_ids"]))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_canvas_is_in_every_forward_and_filled_block_by_block(
    batch_size: int, tmp_path: Any
) -> None:
    trace = synthesize(**{**TINY, "is_canvas": True, "batch_size": batch_size})
    save_trace(trace, tmp_path / "x.trace.safetensors")
    assert (load_trace(tmp_path / "x.trace.safetensors").row_phase == Phase.DENOISE).all()
    accepted: dict[int, Any] = {}
    for forward in forwards_of(trace):
        first = 0
        for row in forward.context.rows:
            here = slice(first, first := first + row.num_tokens)
            request = trace.requests[row.request_id]
            length = request.num_prompt_tokens + request.num_generated_tokens
            assert row.num_tokens == length and request.num_generated_tokens % 4 == 0
            states = forward.context.token_state[here]
            is_prompt = np.arange(length) < request.num_prompt_tokens
            assert ((states == TokenState.PROMPT) == is_prompt).all()
            known = accepted.setdefault(row.request_id, np.zeros(length, dtype=bool))
            assert ((states == TokenState.COMMITTED) == known).all()
            # Only the block at work is told of and accepted: the first that holds a mask.
            start = int((states == TokenState.MASKED).argmax())
            start -= (start - request.num_prompt_tokens) % 4
            is_block = (np.arange(length) >= start) & (np.arange(length) < start + 4)
            is_told = ~np.isnan(forward.outcome.token_confidence[here])
            assert (is_told == is_block).all()
            now = forward.outcome.token_accepted[here].astype(bool)
            assert now.any() and not now[~is_block].any()
            known |= now
    assert all(
        known.sum() == trace.requests[i].num_generated_tokens for i, known in accepted.items()
    )


def test_steps_of_so_many_tokens() -> None:
    trace = synthesize(**{**TINY, "is_canvas": True, "tokens_per_step": 3, "block_length": 8})
    for forward in forwards_of(trace):
        num_masked = int((forward.context.token_state == TokenState.MASKED).sum())
        in_block = min(num_masked, (num_masked - 1) % 8 + 1)
        assert forward.outcome.token_accepted.sum() == min(3, in_block)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("sdar-30b", {"num_layers": 6, "num_requests": 2}),
        ("rnd1", {"num_layers": 2, "block_length": 48, "answer_tokens": 48}),
        ("llada-moe-7b", {"num_layers": 3, "num_requests": 1}),
    ],
)
def test_other_presets_reuse_as_the_paper_says(preset: str, changes: dict[str, Any]) -> None:
    """Figure 7 has RND1 and SDAR too; a canvas changes less, for most of it is settled."""
    stats = stats_of(preset, 0, **changes)
    adjacent = stats.gaps[0].overlap
    assert adjacent is not None and adjacent >= (0.85 if PRESETS[preset].is_canvas else 0.70)
    share = stats.activation.mean / PRESETS[preset].num_experts
    assert (share > 0.5) == PRESETS[preset].is_canvas


def test_canvases_of_random_tokens_want_nearly_all_experts() -> None:
    stats = stats_of("diffusion-gemma-26b", 0, num_layers=2, num_requests=1)
    assert stats.activation.mean > 0.85 * PRESETS["diffusion-gemma-26b"].num_experts


def test_a_block_admits_no_more_than_its_capacity() -> None:
    trace = synthesize("llada2.2-flash", num_layers=3, num_requests=1, answer_tokens=64)
    of_block: dict[tuple[int, int], set[int]] = {}
    for forward in forwards_of(trace):
        context = forward.context
        if context.is_prefill:
            continue
        for demand in forward.demands:
            (row,) = context.rows
            of_block.setdefault((row.block_id, demand.layer), set()).update(demand.expert_ids)
    sizes = [len(experts) for experts in of_block.values()]
    assert max(sizes) <= 48 and np.mean(sizes) > 40
    free = synthesize("llada2.2-flash", num_layers=3, num_requests=1, expert_capacity=256)
    assert max(len(d.expert_ids) for f in forwards_of(free) for d in f.demands) > 60


def test_long_prompts_are_prefilled_in_parts() -> None:
    trace = synthesize(**{**TINY, "prompt_tokens": 4000, "num_requests": 1})
    prefills = np.diff(trace.row_token_offset)[trace.row_phase == Phase.PREFILL]
    assert len(prefills) >= 2 and prefills.max() <= 2048


def test_workloads_take_turns() -> None:
    assert [request.workload for request in synthesize(**TINY).requests] == list(WORKLOADS)
    assert {r.workload for r in synthesize(**TINY, workload="quiz").requests} == {"quiz"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_length": 1025}, "block_length is 1025"),
        ({"tokens_per_step": -1}, "tokens_per_step is -1"),
        ({"block_length": 0}, "block_length is 0"),
        ({"top_k": 9}, "top_k is 9"),
        ({"expert_capacity": 1}, "expert_capacity is 1"),
        ({"workload": "poems"}, "workload.*poems"),
        ({"popularity": 0.9}, "sum to 1.6"),
        ({"flip": 1.5}, "flip is 1.5; allowed: 0 to 1"),
        ({"sharpness": float("nan")}, "sharpness is nan"),
        ({"dispersion": 0.0}, "dispersion is 0.0; allowed: more than 0"),
        ({"settle": 2.0}, "settle is 2.0"),
        ({"ease": 99.0}, "ease is 99.0"),
        ({"num_requests": 0}, "num_requests is 0"),
        ({"speed": 1}, "unknown parameter speed"),
    ],
)
def test_wrong_parameters_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthesize(**{**TINY, **changes})


def test_unknown_presets_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="llada2-mini"):
        synthesize("llada3")
    assert isinstance(PRESETS["llada2-flash"], SynthesisParams)
