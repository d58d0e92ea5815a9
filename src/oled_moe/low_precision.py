"""The second model of `lossy mixed`: a pack of the same checkpoint in a lower precision.

Of it the engine takes the experts alone. That it belongs to the model is shown by its sizes, from
headers, and by its routers, which are compared bit by bit before an expert is read.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from oled_moe.checkpoint import Checkpoint, find_packed_experts
from oled_moe.config import format_size
from oled_moe.errors import CheckpointError, ConfigError
from oled_moe.model_paths import find_model
from oled_moe.models import Family, ModelConfig, find_family
from oled_moe.packs import Pack, expert_dtype_name
from oled_moe.store import DiskExpertStore, ExpertLayout
from oled_moe.tensor_files import TensorRecord


@dataclass(frozen=True, slots=True)
class LowPrecisionPack:
    """A pack whose experts stand in for those of a model; `layout` is theirs in slots."""

    checkpoint: Checkpoint
    pack: Pack
    layout: ExpertLayout

    @classmethod
    def open(
        cls,
        name: str,
        config: ModelConfig,
        layout: ExpertLayout,
        *,
        hub_cache: Path | None = None,
    ) -> "LowPrecisionPack":
        """Read the headers of a pack for a model of that config, whose experts lie as `layout`.

        Raises: ModelNotFoundError, CheckpointError; ConfigError for what is no pack of such a
        model in fewer bytes.
        """
        path = find_model(name, hub_cache=hub_cache)
        checkpoint = Checkpoint.open(path)
        if checkpoint.pack is None:
            raise ConfigError(
                f"low_precision is {name!r}, which is no pack; make one with oled-moe pack "
                "MODEL OUT --dtype int4 and name OUT"
            )
        if find_family(checkpoint.config).config(checkpoint.config) != config:
            raise ConfigError(
                f"low_precision is {name!r}, a pack of a model of other sizes or settings; "
                "allowed: a pack of the model that is run"
            )
        pack = checkpoint.pack
        low = ExpertLayout(
            layout.hidden_size,
            layout.intermediate_size,
            layout.dtype,
            layout.activation,
            pack.layout.quant,
        )
        if pack.layout.quant is None and pack.layout.dtype != layout.dtype:
            raise ConfigError(
                f"low_precision is {name!r}, whose experts are "
                f"{expert_dtype_name(pack.layout)} and would be computed in "
                f"{expert_dtype_name(layout)}; allowed: int8 and int4 packs"
            )
        if low.slot_bytes >= layout.slot_bytes:
            raise ConfigError(
                f"low_precision is {name!r}, whose experts take {format_size(low.slot_bytes)} "
                f"each and those of the model {format_size(layout.slot_bytes)}; allowed: a pack of "
                "fewer bytes"
            )
        return cls(checkpoint, pack, low)

    def check_source(self, model: Checkpoint, family: Family, config: ModelConfig) -> None:
        """Compare all routers with the model's. Raises: ConfigError where one differs."""
        router = (config.num_experts, config.hidden_size)
        shapes = family.parameter_shapes(config)
        names = [name for name, shape in shapes.items() if tuple(shape) == router]
        assert len(names) >= config.num_moe_layers, "a family whose routers are not found"
        ours = _parameters(model, family, config)
        theirs = _parameters(self.checkpoint, family, config)
        for name in names:
            for checkpoint, found in ((model, ours), (self.checkpoint, theirs)):
                if name not in found:
                    raise CheckpointError(
                        f"{checkpoint.path}: parameter {name} is missing; download or pack the "
                        "model again"
                    )
            mine, other = ours[name].read(), theirs[name].read()
            # What one of them rounded on the way is compared as it was rounded.
            narrow = min(mine.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
            if not torch.equal(mine.to(narrow), other.to(narrow)):
                raise ConfigError(
                    f"low_precision is {str(self.checkpoint.path)!r}, a pack of another model: "
                    f"{name} differs from that of {model.path}; allowed: a pack of the model that "
                    "is run"
                )

    def open_store(self, config: ModelConfig, method: str) -> DiskExpertStore:
        """All experts, to be read; each read in full is compared with its checksum once.

        Raises: CheckpointError where a file cannot be opened or sizes are not those of config.json.
        """
        return find_packed_experts(
            self.pack,
            num_moe_layers=config.num_moe_layers,
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            dtype=self.layout.dtype,
            activation=config.activation,
            method=method,
        )


def _parameters(
    checkpoint: Checkpoint, family: Family, config: ModelConfig
) -> dict[str, TensorRecord]:
    """The checkpoint's tensors by the parameter that each becomes."""
    weight_map, found = family.weight_map(config), {}
    for name, record in checkpoint.tensors.items():
        try:
            target = weight_map(name)
        except KeyError:
            continue
        if isinstance(target, str):
            found[target] = record
    return found
