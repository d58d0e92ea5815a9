"""Predicted speed: arithmetic by hand, invariants, and what makes a machine faster."""

import functools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st

from oled_moe.costs import DEFAULT_PROFILE, HardwareProfile, WeightRate
from oled_moe.errors import ConfigError
from oled_moe.hardware import load_hardware
from oled_moe.prediction import (
    GUESSED_MARGIN,
    MEASURED_MARGIN,
    SPEEDS,
    TEXTS,
    Denoising,
    ModelSizes,
    Prediction,
    Residency,
    Times,
    predict,
    speed_word,
)
from oled_moe.types import MoeShape

pytestmark = pytest.mark.usefixtures("shared_texts")

SHAPE = MoeShape(num_layers=2, num_experts=32, top_k=4, expert_bytes=2**20)
SIZES = ModelSizes(
    shape=SHAPE,
    body_bytes=6 * 2**20,
    head_bytes=4 * 2**20,
    vocab_size=2048,
    kv_bytes_per_token=3072,
    attention_size=3 * 512,
    dtype="bfloat16",
)
ALL = SHAPE.num_experts_total


@functools.cache
def prediction(
    num_slots: int = 32,
    *,
    device: str = "cpu",
    hardware: HardwareProfile = DEFAULT_PROFILE,
    sizes: ModelSizes = SIZES,
    disk_share: float | None = None,
    has_cpu_experts: bool = False,
    **options: Any,
) -> Prediction:
    num_staging = 0 if num_slots == sizes.shape.num_experts_total else 2
    share = (1.0 if device == "cpu" else 0.0) if disk_share is None else disk_share
    residency = Residency(device, num_slots, num_staging, share, has_cpu_experts)
    return predict(sizes, residency, hardware, **{"denoising": Denoising(16), **options})


def is_ordered(found: Prediction) -> bool:
    ranges = (found.ttft, found.tpot, found.forward)
    return all(0 < r.low_s <= r.likely_s <= r.high_s < math.inf for r in ranges)


@pytest.mark.parametrize(
    ("device", "has_cpu_experts"),
    [("cpu", False), ("emulated", True), ("cuda", True), ("cuda", False)],
)
@pytest.mark.parametrize("num_slots", [0, 5, 32, ALL])
def test_ranges_are_ordered_and_json_is_strict(
    device: str, has_cpu_experts: bool, num_slots: int
) -> None:
    hardware = load_hardware("rtx4090-ddr5") if device == "cuda" else DEFAULT_PROFILE
    found = prediction(num_slots, device=device, hardware=hardware, has_cpu_experts=has_cpu_experts)
    assert is_ordered(found)
    assert found.tokens_per_forward[0] < found.tokens_per_forward[1]
    assert [text.text for text in found.texts] == list(TEXTS)
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["speed"] == found.speed and values["speed_limits_s"]["good"] == 0.1


def test_everything_resident_copies_nothing() -> None:
    found = prediction(ALL)
    for text in found.texts:
        assert text.hit_rate == 1 and text.loads_per_forward == 0
        assert text.forward_low_s <= text.forward_high_s
    assert {term.lane for term in found.terms} == {"compute"}
    assert found.bound == "compute"


def test_terms_are_the_forward() -> None:
    found = prediction(32)
    lanes: dict[str, float] = {}
    for term in found.terms:
        lanes[term.lane] = lanes.get(term.lane, 0.0) + term.seconds
        if term.bytes_per_s is not None:
            assert term.num_bytes == pytest.approx(term.bytes_per_s * term.seconds, rel=1e-3, abs=1)
    assert set(lanes) == {"compute", "disk"}
    typical = found.typical
    # Means of maxima are no less than the maximum of means.
    assert typical.forward_low_s >= max(lanes.values()) * (1 - 1e-9)
    # Commits come on top of what a forward takes at most.
    assert typical.forward_high_s >= sum(lanes.values()) * (1 - 1e-9)


def test_lanes_by_hand() -> None:
    rates = {"memory_read_bytes_per_s": 1e10, "matrix_flops_per_s": 1e12}
    times = Times(SIZES, Residency("cpu", 32, 2), replace(DEFAULT_PROFILE, **rates))
    # One row reads 2**20 bytes; at 200 rows, 2**19 weights of two operations each decide.
    assert times.experts_s([1]) == pytest.approx(2**20 / 1e10)
    assert times.experts_s([200]) == pytest.approx(200 * 2 * 2**19 / 1e12)
    assert times.experts_s([1, 200]) == pytest.approx(times.experts_s([1]) + times.experts_s([200]))
    assert times.body_s(1) == pytest.approx(6 * 2**20 / 1e10)
    assert times.copy_s == pytest.approx(1e-4 + 2**20 / 1e9)
    assert times.head_s(0) == 0


def test_affine_times_where_nothing_else_is_known() -> None:
    times = Times(SIZES, Residency("cpu", 32, 2), DEFAULT_PROFILE)
    expected = 2**20 / 1.5e10 + 3 * 2**20 / 2e11
    assert times.experts_s([3]) == pytest.approx(expected)


def test_measured_rates_win_and_are_interpolated() -> None:
    rates = tuple(
        WeightRate("cpu", "expert", "bfloat16", rows, 2**20 / seconds)
        for rows, seconds in ((1, 1e-3), (4, 2e-3), (8, 4e-3))
    )
    times = Times(SIZES, Residency("cpu", 32, 2), replace(DEFAULT_PROFILE, weight_rates=rates))
    assert times.experts_s([1]) == pytest.approx(1e-3)
    assert times.experts_s([6]) == pytest.approx(3e-3)
    # Beyond the last, along the last line.
    assert times.experts_s([16]) == pytest.approx(8e-3)
    # Another dtype's rates are not ours.
    fp32 = replace(SIZES, dtype="float32")
    other = Times(fp32, Residency("cpu", 32, 2), replace(DEFAULT_PROFILE, weight_rates=rates))
    assert other.experts_s([1]) != pytest.approx(1e-3)


def test_a_gpu_profile_reads_from_disk_on_the_cpu() -> None:
    hardware = load_hardware("rtx4090-ddr5")
    cpu = Times(SIZES, Residency("cpu", 32, 2), hardware)
    assert cpu.copy_s == pytest.approx(2**20 / hardware.disk_direct_bytes_per_s)
    cuda = Times(SIZES, Residency("cuda", 32, 2, disk_share=0.5), hardware)
    assert cuda.copy_s < cpu.copy_s
    assert cuda.disk_s == pytest.approx(cpu.copy_s / 2)
    assert cuda.experts_s([1]) < cpu.experts_s([1])


# What is better is never slower


@pytest.mark.parametrize("policy", ["naive-lru", "oled", "oled+"])
def test_more_slots_are_never_slower(policy: str) -> None:
    found = [prediction(slots, policy=policy) for slots in (4, 16, 32, 48, ALL)]
    for few, many in zip(found, found[1:], strict=False):
        for name in ("tpot", "forward"):
            for end in ("low_s", "likely_s", "high_s"):
                assert getattr(getattr(many, name), end) <= getattr(getattr(few, name), end) * 1.01


baseline = functools.cache(functools.partial(prediction, policy="naive-lru"))


@bounded(8)
@given(
    st.sampled_from(["copy_bytes_per_s", "cpu_weight_bytes_per_s", "cpu_token_weight_bytes_per_s"]),
    st.floats(1.5, 20),
    st.sampled_from([0, 7, 32, ALL]),
)
def test_faster_parts_are_never_slower(name: str, factor: float, num_slots: int) -> None:
    before = baseline(num_slots)
    faster = replace(DEFAULT_PROFILE, **{name: factor * getattr(DEFAULT_PROFILE, name)})
    after = prediction(num_slots, policy="naive-lru", hardware=faster)
    for range_name in ("ttft", "tpot", "forward"):
        for end in ("low_s", "likely_s", "high_s"):
            new, old = getattr(after, range_name), getattr(before, range_name)
            assert getattr(new, end) <= getattr(old, end) * (1 + 1e-9)


def test_longer_prompts_wait_longer() -> None:
    waits = [prediction(prompt_tokens=n).ttft.likely_s for n in (1, 16, 64, 4096, 20_000)]
    assert waits == sorted(waits) and waits[-1] > 3 * waits[-2]


def test_experts_on_disk_cost() -> None:
    hardware = load_hardware("rtx4090-ddr5")
    times = [
        prediction(device="cuda", hardware=hardware, disk_share=share).tpot.high_s
        for share in (0.0, 0.3, 1.0)
    ]
    assert times == sorted(times) and times[0] < times[2]


def test_margins_say_how_well_a_machine_is_known() -> None:
    guessed = prediction(ALL)
    measured = prediction(ALL, hardware=replace(DEFAULT_PROFILE, is_measured=True))
    disturbed = prediction(
        ALL, hardware=replace(DEFAULT_PROFILE, is_measured=True, is_disturbed=True)
    )
    assert guessed.margin == GUESSED_MARGIN > disturbed.margin > measured.margin == MEASURED_MARGIN
    assert guessed.tpot.likely_s == measured.tpot.likely_s
    assert guessed.tpot.low_s < measured.tpot.low_s < measured.tpot.high_s < guessed.tpot.high_s
    assert disturbed.notes and "busy" in disturbed.notes[0] and not measured.notes


def test_speed_words() -> None:
    assert [word for _, word in SPEEDS] == ["fast", "good", "usable"]
    assert [speed_word(t) for t in (0.0, 0.02, 0.021, 0.1, 0.5, 0.51)] == [
        "fast", "fast", "good", "good", "usable", "slow",
    ]  # fmt: skip


# Other shapes and policies


@pytest.mark.parametrize("policy", ["fiddler", "ktransformers", "tide", "oled+prefetch"])
def test_policies_of_every_kind(policy: str) -> None:
    assert is_ordered(prediction(16, policy=policy))


def test_a_policy_that_needs_more_than_traces_hold_is_replaced() -> None:
    found = prediction(16, policy="finemoe")
    assert found.policy == "oled" and "oled" in found.notes[0] and "finemoe" in found.notes[0]


@pytest.mark.parametrize("policy", ["no-such", "oled:decay=x", "belady:"])
def test_bad_policies_are_config_errors(policy: str) -> None:
    with pytest.raises(ConfigError):
        prediction(policy=policy)


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="prompt-tokens"):
        prediction(prompt_tokens=0)
    for length in (0, 1025):
        with pytest.raises(ConfigError, match="block_length"):
            Denoising(length)


@pytest.mark.parametrize(
    "shape",
    [
        MoeShape(1, 1, 1, 4096),
        MoeShape(1, 8, 8, 4096),
        MoeShape(64, 16, 2, 4096),
        MoeShape(2, 128, 8, 32 * 2**20),
    ],
)
def test_odd_shapes(shape: MoeShape) -> None:
    found = prediction(shape.num_experts_total // 2, sizes=replace(SIZES, shape=shape))
    assert is_ordered(found)
    assert 0 < found.typical.active_per_layer <= shape.num_experts
    is_large = shape.expert_bytes > 2**24
    assert ("flash" in found.routing) == is_large


# Whole canvases

CANVAS = Denoising(32, canvas_tokens=256, preset="llada-moe-7b")
ONE_BLOCK = Denoising(256, canvas_tokens=256, tokens_per_step=1, preset="rnd1")


def test_a_canvas_takes_prompt_and_answer_in_every_forward() -> None:
    by_block = prediction(ALL, denoising=Denoising(32), prompt_tokens=256)
    found = prediction(ALL, denoising=CANVAS, prompt_tokens=256)
    assert is_ordered(found) and found.canvas_tokens == 256
    # 512 tokens want nearly every expert, 32 tokens fewer.
    assert by_block.typical.active_per_layer < found.typical.active_per_layer
    assert found.typical.active_per_layer > 0.8 * SHAPE.num_experts
    assert found.forward.likely_s > by_block.forward.likely_s
    # Nothing is prefilled: the first forward is like any other.
    assert found.ttft.likely_s == pytest.approx(found.forward.likely_s, rel=0.3)
    longer = prediction(ALL, denoising=CANVAS, prompt_tokens=2048)
    assert longer.forward.likely_s > 1.5 * found.forward.likely_s


def test_steps_that_are_set_say_how_many_forwards_an_answer_takes() -> None:
    found = prediction(ALL, denoising=ONE_BLOCK)
    assert found.tokens_per_forward == (1, 1)
    assert found.typical.tpot_high_s == pytest.approx(found.typical.forward_high_s)
    twice = prediction(ALL, denoising=replace(ONE_BLOCK, tokens_per_step=0.5))
    assert twice.tokens_per_forward == (0.5, 0.5)
    assert twice.tpot.likely_s == pytest.approx(2 * found.tpot.likely_s)


def test_what_is_not_published_of_a_family_is_said() -> None:
    assert any("not published" in note for note in prediction(ALL, denoising=CANVAS).notes)
    assert not prediction(ALL).notes


def test_the_head_is_computed_for_masks_alone() -> None:
    """A block's last forwards have few masks left: less than a head over all its positions."""
    large = replace(SIZES, head_bytes=2**30, vocab_size=2**18, body_bytes=0)
    rates = {"memory_read_bytes_per_s": 1e10, "matrix_flops_per_s": 1e10}
    hardware = replace(DEFAULT_PROFILE, **rates)
    times = Times(large, Residency("cpu", ALL, 0), hardware)
    head = next(
        term.seconds
        for term in prediction(ALL, sizes=large, hardware=hardware).terms
        if "head" in term.what
    )
    assert times.head_s(1) < head < 0.8 * times.head_s(16)


def test_layers_count_in_full() -> None:
    """Only a few layers are replayed; time and loads are those of all."""
    deep = replace(SIZES, shape=MoeShape(40, 32, 4, 2**20), body_bytes=0, head_bytes=0)
    shallow = replace(SIZES, shape=MoeShape(4, 32, 4, 2**20), body_bytes=0, head_bytes=0)
    loads = [
        prediction(sizes.shape.num_layers * 16, sizes=sizes, policy="naive-lru").typical
        for sizes in (deep, shallow)
    ]
    assert loads[0].loads_per_forward == pytest.approx(10 * loads[1].loads_per_forward)
    assert loads[0].hit_rate == pytest.approx(loads[1].hit_rate)


def test_a_canvas_of_random_tokens_takes_its_steps_and_all_its_logits() -> None:
    random = Denoising(256, tokens_per_step=256 / 48, preset="diffusion-gemma-26b", is_random=True)
    found = prediction(ALL, denoising=random, prompt_tokens=100)
    assert is_ordered(found) and found.tokens_per_forward == (256 / 48, 256 / 48)
    assert found.typical.active_per_layer > 0.9 * SHAPE.num_experts
    assert any("every step that it may" in note for note in found.notes)
    # The head's matrix twice, each time for all of the canvas.
    (head,) = (term for term in found.terms if "head" in term.what)
    times = Times(SIZES, Residency("cpu", ALL, 0), DEFAULT_PROFILE)
    assert head.seconds == pytest.approx(2 * times.head_s(256))
    # A prompt shorter than a canvas is read ahead all the same.
    first = times.experts_s([SHAPE.top_k * 256 / SHAPE.num_experts] * ALL) + head.seconds
    assert found.ttft.likely_s > first


def test_block_routing_bounds_what_a_forward_wants() -> None:
    free = prediction(16, denoising=Denoising(32))
    bound = prediction(16, denoising=Denoising(32, expert_capacity=9))
    assert bound.typical.active_per_layer <= 9 < free.typical.active_per_layer
    assert bound.typical.loads_per_forward < free.typical.loads_per_forward


# Quantised experts

PACKED = replace(
    SIZES,
    shape=replace(SHAPE, expert_bytes=2**18),
    expert_form="int4-g64",
    plain_expert_bytes=2**20,
)


def test_packed_experts_read_their_own_bytes_and_compute_as_much() -> None:
    here = Residency("cpu", 32, 2)
    affine = Times(PACKED, here, DEFAULT_PROFILE)
    assert affine.experts_s([3]) == pytest.approx(2**18 / 1.5e10 + 3 * 2**20 / 2e11)
    assert affine.copy_s == pytest.approx(1e-4 + 2**18 / 1e9)
    rates = {"memory_read_bytes_per_s": 1e10, "matrix_flops_per_s": 1e12}
    roof = Times(PACKED, here, replace(DEFAULT_PROFILE, **rates))
    assert roof.experts_s([1]) == pytest.approx(2**18 / 1e10)
    assert roof.experts_s([200]) == pytest.approx(200 * 2 * 2**19 / 1e12)
    by_rows = tuple(
        WeightRate("cpu", "expert", "bfloat16", rows, 2**20 / seconds)
        for rows, seconds in ((1, 1e-3), (4, 0.9e-3), (8, 4e-3))
    )
    known = Times(PACKED, here, replace(DEFAULT_PROFILE, weight_rates=by_rows))
    assert known.experts_s([1]) == pytest.approx(0.25e-3)
    # 3 ms more than one row takes, as for bfloat16; noise takes nothing off.
    assert known.experts_s([8]) == pytest.approx(0.25e-3 + 3e-3)
    assert 0.2e-3 < known.experts_s([4]) <= 0.25e-3


def test_rates_of_the_form_itself_win_and_say_so() -> None:
    own = WeightRate("cpu", "expert", "int4-g64", 1, 2**18 / 7e-3)
    hardware = replace(DEFAULT_PROFILE, weight_rates=(own,))
    assert Times(PACKED, Residency("cpu", 32, 2), hardware).experts_s([1, 1]) == pytest.approx(
        0.014
    )
    words = "how fast experts of int4-g64 are computed was not measured"
    assert any(words in note for note in prediction(sizes=PACKED).notes)
    assert not any(words in note for note in prediction(sizes=PACKED, hardware=hardware).notes)
    with pytest.raises(ConfigError, match="dtype"):
        replace(own, operation="dense")
    with pytest.raises(ConfigError, match="dtype"):
        replace(own, dtype="int5-g64")


def test_a_pack_is_predicted_on_its_models_routing() -> None:
    large = replace(PACKED, plain_expert_bytes=2**25)
    assert "llada2-flash" in prediction(sizes=large).routing
