"""CUDA graphs: the kernels of a piece of a model, recorded once and queued with one launch.

They are the same kernels on the same numbers, so whether a piece is recorded changes no result.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_NUM_TIMED = 10

# A pure function of tensors that returns new ones; the same key always means the same function.
Piece = Callable[..., tuple[Tensor, ...]]
PieceKey = tuple[int, str]


class Graph(Protocol):
    """Kernels that were recorded once."""

    def replay(self) -> None:
        """Queue them all on the current stream."""
        ...


class GraphApi(Protocol):
    """What is needed to record kernels."""

    def capture(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Graph, tuple[Tensor, ...]]:
        """Record what `work` launches; the graph and the tensors that it fills at every replay."""
        ...

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes, launches and GPU together, when it comes again and again."""
        ...


class TorchGraphs:
    """Graphs through torch.cuda, all in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Graph, tuple[Tensor, ...]]:
        # Libraries make room for themselves on first use, which a recording does not allow.
        side: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on copying meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = work()
        return graph, outputs

    def seconds(self, work: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            torch.cuda.synchronize(self._device)
            start_s = time.perf_counter()
            for _ in range(_NUM_TIMED):
                work()
            torch.cuda.synchronize(self._device)
            times.append(time.perf_counter() - start_s)
        return min(times) / _NUM_TIMED


class _Recording(NamedTuple):
    """A piece as a graph, with the tensors that it reads and fills."""

    graph: Graph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def __call__(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.outputs


class RecordedPieces:
    """Runs pieces of a model as graphs: one launch for what would take many.

    A piece is recorded when it comes with the same key and shapes for the second time, up to
    `most_rows` rows, for up to `most_sizes` numbers of rows, and if the first of its name and
    shapes was found faster so; else it runs as it is. What a graph returns is overwritten the next
    time that it runs. Pieces must neither wait for the GPU nor keep anything of their inputs.
    """

    def __init__(self, api: GraphApi, *, most_rows: int = 64, most_sizes: int = 4) -> None:
        self._api = api
        self._most_rows = most_rows
        self._most_sizes = most_sizes
        self._sizes: set[int] = set()
        self._seen: set[tuple[Any, ...]] = set()
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        # By name and shapes: whether recordings are worth it, once that was measured.
        self._is_faster: dict[tuple[Any, ...], bool] = {}

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def __call__(self, key: PieceKey, piece: Piece, *inputs: Tensor) -> tuple[Tensor, ...]:
        place = (key, *(tensor.shape for tensor in inputs))
        recording = self._recordings.get(place)
        if recording is None:
            if not self._is_candidate(place, len(inputs[0])):
                return piece(*inputs)
            recording = self._record(piece, inputs)
            kind = (key[1], *place[1:])
            if not self._is_worth_it(kind, recording, piece, inputs):
                return piece(*inputs)
            self._recordings[place] = recording
        return recording(inputs)

    def _is_candidate(self, place: tuple[Any, ...], num_rows: int) -> bool:
        if num_rows > self._most_rows or self._is_faster.get((place[0][1], *place[1:])) is False:
            return False
        if place not in self._seen:
            self._seen.add(place)
            return False
        if num_rows not in self._sizes and len(self._sizes) >= self._most_sizes:
            return False
        self._sizes.add(num_rows)
        return True

    def _record(self, piece: Piece, inputs: tuple[Tensor, ...]) -> _Recording:
        own = tuple(tensor.clone() for tensor in inputs)
        graph, outputs = self._api.capture(lambda: piece(*own))
        return _Recording(graph, own, outputs)

    def _is_worth_it(
        self,
        kind: tuple[Any, ...],
        recording: _Recording,
        piece: Piece,
        inputs: tuple[Tensor, ...],
    ) -> bool:
        if kind not in self._is_faster:
            plain_s = self._api.seconds(lambda: piece(*inputs))
            recorded_s = self._api.seconds(lambda: recording(inputs))
            self._is_faster[kind] = recorded_s < plain_s
            logger.info(
                "%s for %d tokens takes %.0f us as it is and %.0f us as a CUDA graph: %s",
                kind[0],
                len(inputs[0]),
                1e6 * plain_s,
                1e6 * recorded_s,
                "a graph" if self._is_faster[kind] else "as it is",
            )
        return self._is_faster[kind]
