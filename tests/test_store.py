"""Stores hand out exactly the bytes that were written, whichever way they read."""

import ctypes
import errno
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oled_moe.errors import CheckpointError, ConfigError, OledMoeError
from oled_moe.quantization import QuantSpec, matrix_bytes
from oled_moe.store import (
    PAGE_BYTES,
    DiskExpertStore,
    ExpertLayout,
    FileSpan,
    HostExpertStore,
    PlacedSpan,
    aligned_empty,
)

METHODS = ("direct", "buffered")
NUM_LAYERS, NUM_EXPERTS = 2, 3
# One matrix takes 3280 bytes: nothing but the first span is aligned to anything.
HIDDEN, WIDTH = 40, 41
LAYOUT = ExpertLayout(HIDDEN, WIDTH, torch.bfloat16)

Matrices = dict[str, Tensor]
Files = tuple[list[list[list[PlacedSpan]]], list[list[Matrices]]]


def write_experts(directory: Path, order: tuple[str, ...], dtype: torch.dtype) -> Files:
    """All experts one after another, the matrices of each in this order, an odd byte before."""
    generator = torch.Generator().manual_seed(1)
    layout = ExpertLayout(HIDDEN, WIDTH, dtype)
    targets = {"gate": 0, "up": layout.matrix_bytes, "down": layout.down_offset}
    path = directory / "experts"
    content = bytearray(b"x")
    spans: list[list[list[PlacedSpan]]] = []
    experts: list[list[Matrices]] = []
    for _ in range(NUM_LAYERS):
        spans.append([])
        experts.append([])
        for _ in range(NUM_EXPERTS):
            spans[-1].append([])
            experts[-1].append({})
            for matrix in order:
                shape = (HIDDEN, WIDTH) if matrix == "down" else (WIDTH, HIDDEN)
                weight = torch.randn(shape, generator=generator).to(dtype)
                span = FileSpan(path, len(content), layout.matrix_bytes)
                spans[-1][-1].append((span, targets[matrix]))
                experts[-1][-1][matrix] = weight
                content += weight.view(torch.uint8).numpy().tobytes()
            content += b"x"
    with path.open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    return spans, experts


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return write_experts(tmp_path, ("down", "gate", "up"), torch.bfloat16)


def open_store(files: Files, method: str, layout: ExpertLayout = LAYOUT) -> DiskExpertStore:
    return DiskExpertStore(layout, files[0], stored_dtype=torch.bfloat16, method=method)


def read(store: DiskExpertStore | HostExpertStore, layer: int, expert: int) -> Tensor:
    slot = aligned_empty(store.layout.slot_bytes)
    store.read_into(layer, expert, slot)
    return slot


def check(slot: Tensor, layout: ExpertLayout, expected: Matrices) -> None:
    weights = layout.views(slot)
    gate_up = torch.cat([expected["gate"], expected["up"]]).to(layout.dtype)
    assert torch.equal(weights.gate_up, gate_up)
    assert torch.equal(weights.down, expected["down"].to(layout.dtype))


def check_all(store: DiskExpertStore | HostExpertStore, files: Files) -> None:
    for layer, experts in enumerate(files[1]):
        for expert, expected in enumerate(experts):
            check(read(store, layer, expert), store.layout, expected)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([torch.bfloat16, torch.float32]))
def test_layout_packs_without_overlap(hidden: int, width: int, dtype: torch.dtype) -> None:
    layout = ExpertLayout(hidden, width, dtype)
    slot = aligned_empty(layout.slot_bytes)
    weights = layout.views(slot)
    assert weights.gate_up.shape == (2 * width, hidden)
    assert weights.down.shape == (hidden, width)
    assert weights.gate_up.data_ptr() == slot.data_ptr()
    assert weights.down.data_ptr() == slot.data_ptr() + layout.down_offset
    assert layout.down_offset % 64 == 0 and layout.slot_bytes % PAGE_BYTES == 0
    assert layout.gate_up_bytes <= layout.down_offset
    assert layout.down_offset + weights.down.nbytes <= layout.slot_bytes
    assert layout.weight_bytes == weights.gate_up.nbytes + weights.down.nbytes


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 10**6])
@pytest.mark.parametrize("alignment", [64, 4096, 2**21])
def test_aligned_empty(num_bytes: int, alignment: int) -> None:
    memory = aligned_empty(num_bytes, alignment)
    assert memory.shape == (num_bytes,) and memory.dtype == torch.uint8
    assert num_bytes == 0 or memory.data_ptr() % alignment == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("order", [("gate", "up", "down"), ("up", "down", "gate")])
def test_disk_reads_what_was_written(tmp_path: Path, order: tuple[str, ...], method: str) -> None:
    files = write_experts(tmp_path, order, torch.bfloat16)
    store = open_store(files, method)
    check_all(store, files)
    store.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_disk_converts(files: Files, dtype: torch.dtype, method: str) -> None:
    store = open_store(files, method, ExpertLayout(HIDDEN, WIDTH, dtype))
    check_all(store, files)
    assert store.scratch_bytes >= LAYOUT.slot_bytes
    store.close()


@pytest.mark.parametrize("method", METHODS)
def test_matrices_that_lie_together_are_one_read(
    files: Files, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(files, method)
    reads = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    read(store, 1, 1)
    assert len(reads) == 1
    store.close()


@pytest.mark.parametrize("limit", [1000, PAGE_BYTES, 3 * PAGE_BYTES])
@pytest.mark.parametrize("method", METHODS)
def test_short_reads_are_continued(
    files: Files, method: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(files, method)
    preadv = os.preadv
    limit = max(limit, PAGE_BYTES + 1) if method == "direct" else limit

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        first = memoryview(buffers[0])
        if method == "buffered":
            return preadv(descriptor, [first[:limit]], offset)
        # A direct read must stay aligned: read whole blocks, own up to fewer bytes.
        return min(preadv(descriptor, [first], offset), limit)

    monkeypatch.setattr(os, "preadv", short)
    check_all(store, files)
    store.close()


@pytest.mark.parametrize("method", METHODS)
def test_many_threads_read_at_once(files: Files, method: str) -> None:
    store = open_store(files, method, ExpertLayout(HIDDEN, WIDTH, torch.float32))

    def read_one(index: int) -> None:
        layer, expert = divmod(index % (NUM_LAYERS * NUM_EXPERTS), NUM_EXPERTS)
        check(read(store, layer, expert), store.layout, files[1][layer][expert])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read_one, range(200)))
    store.close()


def num_cached_pages(path: Path) -> int:
    """How many pages of a file lie in the page cache, as mincore(2) counts them."""
    num_pages = -(-path.stat().st_size // PAGE_BYTES)
    flags = np.zeros(num_pages, np.uint8)
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)))
        assert libc.mincore(*arguments, ctypes.c_void_p(flags.ctypes.data)) == 0
    return int((flags & 1).sum())


@pytest.mark.parametrize("method", METHODS)
def test_reading_leaves_nothing_in_the_page_cache(files: Files, method: str) -> None:
    path = files[0][0][0][0][0].path

    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if num_cached_pages(path):
        pytest.skip("this file system keeps pages whatever it is told")
    store = open_store(files, method)
    check_all(store, files)
    assert num_cached_pages(path) == 0
    store.close()


@pytest.mark.parametrize("refused_at", ["open", "read"])
def test_direct_falls_back_where_refused(
    files: Files,
    refused_at: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    direct: set[int] = set()
    real_open, real_preadv = os.open, os.preadv

    def refusing_open(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and refused_at == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor = real_open(path, flags & ~os.O_DIRECT)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def refusing_preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_preadv(descriptor, buffers, offset)

    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "open", refusing_open)
        patch.setattr(os, "preadv", refusing_preadv)
        store = open_store(files, "direct")
    assert store.method == "buffered"
    (record,) = caplog.records
    assert "O_DIRECT is refused" in record.getMessage()
    check_all(store, files)
    store.close()
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_platform_without_direct_reads_or_advice(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.delattr(os, "posix_fadvise")
    with caplog.at_level(logging.WARNING):
        store = open_store(files, "direct")
    assert store.method == "buffered"
    assert "no O_DIRECT" in caplog.text and "cannot drop pages" in caplog.text
    check_all(store, files)
    store.close()


def test_unknown_method_is_refused(files: Files) -> None:
    with pytest.raises(ConfigError, match="direct, buffered"):
        open_store(files, "mmap")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_missing", [2, PAGE_BYTES, 3 * 3280, 30000])
def test_file_cut_short_after_opening(files: Files, method: str, num_missing: int) -> None:
    path = files[0][0][0][0][0].path
    store = open_store(files, method)
    os.truncate(path, path.stat().st_size - num_missing)
    with pytest.raises(CheckpointError, match=r"experts: layer 1, expert 2 .* download it again"):
        read(store, 1, 2)
    check(read(store, 0, 0), LAYOUT, files[1][0][0])
    store.close()


@pytest.mark.parametrize("method", METHODS)
def test_disk_fault_names_the_expert(
    files: Files, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(files, method)

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError, match=r"layer 0, expert 1 .*Input/output error"):
        read(store, 0, 1)
    store.close()


@pytest.mark.parametrize("method", METHODS)
def test_missing_file_is_found_at_construction(files: Files, tmp_path: Path, method: str) -> None:
    spans, _ = files
    span, target = spans[1][2][0]
    spans[1][2][0] = (span._replace(path=tmp_path / "absent"), target)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="absent: cannot be opened"):
        open_store(files, method)
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("method", METHODS)
def test_reading_after_close(files: Files, method: str) -> None:
    store = open_store(files, method)
    store.close()
    store.close()
    with pytest.raises(OledMoeError, match="closed"):
        read(store, 0, 0)


def test_close_waits_for_reads(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(files, "buffered")
    is_reading, may_go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def waiting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        is_reading.set()
        assert may_go_on.wait(60)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", waiting)
    with ThreadPoolExecutor(2) as pool:
        slot = pool.submit(read, store, 0, 2)
        assert is_reading.wait(60)
        closed = pool.submit(store.close)
        assert not closed.done()
        may_go_on.set()
        check(slot.result(), LAYOUT, files[1][0][2])
        closed.result()


def test_a_store_that_is_dropped_closes_its_files(files: Files) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    store = open_store(files, "buffered")
    assert len(os.listdir("/proc/self/fd")) == num_open + 1
    del store
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_host_store_holds_all_experts(files: Files) -> None:
    disk = open_store(files, "buffered")
    done = []
    host = HostExpertStore.from_store(disk, lambda *progress: done.append(progress))
    disk.close()
    total = NUM_LAYERS * NUM_EXPERTS
    assert done == [(count, total) for count in range(1, total + 1)]
    check_all(host, files)
    for layer in range(NUM_LAYERS):
        for expert in range(NUM_EXPERTS):
            expected = files[1][layer][expert]
            weights = host.weights(layer, expert)
            assert torch.equal(weights.gate_up, torch.cat([expected["gate"], expected["up"]]))
            assert torch.equal(weights.down, expected["down"])
            assert weights.gate_up.data_ptr() % PAGE_BYTES == 0
    host.close()
    with pytest.raises(OledMoeError, match="closed"):
        host.weights(0, 0)


@pytest.mark.parametrize("form", ["int8", "int4", "int4-g32-asym"])
def test_slots_of_quantised_experts(form: str) -> None:
    spec = QuantSpec.parse(form)
    layout = ExpertLayout(70, 41, torch.bfloat16, quant=spec)
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    gate, up, down = layout.packed_views(slot)
    assert len(gate) == len(up) == layout.matrix_bytes == matrix_bytes(spec, 41, 70)
    assert len(down) == layout.down_bytes == matrix_bytes(spec, 70, 41)
    assert layout.weight_bytes == len(gate) + len(up) + len(down)
    assert layout.down_offset % 64 == 0 and layout.slot_bytes % PAGE_BYTES == 0
    up.fill_(1)
    down.fill_(2)
    assert not gate.any()
    assert (slot[len(gate) : 2 * len(gate)] == 1).all()
    assert (slot[layout.down_offset : layout.down_offset + len(down)] == 2).all()
    assert not slot[layout.down_offset + len(down) :].any()
