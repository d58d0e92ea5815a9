"""The compiled kernels of native.c, loaded through ctypes; calls let other Python threads run.

Weights are bfloat16, those of experts also quantised; sums are fp32. An output's bits depend on its
own row, its weights and the instruction set alone: not on the number of rows or threads, nor on who
shares the call. The library is an optional part of the install: `native_kernels` is None, and the
log says why, without it.

Legend: N rows, D hidden size, F hidden size of one expert, G groups, O outputs, K inputs.
"""

import ctypes
import functools
import hashlib
import importlib.machinery
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from oled_moe.errors import MissingDependencyError
from oled_moe.store import SlotArena
from oled_moe.types import IntArray

logger = logging.getLogger(__name__)

# By their numbers in native.c, the slowest first.
ISAS = ("generic", "avx2", "avx512", "avx512-bf16")
ABI_VERSION = 11
_DIRECTORY = Path(__file__).parent
_REMEDY = "install again where there is a C compiler (pip install -e .)"
_OUT_OF_MEMORY = -1
# Calls that take no longer than reading so many bytes are done before a second thread would be of
# use, and with so many rows arithmetic takes as long as reading the weights.
_MIN_SHARED_BYTES = 512 * 1024
_ROWS_OF_A_READ = 8
# The largest head that `attend` takes, and the most experts that `route` does.
MAX_HEAD_SIZE = 256
MAX_ROUTED = 1024
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Segment(NamedTuple):
    """Consecutive tokens and the cache of their sequence in one layer, of which they see the first
    `num_keys` positions. Shapes: keys and values [G, S, H], each head contiguous."""

    num_tokens: int
    keys_GSH: Tensor
    values_GSH: Tensor
    num_keys: int


class NativeKernels:
    """The functions of one library with one instruction set: `isa`, the best here by default.

    `num_threads`: what dense products use, at first as many as torch has. Engines set it, as they
    set torch's: both are the process's.

    Raises: MissingDependencyError where `path` cannot be loaded, was built from another native.c,
    or this processor lacks `isa`.
    """

    def __init__(self, isa: str | None = None, path: Path | None = None) -> None:
        self._library = _open_library(_find_library() if path is None else path)
        available = [name for name in ISAS if self._library.oled_has_isa(ISAS.index(name))]
        if isa is not None and isa not in available:
            raise MissingDependencyError(
                f"native kernels: this processor does not run {isa!r}; allowed: "
                f"{', '.join(available)}"
            )
        self.isa = ISAS[self._library.oled_best_isa()] if isa is None else isa
        self._isa = ISAS.index(self.isa)
        self.num_threads = torch.get_num_threads()

    def experts(
        self,
        arena: SlotArena,
        rows_ND: Tensor,
        out_ND: Tensor,
        slots: IntArray,
        starts: IntArray,
        ends: IntArray,
        num_threads: int,
    ) -> None:
        """out[starts[g]:ends[g]] = the gated MLP of the same rows with the expert in slots[g].

        Shapes: rows and out bfloat16 [N, D], contiguous, not the same memory; slots, starts and
        ends int64 [G], contiguous, ranges disjoint. Mutates: out, those rows.
        """
        if not len(slots):
            return
        layout, quant = arena.layout, arena.layout.quant
        for rows in (rows_ND, out_ND):
            assert rows.dtype == layout.dtype == torch.bfloat16 and rows.is_contiguous()
            assert rows.shape == (len(rows_ND), layout.hidden_size)
        for places, limit in (
            (slots, len(arena) - 1),
            (starts, len(rows_ND)),
            (ends, len(rows_ND)),
        ):
            assert places.dtype == "int64" and places.shape == slots.shape
            assert places.flags.c_contiguous and places.min() >= 0 and places.max() <= limit
        self._check(
            self._library.oled_experts(
                arena.memory.data_ptr(),
                layout.slot_bytes,
                layout.down_offset,
                layout.hidden_size,
                layout.intermediate_size,
                layout.activation == "gelu_tanh",
                0 if quant is None else quant.bits,
                0 if quant is None else quant.group_size or 0,
                quant is not None and not quant.is_symmetric,
                rows_ND.data_ptr(),
                out_ND.data_ptr(),
                len(slots),
                slots.ctypes.data,
                starts.ctypes.data,
                ends.ctypes.data,
                self._isa,
                num_threads,
            )
        )

    def linear(
        self,
        rows_NK: Tensor,
        weight_OK: Tensor,
        bias_O: Tensor | None,
        out_NO: Tensor,
        num_threads: int,
    ) -> None:
        """out = rows · weightᵀ + bias, rounded once.

        Shapes: rows and weight bfloat16, contiguous; bias bfloat16 [O]; out bfloat16 or float32
        [N, O], contiguous. Mutates: out.
        """
        (num_rows, num_inputs), num_outputs = rows_NK.shape, len(weight_OK)
        assert weight_OK.shape[1] == num_inputs and out_NO.shape == (num_rows, num_outputs)
        assert rows_NK.dtype == weight_OK.dtype == torch.bfloat16
        assert out_NO.dtype in (torch.bfloat16, torch.float32)
        assert rows_NK.is_contiguous() and weight_OK.is_contiguous() and out_NO.is_contiguous()
        if bias_O is not None:
            assert bias_O.dtype == torch.bfloat16 and bias_O.is_contiguous()
            assert bias_O.shape == (num_outputs,)
        self._check(
            self._library.oled_linear(
                weight_OK.data_ptr(),
                rows_NK.data_ptr(),
                None if bias_O is None else bias_O.data_ptr(),
                out_NO.data_ptr(),
                num_rows,
                num_inputs,
                num_outputs,
                out_NO.dtype == torch.float32,
                self._isa,
                num_threads,
            )
        )

    def combine(self, rows_ND: Tensor, places_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Σ weights[t, k] · rows[places[t, k]] for each token, in the order of k; fp32 [T, D].

        Shapes: rows bfloat16 [N, D]; places int64 [T, K]; weights float32 [T, K]; contiguous.
        """
        num_tokens, num_places = places_TK.shape
        assert rows_ND.dtype == torch.bfloat16 and rows_ND.is_contiguous()
        assert places_TK.dtype == torch.int64 and places_TK.is_contiguous()
        assert weights_TK.dtype == torch.float32 and weights_TK.is_contiguous()
        assert weights_TK.shape == places_TK.shape
        total_TD = torch.empty(num_tokens, rows_ND.shape[1])
        num_threads = worthwhile_threads(rows_ND.nbytes, self.num_threads)
        self._check(
            self._library.oled_combine(
                rows_ND.data_ptr(),
                places_TK.data_ptr(),
                weights_TK.data_ptr(),
                total_TD.data_ptr(),
                num_tokens,
                num_places,
                rows_ND.shape[1],
                self._isa,
                num_threads,
            )
        )
        return total_TD

    def choose(self, logits_NV: Tensor, banned_id: int) -> tuple[Tensor, Tensor, bool]:
        """The best id of each row but `banned_id` (the first of equals), its probability among
        all, and whether all logits are finite; without, ids and probabilities mean nothing.

        Shapes: logits float32 [N, V], contiguous -> int64 [N], float32 [N].
        """
        assert logits_NV.dtype == torch.float32 and logits_NV.is_contiguous()
        num_rows, num_logits = logits_NV.shape
        best_N = torch.empty(num_rows, dtype=torch.int64)
        probability_N = torch.empty(num_rows)
        num_threads = worthwhile_threads(logits_NV.nbytes, self.num_threads)
        num_bad = self._library.oled_choose(
            logits_NV.data_ptr(),
            num_rows,
            num_logits,
            banned_id,
            best_N.data_ptr(),
            probability_N.data_ptr(),
            self._isa,
            num_threads,
        )
        if num_bad < 0:
            self._check(num_bad)
        return best_N, probability_N, num_bad == 0

    def rotate(self, heads_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        """Heads whose first R dimensions are turned, half by half; every step is rounded.

        Shapes: heads bfloat16 [T, N, H], cos and sin bfloat16 [T, R], contiguous; R is even.
        """
        num_tokens, num_heads, head_size = heads_TNH.shape
        rotary_size = cos_TR.shape[1]
        assert rotary_size % 2 == 0 and rotary_size <= head_size
        for part in (heads_TNH, cos_TR, sin_TR):
            assert part.dtype == torch.bfloat16 and part.is_contiguous()
        assert cos_TR.shape == sin_TR.shape == (num_tokens, rotary_size)
        out_TNH = torch.empty_like(heads_TNH)
        if heads_TNH.numel():
            self._check(
                self._library.oled_rotate(
                    heads_TNH.data_ptr(),
                    cos_TR.data_ptr(),
                    sin_TR.data_ptr(),
                    out_TNH.data_ptr(),
                    num_tokens,
                    num_heads,
                    head_size,
                    rotary_size,
                    self._isa,
                    worthwhile_threads(heads_TNH.nbytes, self.num_threads),
                )
            )
        return out_TNH

    def route(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        *,
        num_groups: int,
        num_kept_groups: int,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sigmoid scores, of which the best `top_k` with the bias added are chosen, among the
        groups whose two best add up to the most; ids int64 [T, K], best first, the first of
        equals; their shares of the scores fp32 [T, K], the score itself where K is 1; all scores
        fp32 [T, E].

        Shapes: logits float32 [T, E] and bias float32 [E], contiguous; groups divide E.
        """
        num_rows, num_experts = logits_TE.shape
        assert logits_TE.dtype == torch.float32 and logits_TE.is_contiguous()
        assert num_experts <= MAX_ROUTED and num_experts % num_groups == 0
        assert top_k <= num_kept_groups * (num_experts // num_groups)
        scores_TE = torch.empty_like(logits_TE)
        ids_TK = torch.empty(num_rows, top_k, dtype=torch.int64)
        weights_TK = torch.empty(num_rows, top_k)
        if bias_E is not None:
            assert bias_E.dtype == torch.float32 and bias_E.is_contiguous()
            assert bias_E.shape == (num_experts,)
        if num_rows:
            self._check(
                self._library.oled_route(
                    logits_TE.data_ptr(),
                    None if bias_E is None else bias_E.data_ptr(),
                    scores_TE.data_ptr(),
                    ids_TK.data_ptr(),
                    weights_TK.data_ptr(),
                    num_rows,
                    num_experts,
                    num_groups,
                    num_kept_groups,
                    top_k,
                    self._isa,
                    worthwhile_threads(logits_TE.nbytes * top_k, self.num_threads),
                )
            )
        return ids_TK, weights_TK, scores_TE

    def attend(
        self, queries_TQH: Tensor, segments: Sequence[Segment], scale: float | None = None
    ) -> Tensor:
        """softmax(q · kᵀ · scale) · v where every query sees every key of its segment; [T, Q · H].

        `scale`: 1 / √H where None. The segments' tokens add up to T. Sums are fp32 and weights are
        not rounded. Shapes: queries bfloat16 [T, Q, H], contiguous; G divides Q.
        """
        num_tokens, num_queries, head_size = queries_TQH.shape
        assert queries_TQH.is_contiguous() and 0 < head_size <= MAX_HEAD_SIZE
        assert queries_TQH.dtype == torch.bfloat16
        num_groups = len(segments[0].keys_GSH)
        assert num_queries % num_groups == 0
        table = _table_of(segments, num_groups, head_size)
        assert sum(segment.num_tokens for segment in segments) == num_tokens
        out_TD = torch.empty(num_tokens, num_queries * head_size, dtype=torch.bfloat16)
        if num_tokens:
            num_products = sum(segment.num_tokens * segment.num_keys for segment in segments)
            self._check(
                self._library.oled_attention(
                    queries_TQH.data_ptr(),
                    out_TD.data_ptr(),
                    table,
                    len(segments),
                    num_queries,
                    num_groups,
                    head_size,
                    head_size**-0.5 if scale is None else scale,
                    self._isa,
                    worthwhile_threads(num_products * num_queries * 16, self.num_threads),
                )
            )
        return out_TD

    def store(self, keys_TGH: Tensor, values_TGH: Tensor, segments: Sequence[Segment]) -> None:
        """Copy keys and values of T tokens to the last positions of their segments.

        Shapes: bfloat16 [T, G, H], each token's heads contiguous. Mutates: the segments.
        """
        num_tokens, num_groups, head_size = keys_TGH.shape
        for part in (keys_TGH, values_TGH):
            assert part.shape == keys_TGH.shape and part.dtype == torch.bfloat16
            assert part.stride()[1:] == (head_size, 1)
        table = _table_of(segments, num_groups, head_size)
        assert sum(segment.num_tokens for segment in segments) == num_tokens
        assert all(segment.num_tokens <= segment.num_keys for segment in segments)
        self._library.oled_store(
            keys_TGH.data_ptr(),
            values_TGH.data_ptr(),
            keys_TGH.stride(0),
            values_TGH.stride(0),
            table,
            len(segments),
            num_groups,
            head_size,
        )

    def norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """x / √(mean(x²) + eps), rounded to bfloat16, times weight, over the last dimension.

        Shapes: x bfloat16 [..., D], contiguous; weight bfloat16 [D], or [..., D] with the last
        dimensions of x.
        """
        width = x_ND.shape[-1]
        assert x_ND.dtype == weight_D.dtype == torch.bfloat16
        assert x_ND.shape[-weight_D.ndim :] == weight_D.shape
        assert x_ND.is_contiguous() and weight_D.is_contiguous()
        out_ND = torch.empty_like(x_ND)
        num_rows = x_ND.numel() // width
        if num_rows:
            num_threads = worthwhile_threads(x_ND.nbytes, self.num_threads)
            self._check(
                self._library.oled_norm(
                    x_ND.data_ptr(),
                    weight_D.data_ptr(),
                    out_ND.data_ptr(),
                    num_rows,
                    weight_D.numel() // width,
                    width,
                    eps,
                    self._isa,
                    num_threads,
                )
            )
        return out_ND

    def read(self, memory: Tensor, num_threads: int) -> None:
        """Read memory as fast as it can be read: what the products are measured against."""
        assert memory.is_contiguous() and memory.device.type == "cpu"
        self._library.oled_read(memory.data_ptr(), memory.nbytes, num_threads)

    @staticmethod
    def _check(status: int) -> None:
        if status == _OUT_OF_MEMORY:
            raise MemoryError("native kernels: no memory for the rows of a call")
        assert status == 0, status


@functools.cache
def native_kernels() -> NativeKernels | None:
    """The library with the best instruction set here, or None, with the reason in the log."""
    try:
        native = NativeKernels()
    except MissingDependencyError as error:
        logger.warning("%s; torch computes on the CPU instead, which is slower", error)
        return None
    if native.isa == ISAS[0]:
        logger.warning(
            "native kernels: no AVX2 here, so torch computes on the CPU instead; "
            "only that path is tuned"
        )
        return None
    logger.info("native kernels: %s", native.isa)
    return native


def _table_of(
    segments: Sequence[Segment], num_groups: int, head_size: int
) -> "ctypes.Array[ctypes.c_int64]":
    """The segments as native.c reads them."""
    table: list[int] = []
    first = 0
    for num_tokens, keys_GSH, values_GSH, num_keys in segments:
        # Asked for every segment in every layer, so in as few calls as can be.
        stride, *others = keys_GSH.stride()
        assert others == [head_size, 1] and values_GSH.stride() == (stride, head_size, 1)
        shape = keys_GSH.shape
        assert values_GSH.shape == shape and shape[0] == num_groups and shape[2] == head_size
        assert 0 < num_keys <= shape[1]
        assert keys_GSH.dtype == values_GSH.dtype == torch.bfloat16
        table += (keys_GSH.data_ptr(), values_GSH.data_ptr(), first, num_tokens, num_keys, stride)
        first += num_tokens
    return (_LONG * len(table))(*table)


def worthwhile_threads(num_bytes: int, num_threads: int, num_rows: float = 1.0) -> int:
    """How many of `num_threads` to use for a call that reads so many bytes, weights of products
    with `num_rows` rows each."""
    work = num_bytes * max(1.0, num_rows / _ROWS_OF_A_READ)
    return num_threads if work >= _MIN_SHARED_BYTES else 1


def _find_library() -> Path:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = _DIRECTORY / f"_native{suffix}"
        if path.exists():
            return path
    raise MissingDependencyError(f"native kernels: were not built; {_REMEDY}")


def _open_library(path: Path) -> ctypes.CDLL:
    """The library with its functions declared, once it proves to be the one expected."""
    try:
        library = ctypes.CDLL(str(path))
        version = library.oled_abi_version()
    except (OSError, AttributeError) as error:
        raise MissingDependencyError(
            f"native kernels: {path.name} cannot be loaded ({error}); {_REMEDY}"
        ) from None
    if version != ABI_VERSION:
        raise MissingDependencyError(
            f"native kernels: {path.name} has version {version}, {ABI_VERSION} is needed; {_REMEDY}"
        )
    library.oled_source_id.restype = ctypes.c_uint64
    # Where the source lies beside it, as in a checkout, it may have changed since.
    source = _DIRECTORY / "native.c"
    if source.exists() and library.oled_source_id() != source_id(source):
        raise MissingDependencyError(
            f"native kernels: {path.name} was built from another native.c; {_REMEDY}"
        )
    library.oled_has_isa.argtypes = [_INT]
    library.oled_experts.argtypes = [_POINTER, *[_LONG] * 4, _INT, _INT, _LONG, _INT]
    library.oled_experts.argtypes += [_POINTER, _POINTER, _LONG]
    library.oled_experts.argtypes += [*[_POINTER] * 3, _INT, _INT]
    library.oled_linear.argtypes = [*[_POINTER] * 4, *[_LONG] * 3, *[_INT] * 3]
    library.oled_combine.argtypes = [*[_POINTER] * 4, *[_LONG] * 3, _INT, _INT]
    library.oled_choose.argtypes = [_POINTER, *[_LONG] * 3, _POINTER, _POINTER, _INT, _INT]
    library.oled_rotate.argtypes = [*[_POINTER] * 4, *[_LONG] * 4, _INT, _INT]
    library.oled_route.argtypes = [*[_POINTER] * 5, *[_LONG] * 5, _INT, _INT]
    library.oled_store.argtypes = [*[_POINTER] * 2, *[_LONG] * 2, _POINTER, *[_LONG] * 3]
    library.oled_store.restype = None
    library.oled_attention.argtypes = [*[_POINTER] * 3, *[_LONG] * 4, ctypes.c_float, _INT, _INT]
    library.oled_norm.argtypes = [*[_POINTER] * 3, *[_LONG] * 3, ctypes.c_float, _INT, _INT]
    library.oled_read.argtypes = [_POINTER, _LONG, _INT]
    library.oled_read.restype = ctypes.c_uint64
    return library


def source_id(source: Path) -> int:
    """What setup.py puts into the library: the first 8 bytes of the SHA-256 of native.c."""
    return int(hashlib.sha256(source.read_bytes()).hexdigest()[:16], 16)
