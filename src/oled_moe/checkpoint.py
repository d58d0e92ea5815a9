"""Reads checkpoints: a directory with config.json and weights in the safetensors format, or GGUF.

`Checkpoint.open` reads JSON and headers only and proves that every tensor lies within its file;
`read_weights` proves that the tensors are those a model needs, and only then reads weights.
Weights are read, never mapped, and leave the page cache again. Every fault is a CheckpointError.
Packs (packs.py), checkpoints with quantised weights (encodings.py) and GGUF files (gguf_models.py)
are read the same way.

Legend: D hidden size, F hidden size of one expert, E experts per layer.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oled_moe.codes import StoredForm
from oled_moe.config import check_choice
from oled_moe.encodings import (
    EncodedRecord,
    decode_tensors,
    place_encoded,
    stored_form,
)
from oled_moe.errors import CheckpointError, ModelNotFoundError
from oled_moe.gguf_models import find_gguf, open_gguf
from oled_moe.packs import MANIFEST_NAME, Pack, experts_name, open_pack
from oled_moe.quantization import QuantSpec
from oled_moe.store import (
    READ_METHODS,
    Activation,
    DiskExpertStore,
    ExpertLayout,
    ExpertPart,
    FileSpan,
    Matrix,
    PlacedSpan,
)
from oled_moe.tensor_files import TensorRecord, damaged, read_header, read_json_file

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")

# What a checkpoint tensor becomes: the parameter of that name, a part of an expert, or nothing
# (known and not needed). An unknown tensor raises KeyError.
WeightMap = Callable[[str], str | ExpertPart | None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose headers have been read; `file_bytes` holds the size of each file.

    `tensors` of a `pack` are those that are no experts. `encoding` says in words how weights are
    quantised that are decoded when they are read; `config` is without that.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorRecord]
    file_bytes: Mapping[Path, int]
    pack: Pack | None = None
    encoding: str | None = None

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Read the configuration and the headers in a directory, or those of a GGUF file.

        Raises: ModelNotFoundError where no checkpoint is; CheckpointError where one is that
        cannot be read.
        """
        directory = Path(path)
        if directory.suffix == ".gguf" and directory.is_file():
            return cls._of_gguf(directory)
        names = _list_directory(directory)
        if not any(name == MANIFEST_NAME or name.endswith(".safetensors") for name in names):
            file = find_gguf(directory, names)
            if file is not None:
                return cls._of_gguf(file)
        if "config.json" not in names:
            raise ModelNotFoundError(
                f"{directory} has no config.json; name the directory of a checkpoint, "
                "as it was downloaded"
            )
        config = read_json_file(directory / "config.json")
        generation_config = {}
        if "generation_config.json" in names:
            generation_config = read_json_file(directory / "generation_config.json")
        if MANIFEST_NAME in names:
            pack, tensors, file_bytes = open_pack(directory)
            # What it says of the checkpoint that was packed; nothing of the pack is encoded so.
            config.pop("quantization_config", None)
            return cls(directory, config, generation_config, tensors, file_bytes, pack)
        if INDEX_NAME in names:
            tensors, file_bytes = _read_sharded(directory)
        else:
            file = _find_single_file(directory, names)
            tensors, num_bytes = read_header(file)
            file_bytes = {file: num_bytes}
        config, tensors, encoding = decode_tensors(config, tensors)
        return cls(directory, config, generation_config, tensors, file_bytes, encoding=encoding)

    @classmethod
    def _of_gguf(cls, file: Path) -> "Checkpoint":
        """A model in GGUF files, with what lies beside them."""
        beside: list[dict[str, Any] | None] = []
        for name in ("config.json", "generation_config.json"):
            path = file.with_name(name)
            beside.append(read_json_file(path) if path.is_file() else None)
        found = open_gguf(file, beside[0])
        return cls(
            file,
            found.config,
            beside[1] or {},
            found.tensors,
            found.file_bytes,
            encoding=found.encoding,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, experts included, as they are stored."""
        packed = 0 if self.pack is None else self.pack.expert_bytes
        return packed + sum(record.stored_bytes for record in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor into memory of its own.

        Raises: CheckpointError where it is not in the checkpoint or cannot be read.
        """
        record = self.tensors.get(name)
        if record is None:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}; download it again")
        return record.read()


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """Where all that a model needs lies, proven to be there.

    `parameters`: by their names in the model; `experts`: the tensors that hold routed experts, none
    in a pack; `unused`: tensors that are neither.
    """

    parameters: Mapping[str, TensorRecord]
    experts: "Parts"
    unused: Sequence[str]
    _open: "OpenStore"

    @property
    def form(self) -> StoredForm | str:
        """The form that keeps the codes in which experts are stored; or in words why none does."""
        return stored_form([record for record, _ in self.experts])

    def open_store(self, method: str, quant: QuantSpec | None = None) -> DiskExpertStore:
        """The experts; where `quant` is given, their codes in that form, which must hold `form`."""
        return self._open(method, quant)


def find_weights(
    checkpoint: Checkpoint,
    *,
    map_weight: WeightMap,
    shapes: Mapping[str, tuple[int, ...]],
    num_moe_layers: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype | None,
    activation: Activation = "silu",
) -> FoundWeights:
    """Find the parameters named in `shapes` and every routed expert; no weight is read.

    `dtype` is what experts are converted to, None keeps what is stored. `activation` is what
    experts do to their gate.

    Raises: CheckpointError where a tensor is missing, is there twice, or has another shape or a
    dtype that is not supported.
    """
    parameters, parts, unused = _assign_tensors(checkpoint, map_weight, shapes)
    _check_parameters(checkpoint, parameters, shapes)
    size = _ExpertSize(num_moe_layers, num_experts, hidden_size, intermediate_size, activation)
    open_store = _plan_store(checkpoint, parts, size, dtype)
    return FoundWeights(parameters, parts, unused, open_store)


def read_weights(
    checkpoint: Checkpoint,
    *,
    map_weight: WeightMap,
    shapes: Mapping[str, tuple[int, ...]],
    num_moe_layers: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype | None,
    keep_dtype: Collection[str],
    method: str,
    activation: Activation = "silu",
) -> tuple[dict[str, Tensor], DiskExpertStore]:
    """Read the parameters named in `shapes`, and open the routed experts where they lie.

    `dtype` is what weights are converted to, None keeps each as stored; so do the parameters in
    `keep_dtype` in any case. `activation` as in `find_weights`; `method` is how the store reads
    (see DiskExpertStore). Everything is checked before the first weight is read, and at most one
    tensor is held beyond the result.

    Raises: as `find_weights`; CheckpointError where a tensor cannot be read.
    """
    check_choice("method", method, READ_METHODS)
    found = find_weights(
        checkpoint,
        map_weight=map_weight,
        shapes=shapes,
        num_moe_layers=num_moe_layers,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=dtype,
        activation=activation,
    )
    warn_of_unused(found.unused)
    weights = {}
    for name in shapes:
        weight = checkpoint.read(found.parameters[name].name)
        weights[name] = weight if dtype is None or name in keep_dtype else weight.to(dtype)
    return weights, found.open_store(method)


def warn_of_unused(names: Sequence[str]) -> None:
    """Tell of tensors that a model has no place for."""
    if names:
        shown = _first([repr(name) for name in names])
        logger.warning("%d tensors are not used by this architecture: %s", len(names), shown)


def find_packed_experts(
    pack: Pack,
    *,
    num_moe_layers: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    activation: Activation,
    method: str,
) -> DiskExpertStore:
    """The experts of a pack alone, as `read_weights` finds them. Raises: CheckpointError."""
    size = _ExpertSize(num_moe_layers, num_experts, hidden_size, intermediate_size, activation)
    return _plan_packed_store(pack, (), size, dtype)(method, None)


def _read_sharded(directory: Path) -> tuple[dict[str, TensorRecord], dict[Path, int]]:
    index_path = directory / INDEX_NAME
    weight_map = read_json_file(index_path, is_unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index_path, "has no weight_map from tensor names to files")
    for name, shard in weight_map.items():
        _check_shard_name(index_path, name, shard)
    shards = {}
    file_bytes = {}
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        if not os.path.lexists(path):
            raise CheckpointError(f"{path} is missing, {INDEX_NAME} names it; download it again")
        shards[shard], file_bytes[path] = read_header(path)
    tensors = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{directory / shard} does not hold tensor {name!r}, which {INDEX_NAME} says "
                "is there; download both again"
            )
        tensors[name] = shards[shard][name]
    return tensors, file_bytes


def _check_shard_name(index_path: Path, name: str, shard: Any) -> None:
    is_plain = (
        isinstance(shard, str)
        and shard.isprintable()
        and not {"/", "\\"} & set(shard)
        and shard.endswith(".safetensors")
    )
    if not is_plain:
        raise CheckpointError(
            f"{index_path}: tensor {name!r} is said to be in {shard!r:.200}; allowed: the name of "
            "a *.safetensors file in the same directory"
        )


def _find_single_file(directory: Path, names: Sequence[str]) -> Path:
    if SINGLE_NAME in names:
        return directory / SINGLE_NAME
    found = [name for name in names if name.endswith(".safetensors")]
    if experts_name(0) in found:
        raise CheckpointError(
            f"{directory} is a pack without {MANIFEST_NAME}, so not finished or not whole; run the "
            "command that packs it again, or copy it again"
        )
    if len(found) == 1:
        return directory / found[0]
    if found:
        raise CheckpointError(
            f"{directory} has {len(found)} *.safetensors files and no {INDEX_NAME}, which says "
            "what is in which; download it too"
        )
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        raise CheckpointError(
            f"{directory} has weights in pickle files only ({pickles[0]}), which can run code "
            "when read; only *.safetensors files are read: load it with transformers and store it "
            "with save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(f"{directory} has no *.safetensors file; download the weights too")


def _list_directory(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except NotADirectoryError:
        raise CheckpointError(
            f"{directory} is a file; name the directory that holds it and config.json"
        ) from None
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"there is no directory {directory}; name the directory of a downloaded checkpoint"
        ) from None
    except ValueError:
        raise ModelNotFoundError(f"{str(directory)!r} cannot be the path of a directory") from None
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be listed ({error.strerror}); check its permissions"
        ) from error


# What read_weights checks.


@dataclass(frozen=True, slots=True)
class _ExpertSize:
    """What the experts of a model should be."""

    num_layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation = "silu"

    def shape(self, part: ExpertPart) -> tuple[int, ...]:
        sizes = {
            "gate": (self.intermediate_size, self.hidden_size),
            "up": (self.intermediate_size, self.hidden_size),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }
        stacked = (self.num_experts,) if part.expert is None else ()
        return (*stacked, *sizes[part.matrix])

    def experts(self, part: ExpertPart) -> Iterable[int]:
        return range(self.num_experts) if part.expert is None else (part.expert,)


Parts = Sequence[tuple[TensorRecord, ExpertPart]]


# Given how files are read, and a form for the codes of experts.
OpenStore = Callable[[str, QuantSpec | None], DiskExpertStore]


def _plan_store(
    checkpoint: Checkpoint, parts: "Parts", size: _ExpertSize, dtype: torch.dtype | None
) -> OpenStore:
    """Prove that every expert is there; what opens the store."""
    if checkpoint.pack is not None:
        return _plan_packed_store(checkpoint.pack, parts, size, dtype)
    stored_dtype = _common_dtype(checkpoint, parts)
    layout = ExpertLayout(
        size.hidden_size, size.intermediate_size, dtype or stored_dtype, size.activation
    )
    owners = _find_owners(checkpoint, parts, size)

    def open_store(method: str, quant: QuantSpec | None) -> DiskExpertStore:
        target = replace(layout, quant=quant)
        if any(isinstance(record, EncodedRecord) for record, _ in parts):
            encoding, spans = place_encoded(target, owners)
        else:
            assert quant is None
            encoding, spans = None, _place_experts(parts, size, stored_dtype)
        return DiskExpertStore(
            target, spans, stored_dtype=stored_dtype, method=method, encoding=encoding
        )

    return open_store


def _plan_packed_store(
    pack: Pack, parts: "Parts", size: _ExpertSize, dtype: torch.dtype | None
) -> OpenStore:
    manifest, stored = pack.manifest, pack.layout
    found = (
        manifest.num_layers,
        manifest.num_experts,
        stored.hidden_size,
        stored.intermediate_size,
    )
    wanted = (size.num_layers, size.num_experts, size.hidden_size, size.intermediate_size)
    if found != wanted or parts:
        raise CheckpointError(
            f"{pack.path}: holds {found[0]} layers of {found[1]} experts of {found[2]} x "
            f"{found[3]}, config.json asks for {wanted[0]} of {wanted[1]} of {wanted[2]} x "
            f"{wanted[3]}; pack the model again"
        )

    def open_store(method: str, quant: QuantSpec | None) -> DiskExpertStore:
        assert quant is None
        return DiskExpertStore(
            replace(stored, dtype=dtype or stored.dtype, activation=size.activation),
            [[[(span, 0)] for span in layer] for layer in pack.spans],
            stored_dtype=stored.dtype,
            method=method,
            checksums=manifest.experts,
        )

    return open_store


def _assign_tensors(
    checkpoint: Checkpoint, map_weight: WeightMap, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, TensorRecord], Parts, list[str]]:
    """Tell parameters from parts of experts, and tensors that are neither."""
    parameters: dict[str, TensorRecord] = {}
    parts: list[tuple[TensorRecord, ExpertPart]] = []
    unused: list[str] = []
    for name, record in checkpoint.tensors.items():
        try:
            target = map_weight(name)
        except KeyError:
            unused.append(name)
            continue
        if target is None:
            continue
        if isinstance(target, ExpertPart):
            parts.append((record, target))
        elif target in parameters:
            raise CheckpointError(
                f"{checkpoint.path}: tensors {parameters[target].name!r} and {name!r} are both "
                f"meant for {target}; allowed: one of them"
            )
        elif target in shapes:
            parameters[target] = record
        else:
            unused.append(name)
    return parameters, parts, unused


def _check_parameters(
    checkpoint: Checkpoint,
    parameters: Mapping[str, TensorRecord],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    missing = [name for name in shapes if name not in parameters]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} of {len(shapes)} parameters are missing: "
            f"{_first(missing)}; download the weights and config.json again"
        )
    for name, shape in shapes.items():
        _check_tensor(parameters[name], tuple(shape))


def _common_dtype(checkpoint: Checkpoint, parts: Parts) -> torch.dtype:
    if not parts:
        raise CheckpointError(
            f"{checkpoint.path} holds no routed experts; allowed: mixture-of-experts checkpoints"
        )
    first = parts[0][0]
    for record, _ in parts:
        if record.dtype != first.dtype:
            raise CheckpointError(
                f"{checkpoint.path}: experts differ in dtype, {first.name!r} is "
                f"{_name(first.dtype)}, {record.name!r} is {_name(record.dtype)}; "
                "convert all experts to one"
            )
    return first.dtype


Owners = Mapping[tuple[int, int, Matrix], TensorRecord]


def _find_owners(checkpoint: Checkpoint, parts: Parts, size: _ExpertSize) -> Owners:
    """The one tensor that holds each matrix of each expert."""
    owners: dict[tuple[int, int, Matrix], TensorRecord] = {}
    for record, part in parts:
        _check_part(record, part, size)
        for expert in size.experts(part):
            for matrix in _covered(part.matrix):
                other = owners.setdefault((part.layer, expert, matrix), record)
                if other is not record:
                    raise CheckpointError(
                        f"{checkpoint.path}: tensors {other.name!r} and {record.name!r} both hold "
                        f"the {matrix} matrix of one expert; allowed: one of them"
                    )
    _check_complete(checkpoint, owners, size)
    return owners


def _place_experts(
    parts: Parts, size: _ExpertSize, dtype: torch.dtype
) -> list[list[list[PlacedSpan]]]:
    """For each layer and expert, which bytes go where in a slot of this dtype."""
    layout = ExpertLayout(size.hidden_size, size.intermediate_size, dtype)
    targets = {
        "gate": 0,
        "up": layout.matrix_bytes,
        "gate_up": 0,
        "down": layout.down_offset,
    }
    spans: list[list[list[PlacedSpan]]] = [
        [[] for _ in range(size.num_experts)] for _ in range(size.num_layers)
    ]
    for record, part in parts:
        num_bytes = layout.matrix_bytes * len(_covered(part.matrix))
        for position, expert in enumerate(size.experts(part)):
            span = FileSpan(record.path, record.offset + position * num_bytes, num_bytes)
            spans[part.layer][expert].append((span, targets[part.matrix]))
    return spans


def _covered(matrix: Matrix) -> tuple[Matrix, ...]:
    return ("gate", "up") if matrix == "gate_up" else (matrix,)


def _check_part(record: TensorRecord, part: ExpertPart, size: _ExpertSize) -> None:
    is_known = 0 <= part.layer < size.num_layers
    if part.expert is not None:
        is_known = is_known and 0 <= part.expert < size.num_experts
    if not is_known:
        raise CheckpointError(
            f"{record.path}: tensor {record.name!r} belongs to an expert that config.json does "
            f"not have; it says {size.num_layers} MoE layers of {size.num_experts} experts: "
            "download both again"
        )
    _check_tensor(record, size.shape(part))


def _check_tensor(record: TensorRecord, shape: tuple[int, ...]) -> None:
    if record.shape != shape:
        raise CheckpointError(
            f"{record.path}: tensor {record.name!r} has shape {list(record.shape)}, config.json "
            f"asks for {list(shape)}; they are not of one model, download both again"
        )
    if record.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(
            f"{record.path}: tensor {record.name!r} is {_name(record.dtype)}; allowed: "
            f"{', '.join(map(_name, WEIGHT_DTYPES))}; use a checkpoint that is not quantized"
        )


def _check_complete(
    checkpoint: Checkpoint,
    owners: Collection[tuple[int, int, Matrix]],
    size: _ExpertSize,
) -> None:
    matrices: tuple[Matrix, ...] = ("gate", "up", "down")
    missing = [
        f"{matrix} of layer {layer}, expert {expert}"
        for layer in range(size.num_layers)
        for expert in range(size.num_experts)
        for matrix in matrices
        if (layer, expert, matrix) not in owners
    ]
    if missing:
        total = 3 * size.num_layers * size.num_experts
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} of {total} expert matrices are missing: "
            f"{_first(missing)} (counting MoE layers from 0); "
            "download the weights and config.json again"
        )


def _first(names: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit])
    return f"{shown}, …" if len(names) > limit else shown


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
