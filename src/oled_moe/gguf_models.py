"""GGUF files as checkpoints: which architectures, under which names, with which config.

llama.cpp keeps the weights of these families as they are (only dense LLaDA has its queries and
keys permuted) and stacks the experts of a layer. What is quantised is decoded when it is read.
Source: llama.cpp, conversion/llada.py, qwen.py, bailingmoe.py and gguf-py/gguf/constants.py; for
`llada2`, which is not in llama.cpp, its open pull request 17454 and nurl-lang/nurl, which follows
what was published.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oled_moe.encodings import DECODED_DTYPE, EncodedRecord
from oled_moe.errors import CheckpointError
from oled_moe.gguf_files import GgufTensor, read_gguf
from oled_moe.gguf_types import GgufDecoder
from oled_moe.tensor_files import TensorRecord

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_LAYER_NAME = re.compile(r"blk\.(\d{1,9})\.(\w+?)(\.weight|\.bias)?")
_CHUNK_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What the files of a model hold, under the names of its family's checkpoints.

    `encoding`: the types of its numbers, in words, where some are decoded when they are read.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorRecord]
    file_bytes: dict[Path, int]
    encoding: str | None


@dataclass(frozen=True, slots=True)
class GgufRecord(EncodedRecord):
    """A tensor of blocks; `parts` is one, uint8 of the same axes, the last counting bytes."""

    def read(self) -> Tensor:
        """Part by part, so that its float32 values are never all there."""
        assert self.decode is not None
        (part,) = self.parts
        row_bytes, num_rows = part.shape[-1], prod(self.shape[:-1])
        values = torch.empty(num_rows, self.shape[-1], dtype=self.dtype)
        step = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(0, num_rows, step):
            rows = values[start : start + step]
            stored = torch.empty(len(rows) * row_bytes, dtype=torch.uint8)
            part.read_range(start * row_bytes, stored)
            rows.copy_(self.decode([stored.view(len(rows), row_bytes)]))
        return values.view(self.shape)


def find_gguf(directory: Path, names: Sequence[str]) -> Path | None:
    """The GGUF file of a directory, the first where a model is split; None where none is.

    Raises: CheckpointError where several models are.
    """
    # Beside a model there may be its eyes, which are of no use here.
    found = [name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]
    models: dict[str, str] = {}
    for name in found:
        split = _SPLIT.fullmatch(name)
        models.setdefault(split[1] if split else name, name)
    if len(models) > 1:
        raise CheckpointError(
            f"{directory} has {len(models)} models in GGUF files; name one of them: "
            f"{', '.join(sorted(models.values()))[:400]}"
        )
    return directory / next(iter(models.values())) if models else None


def open_gguf(path: Path, config: Mapping[str, Any] | None) -> GgufModel:
    """Read the headers of a file, and of the others where a model is split.

    `config`: the config.json beside it, which goes before what the files say.
    Raises: CheckpointError for an architecture or a type that is not read.
    """
    paths = _paths_of(path)
    headers = [read_gguf(part) for part in paths]
    metadata = headers[0].metadata
    tensors = [tensor for header in headers for tensor in header.tensors]
    kind = _architecture_of(path, metadata, config)
    records: dict[str, TensorRecord] = {}
    plain = len({tensor.type.name for tensor in tensors if len(tensor.shape) == 3}) == 1
    for tensor in tensors:
        name = _name_of(tensor, kind)
        if name in records:
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name!r:.200} is there twice; download it again"
            )
        records[name] = _record_of(tensor, name, is_plain=plain or len(tensor.shape) < 3)
    values = dict(config) if config is not None else kind.config(_Metadata(path, metadata, tensors))
    values.pop("quantization_config", None)
    sizes = {part: header.num_file_bytes for part, header in zip(paths, headers, strict=True)}
    return GgufModel(values, records, sizes, _words(records.values(), tensors))


def _paths_of(path: Path) -> list[Path]:
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split[3])
    names = [f"{split[1]}-{number:05}-of-{split[3]}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing or not names:
        raise CheckpointError(
            f"{path} is one of {count} files, of which {len(missing)} are not beside it: "
            f"{', '.join(missing[:3])}; download them too"
        )
    return [path.with_name(name) for name in names]


def _record_of(tensor: GgufTensor, name: str, *, is_plain: bool) -> TensorRecord:
    place = (tensor.path, tensor.offset, tensor.num_bytes)
    dtype = tensor.type.dtype
    if dtype is not None and is_plain:
        return TensorRecord(name, place[0], dtype, tensor.shape, *place[1:])
    rows = (*tensor.shape[:-1], tensor.row_bytes)
    return GgufRecord(
        name,
        tensor.path,
        DECODED_DTYPE,
        tensor.shape,
        tensor.offset,
        prod(tensor.shape) * DECODED_DTYPE.itemsize,
        parts=(TensorRecord(name, place[0], torch.uint8, rows, *place[1:]),),
        decode=GgufDecoder(tensor.type),
    )


def _words(records: Any, tensors: Sequence[GgufTensor]) -> str | None:
    if not any(isinstance(record, EncodedRecord) for record in records):
        return None
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.num_bytes
    return f"GGUF, {', '.join(sorted(sizes, key=lambda name: -sizes[name]))}"


# Names


_ENDS = ("gate", "up", "down")
_QWEN_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    **{f"ffn_{end}": f"mlp.{end}_proj" for end in _ENDS},
    **{f"ffn_{end}_exps": f"mlp.experts.{end}_proj" for end in _ENDS},
}
_LLADA2_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "attn_q_norm": "attention.query_layernorm",
    "attn_k_norm": "attention.key_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    **{f"ffn_{end}": f"mlp.{end}_proj" for end in _ENDS},
    **{f"ffn_{end}_exps": f"mlp.experts.{end}_proj" for end in _ENDS},
    **{f"ffn_{end}_shexp": f"mlp.shared_experts.{end}_proj" for end in _ENDS},
}


def _name_of(tensor: GgufTensor, kind: "_Architecture") -> str:
    """The name that checkpoints of the family have. Raises: CheckpointError for a stranger."""
    outer = {
        "token_embd.weight": kind.embeddings,
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if tensor.name in outer:
        return outer[tensor.name]
    match = _LAYER_NAME.fullmatch(tensor.name)
    if match:
        layer = f"model.layers.{match[1]}"
        # Its file says that it is a bias, checkpoints do not.
        if match[2] == "exp_probs_b" and "attn_qkv" in kind.names:
            return f"{layer}.mlp.gate.expert_bias"
        if match[2] in kind.names and match[3]:
            return f"{layer}.{kind.names[match[2]]}{match[3]}"
    raise CheckpointError(
        f"{tensor.path}: tensor {tensor.name!r:.200} is none that a model of this architecture "
        "has; convert the model with llama.cpp's own script, without options that fuse tensors"
    )


# Configs


class _Metadata:
    """The metadata of a file, by the names within its architecture."""

    def __init__(
        self, path: Path, metadata: Mapping[str, Any], tensors: Sequence[GgufTensor]
    ) -> None:
        self._path = path
        self._values = metadata
        self._prefix = metadata["general.architecture"]
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        self.missing: list[str] = []

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number; missing ones without a default are noted."""
        value: int | None = self._get(f"{self._prefix}.{name}", (int,), default)
        return value

    def real(self, name: str, default: float | None = None) -> float | None:
        value: float | None = self._get(f"{self._prefix}.{name}", (int, float), default)
        return value

    def has(self, name: str) -> bool:
        """Whether a tensor is there, or one of that name in some layer."""
        return any(
            name in (held, held.partition(".")[2].partition(".")[2]) for held in self._shapes
        )

    def common(self, router: int) -> dict[str, Any]:
        """What the config.json of any family says. `router`: how it must weigh experts."""
        self._refuse_router(router)
        found: dict[str, Any] = {
            "vocab_size": self.whole("vocab_size", self._shapes.get("token_embd.weight", (0,))[0]),
            "hidden_size": self.whole("embedding_length"),
            "num_hidden_layers": self.whole("block_count"),
            "num_attention_heads": self.whole("attention.head_count"),
            "num_key_value_heads": self.whole("attention.head_count_kv"),
            "max_position_embeddings": self.whole("context_length"),
            "rope_theta": self.real("rope.freq_base"),
            "rms_norm_eps": self.real("attention.layer_norm_rms_epsilon"),
            "num_experts": self.whole("expert_count"),
            "num_experts_per_tok": self.whole("expert_used_count"),
            "tie_word_embeddings": not self.has("output.weight"),
        }
        for name, key in _TOKEN_IDS.items():
            if key in self._values:
                found[name] = self._get(key, (int,), None)
        scaling = self._values.get(f"{self._prefix}.rope.scaling.type", "none")
        if scaling != "none":
            found["rope_scaling"] = {"rope_type": scaling}
        return found

    def head_size(self, values: Mapping[str, Any]) -> int | None:
        heads = values["num_attention_heads"]
        default = values["hidden_size"] // heads if heads and values["hidden_size"] else None
        return self.whole("attention.key_length", default)

    def finish(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values. Raises: CheckpointError where some were missing."""
        if self.missing:
            raise CheckpointError(
                f"{self._path}: its metadata lack {', '.join(self.missing)}; put the config.json "
                "of the model that it was made from beside it"
            )
        return values

    def _refuse_router(self, wanted: int) -> None:
        key = f"{self._prefix}.expert_gating_func"
        if self._values.get(key, wanted) != wanted:
            raise CheckpointError(
                f"{self._path}: {key} is {self._values[key]!r:.40}; allowed for this architecture: "
                f"{wanted}; take the file of another model"
            )

    def _get(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            self.missing.append(key)
        elif isinstance(value, bool) or not isinstance(value, kinds):
            raise CheckpointError(
                f"{self._path}: {key} is {value!r:.80}; allowed: a number; convert the model anew"
            )
        return value


_TOKEN_IDS = {
    "mask_token_id": "tokenizer.ggml.mask_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_SOFTMAX, _SIGMOID = 1, 2


def _llada_config(read: _Metadata) -> dict[str, Any]:
    values = read.common(_SOFTMAX)
    head_size = read.head_size(values)
    rotated = read.whole("rope.dimension_count", head_size)
    values |= {
        "model_type": "llada",
        "expert_intermediate_size": read.whole("expert_feed_forward_length"),
        "partial_rotary_factor": rotated / head_size if rotated and head_size else 1.0,
        "qk_layernorm": read.has("attn_q_norm.weight"),
        "attention_bias": read.has("attn_q.bias"),
    }
    return read.finish(values)


def _rnd1_config(read: _Metadata) -> dict[str, Any]:
    values = read.common(_SOFTMAX)
    values |= {
        "model_type": "rnd1",
        "head_dim": read.head_size(values),
        "moe_intermediate_size": read.whole("expert_feed_forward_length"),
    }
    return read.finish(values)


def _llada2_config(read: _Metadata) -> dict[str, Any]:
    values = read.common(_SIGMOID)
    values |= {
        "model_type": "llada2_moe",
        "head_dim": read.head_size(values),
        "intermediate_size": read.whole("feed_forward_length"),
        "moe_intermediate_size": read.whole("expert_feed_forward_length"),
        "first_k_dense_replace": read.whole("leading_dense_block_count"),
        "rotary_dim": read.whole("rope.dimension_count"),
        "num_shared_experts": read.whole("expert_shared_count"),
        "n_group": read.whole("expert_group_count"),
        "topk_group": read.whole("expert_group_used_count"),
        "routed_scaling_factor": read.real("expert_weights_scale"),
        "use_qk_norm": read.has("attn_q_norm.weight"),
        "use_qkv_bias": read.has("attn_qkv.bias"),
        "use_bias": read.has("attn_output.bias"),
        "moe_router_enable_expert_bias": read.has("exp_probs_b.bias") or read.has("exp_probs_b"),
    }
    return read.finish(values)


def _asks_for_config(read: _Metadata) -> dict[str, Any]:
    read.missing.append("that it is a diffusion model, which its architecture alone is not")
    return read.finish({})


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How files of one `general.architecture` are read. `model_types`: those of config.json."""

    model_types: tuple[str, ...]
    embeddings: str
    names: Mapping[str, str]
    config: Callable[[_Metadata], dict[str, Any]]


_LLADA2_TYPES = ("llada2_moe", "llada2_moe_veomni")
_ARCHITECTURES = {
    "llada-moe": _Architecture(("llada",), "model.embed_tokens.weight", _QWEN_NAMES, _llada_config),
    "rnd1": _Architecture(("rnd1",), "model.embed_tokens.weight", _QWEN_NAMES, _rnd1_config),
    "llada2": _Architecture(
        _LLADA2_TYPES, "model.word_embeddings.weight", _LLADA2_NAMES, _llada2_config
    ),
    # What SDAR-MoE and LLaDA2 are converted as where the converter does not know them.
    "qwen3moe": _Architecture(
        ("sdar_moe",), "model.embed_tokens.weight", _QWEN_NAMES, _asks_for_config
    ),
    "bailingmoe2": _Architecture(
        _LLADA2_TYPES, "model.word_embeddings.weight", _LLADA2_NAMES, _asks_for_config
    ),
}


def _architecture_of(
    path: Path, metadata: Mapping[str, Any], config: Mapping[str, Any] | None
) -> _Architecture:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {name!r:.80}, which this version does not read; "
            f"allowed: {', '.join(_ARCHITECTURES)}"
        )
    kind = _ARCHITECTURES[name]
    if config is not None and config.get("model_type") not in kind.model_types:
        raise CheckpointError(
            f"{path} is of architecture {name}, and the config.json beside it says model_type "
            f"{config.get('model_type')!r:.80}; allowed: {', '.join(kind.model_types)}; take the "
            "config.json of the model that it was made from"
        )
    return kind
