"""Slots and staging from what was asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_moe.errors import ConfigError
from oled_moe.sizing import MAX_STAGING, slots_of_budget, slots_of_layers, staging_beside
from oled_moe.types import MoeShape

SHAPE = MoeShape(num_layers=3, num_experts=8, top_k=2, expert_bytes=100)


def test_a_mean_may_be_a_fraction() -> None:
    assert [slots_of_layers(mean, SHAPE) for mean in (0, 0.34, 2.5, 8)] == [0, 1, 8, 24]


@pytest.mark.parametrize("mean", [-0.1, 8.01, float("nan"), float("inf")])
def test_a_mean_no_layer_can_have(mean: float) -> None:
    with pytest.raises(ConfigError, match="allowed: 0 to 8"):
        slots_of_layers(mean, SHAPE)


@given(num_slots=st.integers(0, 24))
def test_staging_is_there_unless_all_fit(num_slots: int) -> None:
    staging = staging_beside(num_slots, SHAPE)
    assert (staging == 0) == (num_slots == 24)
    assert staging <= min(MAX_STAGING, 24 - num_slots)


@given(budget=st.integers(100, 4000))
def test_a_budget_holds_slots_and_staging(budget: int) -> None:
    slots, staging = slots_of_budget(budget, SHAPE)
    assert (slots + staging) * 100 == min(budget // 100, 24) * 100
    assert (staging == 0) == (slots == 24)
