"""Packs checkpoints: experts as aligned slots, one read each, in the form that kernels read.

What is written is decided here; pack_writer.py writes it.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oled_moe.checkpoint import INDEX_NAME, Checkpoint, FoundWeights, find_weights
from oled_moe.codes import StoredForm
from oled_moe.config import check_choice
from oled_moe.devices import Progress
from oled_moe.encodings import EncodedRecord
from oled_moe.errors import CheckpointError, ConfigError
from oled_moe.model_paths import find_model
from oled_moe.models import find_family
from oled_moe.pack_places import check_place, writing
from oled_moe.pack_writer import (
    JOURNAL_VERSION,
    PackFile,
    PackJob,
    Piece,
    file_header,
    open_journal,
    write_pack,
)
from oled_moe.packs import (
    DENSE_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    Pack,
    expert_dtype_name,
    expert_tensor,
    experts_name,
    layout_to_dict,
)
from oled_moe.quantization import DEFAULT_SPECS, FORM_WORDS, METHODS, QuantSpec, quantize
from oled_moe.store import (
    PAGE_BYTES,
    DiskExpertStore,
    ExpertLayout,
    FileSpan,
    aligned_empty,
    memory_of,
)
from oled_moe.tensor_files import TensorRecord

logger = logging.getLogger(__name__)

# What --dtype may say besides the forms of QuantSpec.
FLOAT_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
# How weights are rounded to whole numbers where nobody asks for another way of METHODS.
DEFAULT_METHOD = "searched"
# What the manifest says in place of one of these where codes are those of the source.
AS_STORED = "stored"
# Of a tensor that is no expert, written at a time.
_PART_BYTES = 64 * 2**20
# Experts that are made at a time: each takes a few slots of memory.
_MAX_THREADS = 4
# Files that say how a model is used; code that came with it is left behind.
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md")
_COPIED_NAMES = ("LICENSE", "NOTICE")
_MAX_COPIED_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class PackReport:
    """What was packed. `rounding`: what that did to the weights of experts, in words;
    `num_resumed_bytes`: what an earlier run had written. Units: bytes."""

    path: Path
    expert_dtype: str
    rounding: str
    num_experts: int
    slot_bytes: int
    source_bytes: int
    pack_bytes: int
    num_resumed_bytes: int


def pack_checkpoint(
    model: str | Path,
    out: Path,
    *,
    dtype: str | None = None,
    dense_dtype: str | None = None,
    method: str | None = None,
    hub_cache: Path | None = None,
    progress: Progress | None = None,
    free_bytes: Callable[[Path], int] | None = None,
    num_threads: int | None = None,
) -> PackReport:
    """Pack `demo`, a directory or a hub id in the local cache at `out`.

    `dtype`: bf16, int8, int4 or another form of `QuantSpec` for experts, `dense_dtype`: bf16 for
    the rest; None keeps what is stored. `method`, for whole numbers alone, is one of `METHODS`.
    A run that was killed is continued.

    Raises: ConfigError for a dtype, and where something is at `out` or nothing can be;
    CheckpointError for a source that cannot be read, or has changed since the run that is
    continued; DoesNotFitError where the disk is too small; OledMoeError where it breaks.
    """
    source = find_model(model, hub_cache=hub_cache)
    check_place(out, source)
    job = plan_pack(source, dtype, dense_dtype, method)
    try:
        with writing(out), open_journal(out, job) as journal:
            num_threads = num_threads or default_threads()
            num_resumed = write_pack(job, out, journal, progress, free_bytes, num_threads)
        return make_report(job, out, num_resumed)
    finally:
        job.close()


def default_threads() -> int:
    """How many experts are made at a time where nobody says."""
    return min(_MAX_THREADS, os.cpu_count() or 1)


def make_report(job: PackJob, out: Path, num_resumed_bytes: int) -> PackReport:
    """What a job has become."""
    return PackReport(
        path=out,
        expert_dtype=expert_dtype_name(job.layout),
        rounding=job.rounding,
        num_experts=job.num_layers * job.num_experts,
        slot_bytes=job.layout.slot_bytes,
        source_bytes=job.source_bytes,
        pack_bytes=job.num_bytes,
        num_resumed_bytes=num_resumed_bytes,
    )


# What is to be written


def plan_pack(
    source: Path,
    dtype: str | None,
    dense_dtype: str | None = None,
    wanted_method: str | None = None,
) -> PackJob:
    """Everything that is known before a weight is read. Raises: as `pack_checkpoint`."""
    if dense_dtype is not None:
        check_choice("dense-dtype", dense_dtype, tuple(FLOAT_DTYPES))
    if wanted_method is not None:
        check_choice("method", wanted_method, tuple(METHODS))
    checkpoint = Checkpoint.open(source)
    # Other files lie beside one in GGUF.
    directory = source.parent if source.is_file() else source
    family = find_family(checkpoint.config)
    config = family.config(checkpoint.config)
    found = find_weights(
        checkpoint,
        map_weight=family.weight_map(config),
        shapes=family.parameter_shapes(config),
        num_moe_layers=config.num_moe_layers,
        num_experts=config.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        dtype=FLOAT_DTYPES.get(dtype or ""),
    )
    target = _target(checkpoint, found, dtype, wanted_method)
    keeps_codes = checkpoint.pack is None and target.method == AS_STORED
    store = found.open_store("direct", target.quant if keeps_codes else None)
    try:
        layout = replace(store.layout, quant=target.quant)
        kept = family.kept_dtypes(config)
        dense = [
            (record, _dense_dtype(record, None if name in kept else dense_dtype))
            for name, record in found.parameters.items()
        ]
        # Tensors of whole pages come first, so that these begin at whole pages.
        dense.sort(key=lambda entry: _num_bytes(*entry) % PAGE_BYTES != 0)
        files = [_dense_file(dense)]
        for layer in range(store.num_layers):
            files.append(_expert_file(store, layout, target.method, layer))
        copies = _find_copies(directory, checkpoint)
        sources = (*checkpoint.file_bytes, *copies)
        return PackJob(
            source=str(directory),
            layout=layout,
            method=target.method,
            rounding=target.rounding,
            files=tuple(files),
            dense_names=tuple(record.name for record, _ in dense),
            num_layers=store.num_layers,
            num_experts=store.num_experts,
            copies=copies,
            source_bytes=checkpoint.num_bytes,
            identity=_identity(_source_state(sources), layout, target.method, dense_dtype),
            source_state=lambda: _source_state(sources),
            close=store.close,
        )
    except BaseException:
        store.close()
        raise


class _Target(NamedTuple):
    """What experts become: the form of their codes, None for plain numbers; how these are found,
    a name of `METHODS` or `AS_STORED`; and in words."""

    quant: QuantSpec | None
    method: str | None
    rounding: str


def _target(
    checkpoint: Checkpoint, found: FoundWeights, dtype: str | None, wanted_method: str | None
) -> _Target:
    """Raises: ConfigError."""
    is_plain = dtype is None or dtype in FLOAT_DTYPES
    if is_plain and wanted_method is not None:
        raise ConfigError(
            f"method is {wanted_method!r} and nothing is rounded; allowed: with --dtype int8 or "
            "int4"
        )
    quant = None if is_plain else _parse_form(str(dtype))
    if checkpoint.pack is not None and checkpoint.pack.layout.quant is not None:
        return _target_of_pack(checkpoint.pack, checkpoint.path, dtype, quant, wanted_method)
    if checkpoint.encoding is not None and wanted_method is None and dtype not in FLOAT_DTYPES:
        form = found.form
        spec = form if isinstance(form, str) else _form_within(form, dtype, quant)
        if isinstance(spec, QuantSpec) and isinstance(form, StoredForm):
            return _Target(spec, AS_STORED, _kept_words(checkpoint.encoding, form))
        if quant is None:
            logger.warning(
                "experts become bfloat16, as no form of packs keeps what is stored (%s): %s",
                checkpoint.encoding,
                form,
            )
            return _Target(None, None, f"decoded from {checkpoint.encoding}: {form}")
        words = _rounding_words(quant, DEFAULT_METHOD)
        return _Target(quant, DEFAULT_METHOD, f"{words}, not as stored: {spec}")
    if quant is not None:
        method = wanted_method or DEFAULT_METHOD
        return _Target(quant, method, _rounding_words(quant, method))
    return _Target(None, None, "as stored" if dtype is None else f"as {dtype}")


def _target_of_pack(
    pack: Pack, path: Path, dtype: str | None, quant: QuantSpec | None, wanted_method: str | None
) -> _Target:
    """A quantised pack stays what it is. Raises: ConfigError where it is to be another."""
    stored, method = pack.layout.quant, pack.manifest.method
    assert stored is not None
    is_same = dtype is None or quant == stored or dtype == f"int{stored.bits}"
    if not is_same or wanted_method not in (None, method):
        raise ConfigError(
            f"dtype is {dtype!r} and {path} is packed as {stored}; pack the checkpoint that it "
            "came from"
        )
    return _Target(stored, method, "as packed")


def _form_within(form: StoredForm, dtype: str | None, quant: QuantSpec | None) -> QuantSpec | str:
    """The form asked for that keeps codes as they are stored, or why it does not."""
    if quant is None:
        return form.spec
    # A name without groups leaves these open.
    if dtype in DEFAULT_SPECS and quant.bits >= form.spec.bits:
        return form.widened(quant.bits)
    return quant if form.within(quant) else f"{quant} does not hold {form.spec}"


def _rounding_words(quant: QuantSpec, method: str) -> str:
    """What is done; of 8 bits no method makes more than the nearest (quantization.py)."""
    if quant.bits == 8 or method == "nearest":
        return "rounded to the nearest"
    return f"rounded, scales {method} for the least error"


def _kept_words(encoding: str, form: StoredForm) -> str:
    if not form.rounded:
        return f"codes and scales as stored ({encoding})"
    return f"codes as stored ({encoding}), scales rounded from {' and '.join(form.rounded)} to bf16"


def check_dtype(dtype: str, field: str = "dtype") -> None:
    """Raises: ConfigError, naming `field`, for what experts cannot become."""
    if dtype not in FLOAT_DTYPES:
        _parse_form(dtype, field)


def _parse_form(dtype: str, field: str = "dtype") -> QuantSpec:
    try:
        return QuantSpec.parse(dtype)
    except ConfigError:
        raise ConfigError(
            f"{field} is {dtype!r}; allowed: bfloat16 or bf16, {FORM_WORDS}"
        ) from None


def _dense_dtype(record: TensorRecord, wanted: str | None) -> torch.dtype:
    return record.dtype if wanted is None else FLOAT_DTYPES[wanted]


def _num_bytes(record: TensorRecord, dtype: torch.dtype) -> int:
    return prod(record.shape) * dtype.itemsize


def _dense_file(dense: Sequence[tuple[TensorRecord, torch.dtype]]) -> PackFile:
    header = file_header([(record.name, dtype, record.shape) for record, dtype in dense])
    pieces = [piece for record, dtype in dense for piece in _dense_pieces(record, dtype)]
    return PackFile(DENSE_NAME, header, tuple(pieces))


def _dense_pieces(record: TensorRecord, dtype: torch.dtype) -> Iterator[Piece]:
    """A tensor in parts, so that an embedding is never held whole; one that is encoded, as one."""
    if isinstance(record, EncodedRecord):
        spans = tuple(FileSpan(part.path, part.offset, part.num_bytes) for part in record.parts)
        yield Piece(_num_bytes(record, dtype), lambda: _bytes_of(record.read(), dtype), spans)
        return

    def part(start: int, num_bytes: int) -> Piece:
        def make() -> memoryview:
            stored = torch.empty(num_bytes, dtype=torch.uint8)
            if start == 0 and num_bytes:
                record.verify(stored)
            record.read_range(start, stored)
            return _bytes_of(stored.view(record.dtype), dtype)

        num_packed = num_bytes // record.dtype.itemsize * dtype.itemsize
        span = FileSpan(record.path, record.offset + start, num_bytes)
        return Piece(num_packed, make, (span,), is_rest=start > 0)

    for start in range(0, max(record.num_bytes, 1), _PART_BYTES):
        yield part(start, min(_PART_BYTES, record.num_bytes - start))


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    return memory_of(tensor.to(dtype).contiguous().view(-1).view(torch.uint8))


def _expert_file(
    store: DiskExpertStore, layout: ExpertLayout, method: str | None, layer: int
) -> PackFile:
    def piece(expert: int) -> Piece:
        def make() -> memoryview:
            return memory_of(_slot(store, layout, method, layer, expert))

        return Piece(layout.slot_bytes, make, store.spans(layer, expert))

    names = [expert_tensor(layer, expert) for expert in range(store.num_experts)]
    header = file_header([(name, torch.uint8, (layout.slot_bytes,)) for name in names])
    pieces = tuple(piece(expert) for expert in range(store.num_experts))
    return PackFile(experts_name(layer), header, pieces)


def _slot(
    store: DiskExpertStore, layout: ExpertLayout, method: str | None, layer: int, expert: int
) -> Tensor:
    """One expert as it is packed; zeros where nothing lies."""
    stored = aligned_empty(store.layout.slot_bytes).zero_()
    store.read_into(layer, expert, stored)
    quant = layout.quant
    if quant is None or store.layout.quant is not None:
        return stored
    assert method is not None
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    gate_up, down = store.layout.views(stored)
    width = layout.intermediate_size
    sources = (gate_up[:width], gate_up[width:], down)
    try:
        for target, matrix in zip(layout.packed_views(slot), sources, strict=True):
            target.copy_(quantize(matrix, quant, method))
    except CheckpointError as error:
        raise CheckpointError(f"layer {layer}, expert {expert}: {error}") from None
    return slot


def _find_copies(directory: Path, checkpoint: Checkpoint) -> tuple[Path, ...]:
    """Config, tokenizer, templates, words and licence of a checkpoint.

    Raises: CheckpointError where a GGUF file has no config.json beside it.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} has no config.json, which a pack carries; put that of the model that "
            f"{checkpoint.path.name} was made from there"
        )
    return tuple(
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and path.name not in (INDEX_NAME, MANIFEST_NAME)
        and path.name.isprintable()
        and not path.name.startswith(".")
        and (path.suffix in _COPIED_SUFFIXES or path.stem in _COPIED_NAMES)
        and path.stat().st_size <= _MAX_COPIED_BYTES
    )


def _identity(
    source: Mapping[str, Any], layout: ExpertLayout, method: str | None, dense_dtype: str | None
) -> dict[str, Any]:
    """The options, and what they are applied to."""
    return {
        "version": FORMAT_VERSION,
        "journal": JOURNAL_VERSION,
        "part_bytes": _PART_BYTES,
        "layout": layout_to_dict(layout, method),
        "dense_dtype": dense_dtype,
        "source": source,
    }


def _source_state(paths: Sequence[Path]) -> dict[str, list[int] | None]:
    """Every source file by its size and time of change, as they are now; None where one is gone."""

    def state_of(path: Path) -> list[int] | None:
        try:
            state = path.stat()
        except FileNotFoundError:
            return None
        return [state.st_size, state.st_mtime_ns]

    # Where it lies tells models apart whose files have the same times, as some archives unpack.
    return {str(path.parent.resolve() / path.name): state_of(path) for path in paths}


def report_to_dict(report: PackReport) -> dict[str, Any]:
    """As JSON values."""
    return {**asdict(report), "path": str(report.path)}
