"""Keys and values of one sequence: those of finished blocks, and room for the block at work.

Legend: G key/value heads, S positions, H head size, N tokens of one forward.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class SequenceKv:
    """K/V of `capacity` positions in every layer; layers may differ in heads and their size.

    A forward writes behind the finished part (`layers.write_kv`), what a later one replaces;
    `advance` makes what was written last part of it.
    Units: positions. Memory is touched only where something was written.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int | Sequence[int],
        head_size: int | Sequence[int],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        heads = [num_heads] * num_layers if isinstance(num_heads, int) else num_heads
        sizes = [head_size] * num_layers if isinstance(head_size, int) else head_size
        self._layers = [
            (
                torch.empty((count, capacity, size), dtype=dtype, device=device),
                torch.empty((count, capacity, size), dtype=dtype, device=device),
            )
            for count, size in zip(heads, sizes, strict=True)
        ]
        self.capacity = capacity
        self.length = 0

    @property
    def device(self) -> torch.device:
        return self._layers[0][0].device

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions of a layer, [G, S, H] each."""
        return self._layers[layer]

    def written(self, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the finished part and `num_tokens` behind it, [G, S, H] each."""
        end = self.length + num_tokens
        keys_GSH, values_GSH = self._layers[layer]
        return keys_GSH[:, :end], values_GSH[:, :end]

    def move_behind(self, start: int, num_tokens: int) -> None:
        """Put `num_tokens` positions from `start` on behind all others, which close the gap.

        Attention asks for no order: where a key stands in its sequence is in the key itself.
        """
        for part_GSH in (part for pair in self._layers for part in pair):
            part_GSH[:, start:] = part_GSH[:, start:].roll(-num_tokens, dims=1)

    def advance(self, num_tokens: int) -> None:
        """Make the `num_tokens` positions written last part of the finished ones."""
        self.length += num_tokens
        assert self.length <= self.capacity

    def clear(self) -> None:
        """Nothing is finished any more."""
        self.length = 0
