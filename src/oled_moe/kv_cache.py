"""Keys and values of one sequence: those of finished blocks, and room for the block at work.

Legend: G key/value heads, S positions, H head size, N tokens of one forward.
"""

import torch
from torch import Tensor


class SequenceKv:
    """K/V of `capacity` positions in every layer.

    A forward writes behind the finished part (`layers.write_kv`), what a later one replaces;
    `advance` makes what was written last part of it.
    Units: positions. Memory is touched only where something was written.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        shape = (num_layers, num_heads, capacity, head_size)
        self._keys_LGSH = torch.empty(shape, dtype=dtype, device=device)
        self._values_LGSH = torch.empty(shape, dtype=dtype, device=device)
        # Views of each layer: making them anew costs more than what is done with them.
        self._layers = list(zip(self._keys_LGSH, self._values_LGSH, strict=True))
        self.length = 0

    @property
    def capacity(self) -> int:
        return self._keys_LGSH.shape[2]

    @property
    def device(self) -> torch.device:
        return self._keys_LGSH.device

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions of a layer, [G, S, H] each."""
        return self._layers[layer]

    def written(self, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the finished part and `num_tokens` behind it, [G, S, H] each."""
        end = self.length + num_tokens
        return self._keys_LGSH[layer, :, :end], self._values_LGSH[layer, :, :end]

    def move_behind(self, start: int, num_tokens: int) -> None:
        """Put `num_tokens` positions from `start` on behind all others, which close the gap.

        Attention asks for no order: where a key stands in its sequence is in the key itself.
        """
        for values_LGSH in (self._keys_LGSH, self._values_LGSH):
            values_LGSH[:, :, start:] = values_LGSH[:, :, start:].roll(-num_tokens, dims=2)

    def advance(self, num_tokens: int) -> None:
        """Make the `num_tokens` positions written last part of the finished ones."""
        self.length += num_tokens
        assert self.length <= self.capacity

    def clear(self) -> None:
        """Nothing is finished any more."""
        self.length = 0
