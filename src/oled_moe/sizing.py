"""How many slots and staging slots a request for expert memory makes; engine and simulator agree.

A mean of experts per layer is for slots alone, staging comes on top; bytes are for both.
"""

from oled_moe.errors import ConfigError
from oled_moe.types import MoeShape

# Staging slots: enough for several reads in flight, never a large part of a small cache.
MAX_STAGING = 8
_SLOTS_PER_STAGING = 16


def slots_of_layers(experts_per_layer: float, shape: MoeShape) -> int:
    """Slots over all layers for a mean of `experts_per_layer`, which may be a fraction.

    Raises: ConfigError for a mean that no layer can have.
    """
    if not 0 <= experts_per_layer <= shape.num_experts:
        raise ConfigError(
            f"experts_per_layer is {experts_per_layer:g}; allowed: 0 to {shape.num_experts}, "
            "the experts of one layer"
        )
    return round(experts_per_layer * shape.num_layers)


def staging_beside(num_slots: int, shape: MoeShape) -> int:
    """Staging slots that come on top of `num_slots`; none where every expert has a slot."""
    missing = shape.num_experts_total - num_slots
    return min(missing, MAX_STAGING, max(2, num_slots // _SLOTS_PER_STAGING))


def slots_of_budget(budget_bytes: int, shape: MoeShape) -> tuple[int, int]:
    """(slots, staging slots) that `budget_bytes` hold together; one slot at least must fit."""
    total = shape.num_experts_total
    num_all = min(budget_bytes // shape.expert_bytes, total)
    if num_all == total:
        return total, 0
    num_staging = min(MAX_STAGING, max(1, num_all // _SLOTS_PER_STAGING))
    return num_all - num_staging, num_staging
