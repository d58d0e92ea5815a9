"""RoutingTrace: what routers asked for, recorded or made up, as one file; the format is docs'.

Reading, writing, checking (docs/trace-format.md), replaying as the demands that policies see, and
collecting from a live run. Files are touched here alone of all that simulates; no torch.

Shape legend: R rows (one sequence in one forward), T tokens over all rows, L MoE layers,
K experts per token, E experts per layer, H hidden size.
"""

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from oled_moe.errors import TraceError, TraceNotFoundError
from oled_moe.policies.clairvoyant import DemandFuture
from oled_moe.types import (
    BoolArray,
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    IntArray,
    LayerDemand,
    LayerPlan,
    MoeShape,
    Phase,
    TokenState,
)

VERSION = 1
METADATA_KEY = "oled_moe_trace"
SUFFIX = ".trace.safetensors"
SOURCES = ("recorded", "synthetic")
# Layer-time confidence of a masked position that no forward has seen yet.
FRESH_CONFIDENCE = 0.5
# Gate weights may have been rounded to bfloat16 on their way.
_WEIGHT_TOLERANCE = 0.02
# Tokens looked at together, so that checking a large trace takes little memory besides it.
_CHUNK = 8192

# Tensors by name: dtype and dimensions. `token_ids` is not in format version 1 of the paper's
# reproduction; readers that do not know it ignore it.
_REQUIRED: dict[str, tuple[str, str]] = {
    "row_forward": ("int32", "R"),
    "row_request": ("int32", "R"),
    "row_block": ("int32", "R"),
    "row_step": ("int32", "R"),
    "row_phase": ("uint8", "R"),
    "row_token_offset": ("int64", "R+1"),
    "token_position": ("int32", "T"),
    "token_state": ("uint8", "T"),
    "token_confidence": ("float32", "T"),
    "token_accepted": ("uint8", "T"),
    "expert_ids": ("int16", "TLK"),
    "gate_weights": ("float32", "TLK"),
}
_OPTIONAL: dict[str, tuple[str, str]] = {
    "gate_scores": ("float16", "TLE"),
    "hidden_cosine": ("float32", "TL"),
    "input_embedding": ("float16", "TH"),
    "token_ids": ("int32", "T"),
}
# What a context or a demand carries only if the trace holds it, and the flag that records it.
_REMEDIES = {
    "gate_scores": "--gate-scores",
    "input_embedding": "--input-embedding",
    "token_ids": "token ids, which are recorded by default",
}
_HEADER_INTS = ("num_moe_layers", "num_experts", "top_k", "expert_bytes", "block_length")

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `extra`: keys that this version does not know, kept."""

    id: str
    workload: str
    num_prompt_tokens: int
    num_generated_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            **self.extra,
            "id": self.id,
            "workload": self.workload,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_generated_tokens": self.num_generated_tokens,
        }


@dataclass(frozen=True, slots=True)
class TraceForward:
    """One forward of a trace as policies meet it.

    `demands` ascend by layer; a layer whose experts were skipped by all rows has none, and rows
    that skipped a layer are not part of its demand. `ended_requests`: indices of those that have
    no row after this forward.
    """

    context: ForwardContext
    demands: list[LayerDemand]
    outcome: ForwardOutcome
    ended_requests: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """A header and the recorded forwards; every instance is valid, its arrays cannot be written.

    Shapes: row_* int32 [R] but row_phase uint8 [R] and row_token_offset int64 [R+1];
    token_position int32 [T], token_state and token_accepted uint8 [T], token_confidence float32
    [T]; expert_ids int16 and gate_weights float32 [T, L, K]; where recorded, gate_scores float16
    [T, L, E], hidden_cosine float32 [T, L], input_embedding float16 [T, H], token_ids int32 [T].
    Units: expert_bytes is one expert.
    Raises: TraceError naming the field, the row and what is allowed.
    """

    source: str
    model_type: str
    model_name: str
    num_moe_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int
    block_length: int
    threshold: float
    requests: tuple[TraceRequest, ...]
    row_forward: npt.NDArray[np.int32]
    row_request: npt.NDArray[np.int32]
    row_block: npt.NDArray[np.int32]
    row_step: npt.NDArray[np.int32]
    row_phase: npt.NDArray[np.uint8]
    row_token_offset: IntArray
    token_position: npt.NDArray[np.int32]
    token_state: npt.NDArray[np.uint8]
    token_confidence: npt.NDArray[np.float32]
    token_accepted: npt.NDArray[np.uint8]
    expert_ids: npt.NDArray[np.int16]
    gate_weights: npt.NDArray[np.float32]
    gate_scores: npt.NDArray[np.float16] | None = None
    hidden_cosine: npt.NDArray[np.float32] | None = None
    input_embedding: npt.NDArray[np.float16] | None = None
    token_ids: npt.NDArray[np.int32] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_header(self)
        for name, array in self.tensors().items():
            if not isinstance(array, np.ndarray):
                raise TraceError(f"{name}: is {type(array).__name__}; allowed: a numpy array")
            view = np.ascontiguousarray(array).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)
        _check_shapes(self)
        _check_rows(self)
        _check_tokens(self)
        _check_routing(self)

    @property
    def shape(self) -> MoeShape:
        return MoeShape(self.num_moe_layers, self.num_experts, self.top_k, self.expert_bytes)

    @property
    def num_rows(self) -> int:
        return len(self.row_forward)

    @property
    def num_tokens(self) -> int:
        return len(self.token_position)

    @property
    def num_forwards(self) -> int:
        return len(self.forward_row_offset) - 1

    @property
    def forward_row_offset(self) -> IntArray:
        """Rows of forward i are offset[i] to offset[i+1]. Shapes: int64 [num_forwards + 1]."""
        starts = np.flatnonzero(np.diff(self.row_forward)) + 1
        return np.concatenate([[0], starts, [self.num_rows]]).astype(np.int64)

    @property
    def is_skipped(self) -> BoolArray:
        """Whether a row skipped a layer's experts. Shapes: bool [R, L]."""
        skipped: BoolArray = np.less(self.expert_ids[self.row_token_offset[:-1], :, 0], 0)
        return skipped

    def tensors(self) -> dict[str, AnyArray]:
        """The arrays by the names they have in the file, optional ones where they are recorded."""
        names = [*_REQUIRED, *(name for name in _OPTIONAL if getattr(self, name) is not None)]
        return {name: getattr(self, name) for name in names}

    def header(self) -> dict[str, Any]:
        """The metadata object of the file, what was not understood in it included."""
        return {
            **self.extra,
            "version": VERSION,
            "source": self.source,
            "model_type": self.model_type,
            "model_name": self.model_name,
            **{name: getattr(self, name) for name in _HEADER_INTS},
            "threshold": self.threshold,
            "requests": [request.to_dict() for request in self.requests],
        }

    def check_needs(self, needs: Collection[str]) -> None:
        """Refuse a policy that looks at what was not recorded. Raises: TraceError naming it."""
        for name in sorted(needs):
            if name not in _REMEDIES:
                raise TraceError(
                    f"a trace never holds {name}; policies may need: {', '.join(_REMEDIES)}"
                )
            if getattr(self, name) is None:
                raise TraceError(
                    f"the policy needs {name}, which this trace does not hold; record it again "
                    f"with {_REMEDIES[name]}"
                )

    def layer_time_confidence(self) -> npt.NDArray[np.float32]:
        """What is known of each token while its forward's layers run (docs/trace-format.md).

        1 at prompt and committed positions; at a masked one the latest confidence of an earlier
        forward of that request and position, else 0.5. Shapes: float32 [T].
        """
        order, is_first = self._by_position()
        confidence = self.token_confidence[order]
        index = np.arange(self.num_tokens)
        latest = np.maximum.accumulate(np.where(np.isnan(confidence), -1, index))
        before = np.concatenate([[-1], latest[:-1]])
        group_start = np.maximum.accumulate(np.where(is_first, index, 0))
        known = np.where(before >= group_start, confidence[before], np.float32(FRESH_CONFIDENCE))
        result = np.empty(self.num_tokens, dtype=np.float32)
        result[order] = known
        result[self.token_state != TokenState.MASKED] = 1.0
        return result

    def previous_token(self) -> IntArray:
        """For each token the same request's and position's in its latest earlier forward, or -1.

        Shapes: int64 [T].
        """
        order, is_first = self._by_position()
        result = np.full(self.num_tokens, -1, dtype=np.int64)
        later = np.flatnonzero(~is_first)
        result[order[later]] = order[later - 1]
        return result

    def token_row(self) -> IntArray:
        """The row of each token. Shapes: int64 [T]."""
        return np.repeat(np.arange(self.num_rows), np.diff(self.row_token_offset))

    def _by_position(self) -> tuple[IntArray, BoolArray]:
        """Tokens sorted by request and position, then time; whether each is a position's first."""
        request = self.row_request[self.token_row()].astype(np.int64)
        key = request * (int(self.token_position.max()) + 1) + self.token_position
        order = np.argsort(key, kind="stable")
        is_first = np.ones(len(key), dtype=np.bool_)
        is_first[1:] = np.diff(key[order]) != 0
        return order, is_first

    def forwards(self, needs: Collection[str] = ()) -> Iterator[TraceForward]:
        """The forwards in order; contexts number them from 0, whatever `row_forward` starts with.

        `gate_scores` and `input_embedding` are filled in where `needs` names them, `token_ids`
        wherever recorded. Raises: TraceError where something needed was not recorded.
        """
        self.check_needs(needs)
        return self._replay(frozenset(needs))

    def _replay(self, needs: frozenset[str]) -> Iterator[TraceForward]:
        confidence = self.layer_time_confidence()
        position = self.token_position.astype(np.int64)
        token_ids = None if self.token_ids is None else self.token_ids.astype(np.int64)
        accepted = self.token_accepted.astype(np.bool_)
        rows = self._forward_rows()
        ended = self._ended()
        is_skipped: BoolArray = self.is_skipped
        bounds = self.forward_row_offset.tolist()
        offset = self.row_token_offset.tolist()
        for forward_id, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            here = slice(offset[first], offset[end])
            embedding = None
            if "input_embedding" in needs and self.input_embedding is not None:
                embedding = self.input_embedding[here].astype(np.float32)
            context = ForwardContext(
                forward_id,
                self.block_length,
                tuple(rows[first:end]),
                confidence[here],
                self.token_state[here],
                position[here],
                None if token_ids is None else token_ids[here],
                embedding,
            )
            yield TraceForward(
                context,
                self._demands(context, here, is_skipped[first:end], "gate_scores" in needs),
                ForwardOutcome(context, self.token_confidence[here], accepted[here]),
                ended.get(forward_id, ()),
            )

    def _forward_rows(self) -> list[ForwardRow]:
        phases = list(Phase)
        return [
            ForwardRow(request, block, step, phases[phase], size)
            for request, block, step, phase, size in zip(
                self.row_request.tolist(),
                self.row_block.tolist(),
                self.row_step.tolist(),
                self.row_phase.tolist(),
                np.diff(self.row_token_offset).tolist(),
                strict=True,
            )
        ]

    def _ended(self) -> dict[int, tuple[int, ...]]:
        """For each forward in which requests end, which."""
        forward_of_row = np.cumsum(np.diff(self.row_forward, prepend=self.row_forward[:1]) != 0)
        last = dict(zip(self.row_request.tolist(), forward_of_row.tolist(), strict=True))
        ended: dict[int, tuple[int, ...]] = {}
        for request, forward_id in sorted(last.items()):
            ended[forward_id] = (*ended.get(forward_id, ()), request)
        return ended

    def _demands(
        self, context: ForwardContext, here: slice, is_skipped: BoolArray, has_scores: bool
    ) -> list[LayerDemand]:
        ids_LTK = _layers_first(self.expert_ids[here], np.int64)
        weights_LTK = _layers_first(self.gate_weights[here], np.float32)
        scores_LTE = None
        if has_scores and self.gate_scores is not None:
            scores_LTE = _layers_first(self.gate_scores[here], np.float32)
        is_whole = np.logical_not(is_skipped.any(axis=0))
        demands = []
        for layer, distinct in enumerate(_distinct(ids_LTK, self.num_experts)):
            if distinct is None:
                continue
            ids, weights = ids_LTK[layer], weights_LTK[layer]
            scores = None if scores_LTE is None else scores_LTE[layer]
            part = context
            if not is_whole[layer]:
                is_wanted = ~is_skipped[:, layer]
                part = context.part(is_wanted.tolist())
                mask = np.repeat(is_wanted, [row.num_tokens for row in context.rows])
                ids, weights = ids[mask], weights[mask]
                scores = None if scores is None else scores[mask]
            demands.append(LayerDemand(layer, part, ids, weights, *distinct, scores))
        return demands

    def future(self) -> DemandFuture:
        """Who demands what in every forward, for policies that know it."""
        offset = self.row_token_offset[self.forward_row_offset].tolist()
        active = []
        for start, end in zip(offset, offset[1:], strict=False):
            ids_LTK = _layers_first(self.expert_ids[start:end], np.int64)
            layers = _distinct(ids_LTK, self.num_experts)
            active.append([None if found is None else found[0] for found in layers])
        return DemandFuture(active)

    def select_requests(self, indices: Sequence[int]) -> "RoutingTrace":
        """The forwards of some requests, in their order; requests are numbered as in `indices`.

        Rows of others that shared a forward are left out, so a batch gets smaller.
        Raises: TraceError for an index that is unknown or comes twice.
        """
        number = np.full(len(self.requests), -1, dtype=np.int32)
        for new, index in enumerate(indices):
            if not 0 <= index < len(self.requests):
                raise TraceError(
                    f"there is no request {index}; allowed: 0 to {len(self.requests) - 1}"
                )
            if number[index] >= 0:
                raise TraceError(f"request {index} is chosen twice; choose it once")
            number[index] = new
        keep_R = number[self.row_request] >= 0
        sizes = np.diff(self.row_token_offset)
        keep_T = np.repeat(keep_R, sizes)
        picked: dict[str, Any] = {
            name: array[keep_R if _dimensions(name)[0] == "R" else keep_T]
            for name, array in self.tensors().items()
            if name != "row_token_offset"
        }
        picked["row_request"] = number[picked["row_request"]]
        picked["row_token_offset"] = _offsets(sizes[keep_R])
        return replace(self, requests=tuple(self.requests[i] for i in indices), **picked)


def _layers_first(array_TLX: AnyArray, dtype: Any) -> AnyArray:
    return np.ascontiguousarray(array_TLX.transpose(1, 0, 2), dtype=dtype)


def _distinct(ids_LTK: IntArray, num_experts: int) -> list[tuple[IntArray, IntArray] | None]:
    """Per layer the distinct experts, ascending, and their token counts; None where all skipped."""
    num_layers = len(ids_LTK)
    # Column 0 takes the -1 of rows that skipped the layer.
    flat = ids_LTK + (1 + np.arange(num_layers) * (num_experts + 1))[:, None, None]
    counts = np.bincount(flat.ravel(), minlength=num_layers * (num_experts + 1))
    counts_LE = counts.reshape(num_layers, num_experts + 1)[:, 1:]
    layers, experts = counts_LE.nonzero()
    sizes = counts_LE[layers, experts]
    bounds = np.searchsorted(layers, np.arange(num_layers + 1)).tolist()
    return [
        (experts[start:end], sizes[start:end]) if end > start else None
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]


def _dimensions(name: str) -> str:
    return (_REQUIRED.get(name) or _OPTIONAL[name])[1]


def _offsets(sizes: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def concatenate_traces(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """One trace after the other, as one. Optional tensors stay where all hold them.

    Raises: TraceError for traces of different models or decoding settings.
    """
    if not traces:
        raise TraceError("there are no traces to put together; give one at least")
    first = traces[0]
    for name in ("model_type", *_HEADER_INTS):
        values = sorted({str(getattr(trace, name)) for trace in traces})
        if len(values) > 1:
            raise TraceError(f"{name} differs between the traces ({', '.join(values)})")
    tensors: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name) for trace in traces])
        for name in [*_REQUIRED, *_OPTIONAL]
        if all(getattr(trace, name) is not None for trace in traces)
    }
    sizes = [np.diff(trace.row_token_offset) for trace in traces]
    num_requests = [len(trace.requests) for trace in traces]
    num_rows = [trace.num_rows for trace in traces]
    last = [int(trace.row_forward[-1]) + 1 for trace in traces]
    tensors["row_token_offset"] = _offsets(np.concatenate(sizes))
    for name, step in (("row_request", num_requests), ("row_forward", last)):
        shift = np.repeat(np.cumsum([0, *step[:-1]]), num_rows)
        tensors[name] = (tensors[name] + shift).astype(np.int32)
    is_mixed = len({trace.threshold for trace in traces}) > 1
    if is_mixed:
        raise TraceError("threshold differs between the traces")
    tensors.update((name, None) for name in _OPTIONAL if name not in tensors)
    requests = tuple(request for trace in traces for request in trace.requests)
    return replace(first, requests=requests, **tensors)


def mix_traces(traces: Sequence[RoutingTrace], num_requests: int, *, seed: int) -> RoutingTrace:
    """A uniform sample of the requests of several traces, one request after another.

    Raises: TraceError for more requests than there are, or traces that do not go together.
    """
    everyone = [(t, r) for t, trace in enumerate(traces) for r in range(len(trace.requests))]
    if not 1 <= num_requests <= len(everyone):
        raise TraceError(f"num_requests is {num_requests}; allowed: 1 to {len(everyone)}")
    chosen = np.random.default_rng(seed).permutation(len(everyone))[:num_requests]
    picked = [everyone[i] for i in chosen.tolist()]
    return concatenate_traces([traces[t].select_requests([r]) for t, r in picked])


# Files


def load_trace(path: str | Path) -> RoutingTrace:
    """Read and check a trace.

    Raises: TraceNotFoundError where there is no file; TraceError naming the file, the field, the
    row and what is allowed where something in it is wrong.
    """
    path = Path(path)
    try:
        is_there = path.exists()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not is_there:
        raise TraceNotFoundError(f"{path}: there is no such file; name a trace, NAME{SUFFIX}")
    if not path.is_file():
        raise TraceError(f"{path}: is not a file; name a trace, NAME{SUFFIX}")
    try:
        with safe_open(path, framework="numpy") as file:
            header = _parse_header(file.metadata())
            tensors = _read_tensors(file)
        return RoutingTrace(**header, **tensors)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except SafetensorError as error:
        raise TraceError(
            f"{path}: is no safetensors file, or a part of one ({error}); copy or record it again"
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None


def save_trace(trace: RoutingTrace, path: str | Path) -> None:
    """Write a trace beside its place and move it there, so that no half file is ever seen.

    Raises: TraceError where it cannot be written.
    """
    path = Path(path)
    metadata = {METADATA_KEY: json.dumps(trace.header(), ensure_ascii=False)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Made here first: the library's own files are readable by their owner alone.
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode
        save_file(trace.tensors(), temporary, metadata)
        os.chmod(temporary, mode & 0o777)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be written ({reason})") from None
    finally:
        temporary.unlink(missing_ok=True)


def is_trace(path: str | Path) -> bool:
    """Whether a file says that it is a trace, right or wrong otherwise; reads its header only."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.name.endswith(SUFFIX):
        return True
    try:
        with safe_open(path, framework="numpy") as file:
            return METADATA_KEY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _parse_header(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        raise TraceError(f"has no metadata {METADATA_KEY}; it is no routing trace")
    try:
        header = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"metadata {METADATA_KEY}: is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise TraceError(f"metadata {METADATA_KEY}: is {_kind(header)}; allowed: an object")
    version = header.pop("version", None)
    if version is None:
        raise TraceError("version: is missing in the metadata")
    if not _is_int(version) or version != VERSION:
        raise TraceError(f"version: is {version!r}; allowed: {VERSION}")
    names = ("source", "model_type", "model_name", *_HEADER_INTS, "threshold", "requests")
    for name in names:
        if name not in header:
            raise TraceError(f"{name}: is missing in the metadata")
    known = {name: header.pop(name) for name in names}
    known["requests"] = _parse_requests(known["requests"])
    return {**known, "extra": header}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def _parse_requests(value: object) -> tuple[TraceRequest, ...]:
    if not isinstance(value, list):
        raise TraceError(f"requests: is {_kind(value)}; allowed: a list of objects")
    requests = []
    names = [item.name for item in fields(TraceRequest) if item.name != "extra"]
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise TraceError(f"requests[{index}]: is {_kind(entry)}; allowed: an object")
        for name in names:
            if name not in entry:
                raise TraceError(f"requests[{index}].{name}: is missing")
        extra = {name: item for name, item in entry.items() if name not in names}
        known = {name: entry[name] for name in names}
        # Other writers may number requests.
        if _is_int(known["id"]):
            known["id"] = str(known["id"])
        requests.append(TraceRequest(**known, extra=extra))
    return tuple(requests)


def _read_tensors(file: Any) -> dict[str, Any]:
    present = set(file.keys())
    tensors = {}
    for name, (dtype, _) in {**_REQUIRED, **_OPTIONAL}.items():
        if name not in present:
            if name in _REQUIRED:
                raise TraceError(f"{name}: the tensor is missing; it is {dtype} {_layout(name)}")
            continue
        # Looked at first: numpy lacks some of the dtypes of safetensors.
        stored = _DTYPE_NAMES.get(file.get_slice(name).get_dtype(), "of another kind")
        if stored != dtype:
            raise TraceError(f"{name}: is {stored}; allowed: {dtype} {_layout(name)}")
        tensors[name] = file.get_tensor(name)
    return tensors


_DTYPE_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}


# Checks


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _layout(name: str) -> str:
    dimensions = _dimensions(name)
    return f"[{dimensions}]" if dimensions == "R+1" else f"[{', '.join(dimensions)}]"


def _check_header(trace: RoutingTrace) -> None:
    if trace.source not in SOURCES:
        raise TraceError(f"source: is {trace.source!r}; allowed: {' or '.join(SOURCES)}")
    for name in ("model_type", "model_name"):
        if not isinstance(getattr(trace, name), str):
            raise TraceError(f"{name}: is {getattr(trace, name)!r}; allowed: a string")
    largest = {"num_experts": np.iinfo(np.int16).max, "top_k": trace.num_experts}
    for name in _HEADER_INTS:
        value, maximum = getattr(trace, name), largest.get(name, 2**62)
        if not _is_int(value) or not 1 <= value <= maximum:
            upper = f"1 to {maximum}" if name in largest else "1 or more"
            raise TraceError(f"{name}: is {value!r}; allowed: {upper}")
    if not trace.requests:
        raise TraceError("requests: is empty; allowed: one or more")
    threshold = trace.threshold
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not is_number or not 0 <= threshold < float("inf"):
        raise TraceError(f"threshold: is {threshold!r}; allowed: a number of 0 or more")
    for index, request in enumerate(trace.requests):
        for name in ("id", "workload"):
            if not isinstance(getattr(request, name), str):
                value = getattr(request, name)
                raise TraceError(f"requests[{index}].{name}: is {value!r}; allowed: a string")
        for name in ("num_prompt_tokens", "num_generated_tokens"):
            value = getattr(request, name)
            if not _is_int(value) or value < 0:
                raise TraceError(f"requests[{index}].{name}: is {value!r}; allowed: 0 or more")


def _check_shapes(trace: RoutingTrace) -> None:
    tensors = trace.tensors()
    for name, array in tensors.items():
        dtype, _ = {**_REQUIRED, **_OPTIONAL}[name]
        if array.dtype != np.dtype(dtype):
            raise TraceError(f"{name}: is {array.dtype}; allowed: {dtype} {_layout(name)}")
    if trace.row_forward.size == 0:
        raise TraceError(
            "row_forward: the trace is empty, it has no row; record a forward at least"
        )
    sizes = {
        "R": trace.row_forward.shape[0],
        "T": trace.token_position.shape[0] if trace.token_position.ndim else 0,
        "L": trace.num_moe_layers,
        "K": trace.top_k,
        "E": trace.num_experts,
    }
    for name, array in tensors.items():
        dimensions = _dimensions(name)
        if dimensions == "R+1":
            wanted: tuple[int, ...] = (sizes["R"] + 1,)
        elif "H" in dimensions:
            wanted = (sizes["T"], array.shape[-1] if array.ndim == 2 else 0)
        else:
            wanted = tuple(sizes[letter] for letter in dimensions)
        if array.shape != wanted:
            raise TraceError(
                f"{name}: has shape {list(array.shape)}; allowed: {_layout(name)}, "
                f"here {list(wanted)}"
            )


def _check_rows(trace: RoutingTrace) -> None:
    offset = trace.row_token_offset
    if offset[0] != 0:
        raise TraceError(f"row_token_offset, row 0: starts at {offset[0]}; allowed: 0")
    _refuse_row("row_token_offset", np.diff(offset) <= 0, offset[1:], "more than the one before")
    if offset[-1] != trace.num_tokens:
        raise TraceError(
            f"row_token_offset: ends at {offset[-1]}; allowed: the {trace.num_tokens} tokens"
        )
    is_back = np.diff(trace.row_forward, prepend=trace.row_forward[:1]) < 0
    _refuse_row("row_forward", trace.row_forward < 0, trace.row_forward, "0 or more")
    _refuse_row("row_forward", is_back, trace.row_forward, "no less than in the row before")
    is_unknown = (trace.row_request < 0) | (trace.row_request >= len(trace.requests))
    allowed = f"0 to {len(trace.requests) - 1}, an index into requests"
    _refuse_row("row_request", is_unknown, trace.row_request, allowed)
    for name in ("row_block", "row_step"):
        values = getattr(trace, name)
        _refuse_row(name, values < 0, values, "0 or more")
    allowed = "0 prefill, 1 denoise, 2 commit"
    _refuse_row("row_phase", trace.row_phase > max(Phase), trace.row_phase, allowed)


def _check_tokens(trace: RoutingTrace) -> None:
    def refuse(name: str, is_wrong_T: BoolArray, allowed: str) -> None:
        _refuse_token(trace, name, is_wrong_T, getattr(trace, name), allowed)

    refuse("token_position", trace.token_position < 0, "0 or more")
    allowed = "0 prompt, 1 committed, 2 masked"
    refuse("token_state", trace.token_state > max(TokenState), allowed)
    with np.errstate(invalid="ignore"):
        is_outside = (trace.token_confidence < 0) | (trace.token_confidence > 1)
    refuse("token_confidence", is_outside, "0 to 1, or NaN where there were no logits")
    refuse("token_accepted", trace.token_accepted > 1, "0 or 1")
    is_no_mask = (trace.token_accepted == 1) & (trace.token_state != TokenState.MASKED)
    refuse("token_accepted", is_no_mask, "1 at masked positions (token_state 2) only")
    if trace.token_ids is not None:
        refuse("token_ids", trace.token_ids < -1, "-1 where unknown, else 0 or more")
    for name in ("gate_scores", "input_embedding"):
        values = getattr(trace, name)
        if values is not None:
            is_wrong = ~np.isfinite(values).reshape(trace.num_tokens, -1).all(axis=1)
            _refuse_token(trace, name, is_wrong, ~is_wrong, "finite numbers")
    order, is_first = trace._by_position()
    forward = trace.row_forward[trace.token_row()[order]]
    is_twice = np.zeros(trace.num_tokens, dtype=np.bool_)
    is_twice[order[1:]] = ~is_first[1:] & (np.diff(forward) == 0)
    refuse("token_position", is_twice, "each position of a request once in a forward")


def _check_routing(trace: RoutingTrace) -> None:
    for start in range(0, trace.num_tokens, _CHUNK):
        _check_routing_chunk(trace, slice(start, min(start + _CHUNK, trace.num_tokens)))
    # Each token is all ids or none by now; so must each row be.
    is_none_TL = trace.expert_ids[:, :, 0] < 0
    is_other_TL = is_none_TL != np.repeat(trace.is_skipped, np.diff(trace.row_token_offset), axis=0)
    _refuse_expert(
        trace, "expert_ids", is_other_TL, 0, "a layer skipped by all tokens of a row or none"
    )


def _check_routing_chunk(trace: RoutingTrace, here: slice) -> None:
    ids = trace.expert_ids[here]

    def refuse(name: str, is_wrong_TL: BoolArray, allowed: str) -> None:
        _refuse_expert(trace, name, is_wrong_TL, here.start, allowed)

    # As unsigned numbers -1 is the largest, so one look finds all that is outside.
    is_id = ids.view(np.uint16) < trace.num_experts
    is_none = ids == -1
    allowed = f"0 to {trace.num_experts - 1}, or -1 where the layer was skipped"
    refuse("expert_ids", ~(is_id | is_none).all(axis=2), allowed)
    is_skipped = is_none.all(axis=2)
    refuse("expert_ids", is_none.any(axis=2) & ~is_skipped, "-1 for all of a token or for none")
    ordered = np.sort(ids, axis=2)
    is_twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    refuse("expert_ids", is_twice & ~is_skipped, "each expert once for a token")
    weights = trace.gate_weights[here]
    # Comparisons with NaN are false.
    is_good = (weights >= 0).all(axis=2) & (weights <= 1 + _WEIGHT_TOLERANCE).all(axis=2)
    refuse("gate_weights", ~(is_good | is_skipped), "0 to 1")
    with np.errstate(invalid="ignore"):
        is_one = np.abs(weights.sum(axis=2) - 1) <= _WEIGHT_TOLERANCE
    refuse("gate_weights", ~(is_one | is_skipped), "weights that sum to 1 over a token's experts")
    if trace.hidden_cosine is not None:
        cosine = trace.hidden_cosine[here]
        with np.errstate(invalid="ignore"):
            is_outside = np.abs(cosine) > 1.001
        refuse("hidden_cosine", is_outside, "-1 to 1, or NaN where there is no forward before")


def _refuse_row(name: str, is_wrong_R: BoolArray, values_R: AnyArray, allowed: str) -> None:
    if is_wrong_R.any():
        row = int(is_wrong_R.argmax())
        raise TraceError(f"{name}, row {row}: is {values_R[row]}; allowed: {allowed}")


def _refuse_token(
    trace: RoutingTrace, name: str, is_wrong_T: BoolArray, values_T: AnyArray, allowed: str
) -> None:
    if is_wrong_T.any():
        token = int(is_wrong_T.argmax())
        row = int(np.searchsorted(trace.row_token_offset, token, side="right")) - 1
        place = f"row {row}, its token {token - int(trace.row_token_offset[row])}"
        raise TraceError(f"{name}, {place}: is {values_T[token]}; allowed: {allowed}")


def _refuse_expert(
    trace: RoutingTrace, name: str, is_wrong_TL: BoolArray, start: int, allowed: str
) -> None:
    if is_wrong_TL.any():
        token, layer = (int(i) for i in np.unravel_index(is_wrong_TL.argmax(), is_wrong_TL.shape))
        token += start
        row = int(np.searchsorted(trace.row_token_offset, token, side="right")) - 1
        place = f"row {row}, its token {token - int(trace.row_token_offset[row])}, layer {layer}"
        value = np.array(getattr(trace, name)[token, layer]).tolist()
        raise TraceError(f"{name}, {place}: is {value}; allowed: {allowed}")


# Recording


class TraceRecorder:
    """Collects forwards of a live run; `build` makes the trace.

    `observe_demand` is called with each layer's demand (it fits `experts.observers`), then
    `observe_outcome` once at the end of the forward (it fits `engine.outcome_observers`). What was
    demanded in a forward that never ended is dropped. `include` names optional tensors; they must
    be in every demand or context then.
    Raises: TraceError for an optional tensor that is unknown or does not come.
    """

    def __init__(self, shape: MoeShape, *, include: Iterable[str] = ()) -> None:
        self._shape = shape
        self._include = frozenset(include)
        if unknown := sorted(self._include - set(_OPTIONAL)):
            raise TraceError(f"include is {unknown}; allowed: {', '.join(_OPTIONAL)}")
        self._pending: dict[int, LayerDemand] = {}
        self._pending_forward = -1
        self._cosine: dict[int, npt.NDArray[np.float32]] = {}
        self._forwards: list[tuple[ForwardContext, dict[str, AnyArray]]] = []

    @property
    def num_forwards(self) -> int:
        return len(self._forwards)

    def observe_demand(self, demand: LayerDemand, plan: LayerPlan | None = None) -> None:
        if demand.context.forward_id != self._pending_forward:
            self._pending = {}
            self._pending_forward = demand.context.forward_id
        self._pending[demand.layer] = demand

    def observe_cosine(self, layer: int, cosine: npt.NDArray[np.float32]) -> None:
        """Of the layer's input in the forward under way. Shapes: float32 [T]."""
        self._cosine[layer] = cosine

    def observe_outcome(self, outcome: ForwardOutcome) -> None:
        """The forward is over: keep it."""
        context = outcome.context
        if context.token_position is None:
            raise TraceError("a forward says nothing of token positions; a trace needs them")
        if self._pending_forward != context.forward_id:
            self._pending = {}
        size = context.num_tokens
        tensors: dict[str, AnyArray] = {
            "token_position": context.token_position.astype(np.int32),
            "token_state": context.token_state.astype(np.uint8),
            "token_confidence": outcome.token_confidence.astype(np.float32),
            "token_accepted": outcome.token_accepted.astype(np.uint8),
            **self._routing(context),
        }
        if "hidden_cosine" in self._include:
            tensors["hidden_cosine"] = self._take_cosine(size)
        for name, dtype in (("token_ids", np.int32), ("input_embedding", np.float16)):
            if name in self._include:
                value = self._of_context(context, name)
                if value is None:
                    raise TraceError(f"the run does not say {name}; leave it out of the trace")
                tensors[name] = value.astype(dtype)
        self._pending, self._cosine = {}, {}
        self._forwards.append((context, tensors))

    def _of_context(self, context: ForwardContext, name: str) -> AnyArray | None:
        """From the outcome's context, or from one that the layers were shown."""
        contexts = [context, *(demand.context for demand in self._pending.values())]
        for seen in contexts:
            value: AnyArray | None = getattr(seen, name)
            if value is not None and seen.rows == context.rows:
                return value
        return None

    def _take_cosine(self, size: int) -> npt.NDArray[np.float32]:
        cosine_TL = np.full((size, self._shape.num_layers), np.nan, dtype=np.float32)
        for layer, values in self._cosine.items():
            if len(values) == size:
                cosine_TL[:, layer] = values
        return cosine_TL

    def _routing(self, context: ForwardContext) -> dict[str, AnyArray]:
        shape, size = self._shape, context.num_tokens
        ids = np.full((size, shape.num_layers, shape.top_k), -1, dtype=np.int16)
        weights = np.zeros((size, shape.num_layers, shape.top_k), dtype=np.float32)
        tensors: dict[str, AnyArray] = {"expert_ids": ids, "gate_weights": weights}
        if "gate_scores" in self._include:
            scores_shape = (size, shape.num_layers, shape.num_experts)
            tensors["gate_scores"] = np.zeros(scores_shape, dtype=np.float16)
        for layer, demand in self._pending.items():
            here = _tokens_of(demand.context, context)
            ids[here, layer] = demand.topk_ids
            weights[here, layer] = demand.gate_weights
            if "gate_scores" in self._include:
                if demand.gate_scores is None:
                    raise TraceError("the run does not say gate_scores; leave them out")
                tensors["gate_scores"][here, layer] = demand.gate_scores
        return tensors

    def build(
        self,
        requests: Mapping[int, TraceRequest],
        *,
        model_type: str,
        model_name: str,
        block_length: int,
        threshold: float,
        extra: Mapping[str, Any] | None = None,
    ) -> RoutingTrace:
        """The trace of what was kept so far, as far as it belongs to `requests`.

        `requests` go by the request ids of the contexts; they are numbered in this order.
        Raises: TraceError where nothing was recorded of them.
        """
        number = {request_id: index for index, request_id in enumerate(requests)}
        rows: list[tuple[int, int, ForwardRow]] = []
        parts: list[dict[str, AnyArray]] = []
        for forward_id, (context, tensors) in enumerate(self._forwards):
            is_wanted = [row.request_id in number for row in context.rows]
            mask = np.repeat(is_wanted, [row.num_tokens for row in context.rows])
            parts.append({name: array[mask] for name, array in tensors.items()})
            rows += [
                (forward_id, number[row.request_id], row)
                for row in context.rows
                if row.request_id in number
            ]
        if not rows:
            raise TraceError("nothing was recorded of these requests")
        tensors_T: dict[str, Any] = {
            name: np.concatenate([part[name] for part in parts]) for name in parts[0]
        }
        return RoutingTrace(
            source="recorded",
            model_type=model_type,
            model_name=model_name,
            num_moe_layers=self._shape.num_layers,
            num_experts=self._shape.num_experts,
            top_k=self._shape.top_k,
            expert_bytes=self._shape.expert_bytes,
            block_length=block_length,
            threshold=threshold,
            requests=tuple(requests.values()),
            row_forward=np.array([forward for forward, _, _ in rows], dtype=np.int32),
            row_request=np.array([request for _, request, _ in rows], dtype=np.int32),
            row_block=np.array([row.block_id for _, _, row in rows], dtype=np.int32),
            row_step=np.array([row.step_id for _, _, row in rows], dtype=np.int32),
            row_phase=np.array([row.phase for _, _, row in rows], dtype=np.uint8),
            row_token_offset=_offsets(np.array([row.num_tokens for _, _, row in rows])),
            extra=extra or {},
            **tensors_T,
        )


def _tokens_of(part: ForwardContext, whole: ForwardContext) -> slice | BoolArray:
    """Where the tokens of a part of a forward's rows are among all of them."""
    if len(part.rows) == len(whole.rows):
        return slice(None)
    is_in: list[bool] = []
    wanted = list(part.rows)
    for row in whole.rows:
        is_here = bool(wanted) and wanted[0] == row
        if is_here:
            wanted.pop(0)
        is_in.append(is_here)
    assert not wanted
    return np.repeat(np.array(is_in, dtype=np.bool_), [row.num_tokens for row in whole.rows])
