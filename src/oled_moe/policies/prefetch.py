"""Which experts are copied ahead of the layers that will want them.

A PrefetchPolicy guesses; the cache finds slots and drops what is there already. By default a
guess waits in a staging slot and enters the retention rule only when its layer demands it.
"""

from typing import Protocol

from oled_moe.types import FloatArray, ForwardContext, IntArray, LayerDemand


class PrefetchPolicy(Protocol):
    """Names experts of layers to come.

    `fills_pool`: a guess takes one of its layer's own slots at once, and some resident's place,
    as in MoE-Infinity and FineMoE; otherwise it waits in a staging slot. `most_beside_cpu`: with
    CPU experts, most guesses into staging at a time; one whose copy has not begun when its layer
    wants it has to be copied then, where the CPU might have been quicker.
    """

    fills_pool: bool
    most_beside_cpu: int

    def predict(self, context: ForwardContext, demand: LayerDemand | None) -> IntArray:
        """Experts to copy now, int64 [N] as layer · E + expert, most urgent first.

        Called before the first layer (`demand` None) and once for each demand, after the
        retention policy has observed it; never names the demand's own layer. Residents may be
        named and are skipped; what finds no slot is dropped.
        """
        ...

    def victim_scores(self) -> FloatArray:
        """Scores [L, E]: with `fills_pool`, a guess takes the place of its layer's lowest-scored
        resident; infinity protects. With a global scope, of the lowest of all layers.
        """
        ...
