"""The memory plan: sums, every kind of budget, and errors whose advice works when followed."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oled_moe.config import EngineConfig, parse_size
from oled_moe.errors import ConfigError, DoesNotFitError
from oled_moe.memory import (
    GPU_RESERVE_BYTES,
    GpuMemoryPlan,
    MemoryPlan,
    ModelMemory,
    plan_gpu_memory,
    plan_memory,
    process_memory_bytes,
)
from oled_moe.sizing import MAX_STAGING
from oled_moe.types import MoeShape

MIB = 2**20
SHAPE = MoeShape(num_layers=4, num_experts=16, top_k=2, expert_bytes=MIB)
MODEL = ModelMemory(
    process_bytes=100 * MIB,
    dense_bytes=20 * MIB,
    kv_bytes=8 * MIB,
    activation_bytes=4 * MIB,
    buffer_bytes=2 * MIB,
    host_expert_bytes=0,
)
PLENTY = 10**15


def plan_of(config: EngineConfig, *, usable_bytes: int = PLENTY) -> MemoryPlan:
    return plan_memory(config, SHAPE, MODEL, usable_bytes=usable_bytes)


def test_parts_add_up() -> None:
    model = replace(MODEL, host_expert_bytes=64 * MIB)
    plan = plan_memory(EngineConfig(experts_per_layer=4), SHAPE, model, usable_bytes=PLENTY)
    lines = plan.lines()
    assert lines[-1] == ("total", plan.total_bytes)
    assert sum(num_bytes for _, num_bytes in lines[:-1]) == plan.total_bytes
    assert model.total_bytes == 198 * MIB
    assert plan.total_bytes == model.total_bytes + plan.expert_memory_bytes
    assert plan.expert_memory_bytes == (plan.num_slots + plan.num_staging) * MIB
    text = "\n".join(what for what, _ in lines)
    assert "16 of 64 experts, 4 per layer" in text and "behind the emulated device" in text


def test_lines_leave_out_what_is_empty() -> None:
    lines = plan_of(EngineConfig(experts_per_layer=16)).lines()
    assert not any("emulated" in what for what, _ in lines)
    assert ("staging slots: 0", 0) in lines


@pytest.mark.parametrize(
    ("asked", "num_slots"), [(0, 0), (0.25, 1), (1, 4), (2.5, 10), (15.75, 63), (16, 64)]
)
def test_experts_per_layer_are_slots_and_staging_comes_on_top(asked: float, num_slots: int) -> None:
    plan = plan_of(EngineConfig(experts_per_layer=asked))
    assert plan.num_slots == num_slots
    assert plan.holds_all_experts == (num_slots == 64)
    assert (plan.num_staging == 0) == plan.holds_all_experts
    assert plan.num_slots + plan.num_staging <= 64


def test_experts_per_layer_has_a_limit() -> None:
    with pytest.raises(ConfigError, match="experts_per_layer is 16.5; allowed: 0 to 16"):
        plan_of(EngineConfig(experts_per_layer=16.5))


@pytest.mark.parametrize(
    ("asked", "num_all"),
    [(MIB, 1), ("2MiB", 2), (10 * MIB + 5, 10), ("25%", 16), ("100%", 64), ("1GiB", 64)],
)
def test_expert_memory_is_slots_and_staging_together(asked: int | str, num_all: int) -> None:
    plan = plan_of(EngineConfig(expert_memory=asked))
    assert plan.num_slots + plan.num_staging == num_all
    assert (plan.num_staging == 0) == (num_all == 64)


def test_memory_is_everything() -> None:
    plan = plan_of(EngineConfig(memory="150MiB"))
    assert plan.num_slots + plan.num_staging == 150 - 134
    assert plan.total_bytes == 150 * MIB
    assert plan_of(EngineConfig(memory="1GiB")).holds_all_experts


def test_percent_of_memory_is_a_share_of_what_there_is() -> None:
    # 100 MiB are held already, 200 MiB are free.
    plan = plan_of(EngineConfig(memory="50%"), usable_bytes=200 * MIB)
    assert plan.total_bytes == 150 * MIB


def test_without_a_budget_something_is_left_free() -> None:
    plan = plan_of(EngineConfig(), usable_bytes=60 * MIB)
    assert plan.num_slots + plan.num_staging == 48 - 34
    assert plan_of(EngineConfig(), usable_bytes=PLENTY).holds_all_experts
    # Where the share leaves none, one slot is tried if it fits at all.
    plan = plan_of(EngineConfig(), usable_bytes=36 * MIB)
    assert plan.num_slots + plan.num_staging == 1


def number_in(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def test_too_little_for_one_expert() -> None:
    for asked in (0, MIB - 1, "0%", "1%"):
        with pytest.raises(DoesNotFitError, match="expert_memory is ") as error:
            plan_of(EngineConfig(expert_memory=asked))
        least = number_in(r"raise it to (\w+)", str(error.value))
        assert plan_of(EngineConfig(expert_memory=least)).num_staging == 1


@given(st.integers(1, 10**9))
def test_memory_too_small_says_how_much_is_needed(dense_bytes: int) -> None:
    model = replace(MODEL, dense_bytes=dense_bytes)
    with pytest.raises(DoesNotFitError, match="^memory is ") as error:
        plan_memory(EngineConfig(memory=1), SHAPE, model, usable_bytes=PLENTY)
    least = number_in(r"raise memory to (\w+)", str(error.value))
    plan = plan_memory(EngineConfig(memory=least), SHAPE, model, usable_bytes=PLENTY)
    assert plan.num_staging == 1 and plan.num_slots == 0


SHAPES = st.builds(
    MoeShape,
    num_layers=st.integers(1, 12),
    num_experts=st.integers(1, 40),
    top_k=st.just(1),
    expert_bytes=st.integers(1, 10**7),
)


@given(
    shape=SHAPES,
    usable=st.integers(1, 10**10),
    name=st.sampled_from(["experts_per_layer", "expert_memory", "memory"]),
)
def test_advice_works_when_followed(shape: MoeShape, usable: int, name: str) -> None:
    asked = {
        "experts_per_layer": shape.num_experts,
        "expert_memory": "100%",
        "memory": MODEL.total_bytes + shape.num_experts_total * shape.expert_bytes,
    }
    config = EngineConfig(**{name: asked[name]})
    try:
        plan = plan_memory(config, shape, MODEL, usable_bytes=usable)
    except DoesNotFitError as error:
        text = str(error)
    else:
        assert plan.total_bytes - MODEL.process_bytes <= usable
        return
    assert "force" in text
    forced = plan_memory(replace(config, force=True), shape, MODEL, usable_bytes=usable)
    assert forced.holds_all_experts
    if "max_model_len" in text:
        least = MODEL.total_bytes - MODEL.process_bytes + shape.expert_bytes
        assert usable < least
        return
    if "instead of experts_per_layer" in text:
        name = "expert_memory"
        number = number_in(r"give expert_memory (\w+)", text)
    else:
        number = number_in(rf"lower {name} to ([\w.]+)", text)
    value = float(number) if name == "experts_per_layer" else number
    plan_memory(EngineConfig(**{name: value}), shape, MODEL, usable_bytes=usable)


@given(shape=SHAPES, share=st.floats(0, 1), usable=st.integers(0, 10**10))
def test_capacity_never_exceeds_the_budget(shape: MoeShape, share: float, usable: int) -> None:
    budget = int(share * 1.2 * shape.num_experts_total * shape.expert_bytes)
    assume(budget >= shape.expert_bytes)
    layers = min(share * shape.num_experts, shape.num_experts)
    for config in (
        EngineConfig(expert_memory=budget, force=True),
        EngineConfig(memory=MODEL.total_bytes + budget, force=True),
        EngineConfig(experts_per_layer=layers, force=True),
        EngineConfig(force=True),
    ):
        plan = plan_memory(config, shape, MODEL, usable_bytes=usable)
        if config.expert_memory is not None or config.memory is not None:
            assert plan.expert_memory_bytes <= budget
        if config.experts_per_layer is not None:
            assert abs(plan.num_slots - layers * shape.num_layers) <= 0.5
        assert plan.num_slots >= 0 and 0 <= plan.num_staging <= MAX_STAGING
        assert plan.num_slots + plan.num_staging <= shape.num_experts_total
        # What is not resident must have somewhere to stream through.
        assert (plan.num_staging == 0) == plan.holds_all_experts


def test_process_memory() -> None:
    assert MIB < process_memory_bytes() < parse_size("ram", "1TiB")


# A GPU and the RAM behind it

FREE = GPU_RESERVE_BYTES + 32 * MIB


def gpu_plan(
    config: EngineConfig | None = None, *, gpu: int = FREE + 16 * MIB, ram: int = PLENTY
) -> GpuMemoryPlan:
    return plan_gpu_memory(config or EngineConfig(), SHAPE, MODEL, gpu_bytes=gpu, ram_bytes=ram)


def test_gpu_parts_add_up() -> None:
    plan = gpu_plan(ram=140 * MIB)
    for lines, total in (
        (plan.gpu_lines(), plan.gpu.total_bytes),
        (plan.ram_lines(), plan.ram_bytes),
    ):
        assert lines[-1] == ("total", total)
        assert sum(size for _, size in lines[:-1]) == total
    # Dense weights, K/V and activations are on the GPU, the program and its buffers in RAM.
    assert plan.gpu.model.process_bytes == GPU_RESERVE_BYTES
    assert plan.gpu.model.buffer_bytes == 0 and plan.host_process_bytes == 100 * MIB
    assert (plan.num_pinned, plan.num_on_disk) == (38, 26)
    assert plan.bounce_bytes == MODEL.buffer_bytes
    # All of the GPU is taken: nobody else uses it.
    assert plan.gpu.num_slots + plan.gpu.num_staging == 16


def test_ram_that_holds_all_needs_no_buffers() -> None:
    plan = gpu_plan(ram=164 * MIB)
    assert (plan.num_pinned, plan.num_on_disk, plan.bounce_bytes) == (64, 0, 0)
    assert plan.pinned_bytes == 64 * MIB


@pytest.mark.parametrize("gpu", [1, GPU_RESERVE_BYTES, FREE])
def test_a_gpu_too_small_is_told(gpu: int) -> None:
    with pytest.raises(DoesNotFitError):
        gpu_plan(gpu=gpu)


def test_ram_too_small_for_the_program_is_told() -> None:
    with pytest.raises(DoesNotFitError, match="raise ram"):
        gpu_plan(ram=50 * MIB)
    assert gpu_plan(EngineConfig(force=True), ram=50 * MIB).num_pinned == 0


@pytest.mark.parametrize(
    ("config", "num_slots"),
    [
        (EngineConfig(experts_per_layer=2), 8),
        (EngineConfig(expert_memory="12MiB"), 11),
        (EngineConfig(memory=FREE + 10 * MIB), 9),
    ],
)
def test_budgets_are_those_of_the_gpu(config: EngineConfig, num_slots: int) -> None:
    assert gpu_plan(config, gpu=FREE + 64 * MIB).gpu.num_slots == num_slots


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 50))
def test_more_memory_never_holds_less(gpu: int, ram: int, more: int) -> None:
    few = gpu_plan(gpu=FREE + (2 + gpu) * MIB, ram=(102 + ram) * MIB)
    more_gpu = gpu_plan(gpu=FREE + (2 + gpu + more) * MIB, ram=(102 + ram) * MIB)
    more_ram = gpu_plan(gpu=FREE + (2 + gpu) * MIB, ram=(102 + ram + more) * MIB)
    assert more_gpu.gpu.num_slots >= few.gpu.num_slots
    assert more_ram.num_pinned >= few.num_pinned
    assert few.ram_bytes <= (102 + ram) * MIB and few.gpu.total_bytes <= FREE + (2 + gpu) * MIB
