"""The bound of a forward by hand, and limits measured on something small."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_random_checkpoint import TINY, small_pool

import oled_moe.roofline as roofline
from oled_moe.checkpoint import Checkpoint
from oled_moe.models import find_family
from oled_moe.random_checkpoint import make_random_checkpoint
from oled_moe.roofline import (
    DiskLimit,
    Effort,
    ForwardWork,
    Limits,
    LinkLimit,
    MatrixLimit,
    ModelWork,
    ReadLimit,
    measure_limits,
    open_experts,
)
from oled_moe.shapes import find_shape

__all__ = ["small_pool"]

SMALL = Effort(
    working_set_bytes=2**22, max_matrix_size=64, disk_sample_bytes=2**16, num_repetitions=1
)


def limits_of(
    *, read: float = 100.0, flops: float = 1000.0, disk: float = 10.0, link: float | None = None
) -> Limits:
    return Limits(
        ReadLimit(read, "torch sum", 1, 2**32),
        MatrixLimit(flops, 64, "bfloat16"),
        DiskLimit(disk, "direct", 4, 2**20),
        None if link is None else LinkLimit(link, "set"),
    )


# Two layers, the first dense; a head; experts of 50 values.
MODEL = ModelWork(
    shapes={
        "model.word_embeddings.weight": (100, 10),
        "model.norm.weight": (10,),
        "lm_head.weight": (100, 10),
        "model.layers.0.attention.query_key_value.weight": (30, 10),
        "model.layers.0.attention.query_layernorm.weight": (10,),
        "model.layers.0.mlp.gate_proj.weight": (20, 10),
        "model.layers.1.attention.query_key_value.weight": (30, 10),
        "model.layers.1.attention.dense.weight": (10, 10),
        "model.layers.1.mlp.gate.weight": (4, 10),
    },
    num_layers=2,
    expert_values=50,
    itemsize=2,
    copied_expert_bytes=128,
)
DENOISE = ForwardWork(
    num_tokens=8,
    num_last_tokens=8,
    num_logits=3,
    expert_rows=(np.array([1, 20]),),
    num_misses=1,
)


def test_a_forward_by_hand() -> None:
    operations = MODEL.operations(DENOISE)
    # Head, qkv and MLP of layer 0, qkv, output and router of layer 1, two experts; no embedding.
    assert operations.weight_bytes.tolist() == [2000, 600, 400, 600, 200, 80, 100, 100]
    assert operations.flops.tolist() == [
        2 * 1000 * 3, 2 * 300 * 8, 2 * 200 * 8, 2 * 300 * 8, 2 * 100 * 8, 2 * 40 * 8, 100, 2000,
    ]  # fmt: skip
    bound = MODEL.bound(DENOISE, limits_of())
    # At 100 bytes and 1000 FLOPs a second only the expert with 20 rows computes longer than it
    # reads: 2 s against 1 s.
    assert bound.arithmetic_s == pytest.approx(2.0)
    assert bound.memory_s == pytest.approx((2000 + 600 + 400 + 600 + 200 + 80 + 100) / 100)
    assert bound.copy_s == pytest.approx(12.8) and bound.copied_bytes == 128
    assert bound.seconds == bound.compute_s == pytest.approx(41.8)
    assert bound.weight_bytes == 4080 and bound.name == "memory"


def test_what_decides_has_a_name() -> None:
    assert MODEL.bound(DENOISE, limits_of(disk=1.0)).name == "disk"
    assert MODEL.bound(DENOISE, limits_of(disk=1.0)).seconds == pytest.approx(128)
    assert MODEL.bound(DENOISE, limits_of(disk=1.0, link=100.0)).name == "memory"
    assert MODEL.bound(DENOISE, limits_of(disk=1e9, link=1.0)).name == "link"
    assert MODEL.bound(DENOISE, limits_of(flops=10.0)).name == "cpu"


def test_without_logits_the_last_layer_writes_keys_and_values_only() -> None:
    work = ForwardWork(8, 0, 0, (), 0)
    assert MODEL.operations(work).weight_bytes.tolist() == [600, 400, 600]


def test_a_folded_commit_is_left_out_of_the_last_layer() -> None:
    work = ForwardWork(16, 8, 3, (), 0)
    rows = MODEL.operations(work).flops / (2 * np.array([1000, 300, 200, 300, 100, 40]))
    assert rows.tolist() == [3, 16, 16, 16, 8, 8]


def test_a_tied_head_is_read_once() -> None:
    shapes = {name: shape for name, shape in MODEL.shapes.items() if name != "lm_head.weight"}
    tied = ModelWork(shapes, 2, 50, 2, 128)
    assert sorted(tied.operations(DENOISE).weight_bytes) == sorted(
        MODEL.operations(DENOISE).weight_bytes
    )


def test_mini_reads_what_its_tensors_take() -> None:
    """All experts active and all positions wanted: every weight but the embeddings, once."""
    config = find_shape("llada2-mini").config_with(None)
    family = find_family(config)
    shapes = family.parameter_shapes(family.config(config))
    model = ModelWork(shapes, 20, 3 * 2048 * 512, 2, 0)
    work = ForwardWork(32, 32, 32, (np.ones(256, dtype=np.int64),) * 19, 0)
    total = model.operations(work).weight_bytes.sum()
    vectors = sum(2 * shape[0] for shape in shapes.values() if len(shape) == 1)
    assert total == 32_511_286_784 - 2 * 157184 * 2048 - vectors


# Limits


def test_the_better_of_two(tmp_path: Path) -> None:
    both = limits_of(read=1, flops=20, disk=3).better_of(limits_of(read=10, flops=2, disk=30))
    assert (both.read.bytes_per_s, both.matrix.flops_per_s) == (10, 20)
    assert both.copy_bytes_per_s == 30 and both.num_rounds == 2
    assert both.copy_name == "disk" and limits_of(link=5.0).copy_bytes_per_s == 5.0


def test_limits_are_measured_on_the_checkpoint(tmp_path: Path) -> None:
    path = make_random_checkpoint(TINY, tmp_path / "tiny")
    before, steps = torch.get_num_threads(), []
    limits = measure_limits(path, dtype=torch.bfloat16, effort=SMALL, report=steps.append)
    assert len(steps) == 3 and torch.get_num_threads() == before
    for rate in (limits.read.bytes_per_s, limits.matrix.flops_per_s, limits.disk.bytes_per_s):
        assert 0 < rate < float("inf")
    assert limits.read.working_set_bytes == 2**22 and not limits.notes
    json.dumps(limits.to_dict(), allow_nan=False)


def test_too_little_memory_for_the_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_random_checkpoint(TINY, tmp_path / "tiny")
    monkeypatch.setattr(roofline, "usable_memory_bytes", lambda: 2**30 + 2**21)
    limits = measure_limits(path, dtype=torch.bfloat16, effort=SMALL)
    assert limits.read.working_set_bytes == 2**21
    assert limits.notes == (
        "the streaming read was measured over 2.0 MiB instead of 4.0 MiB: more memory was not free",
    )


def test_experts_are_found_where_they_lie(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_random_checkpoint(TINY, tmp_path / "tiny"))
    store = open_experts(checkpoint, method="buffered")
    slot = torch.empty(store.layout.slot_bytes, dtype=torch.uint8)
    store.read_into(1, 3, slot)
    weights = store.layout.views(slot)
    prefix = "model.layers.2.mlp.experts.3"
    gate, up = weights.gate_up.chunk(2)
    assert torch.equal(gate, checkpoint.read(f"{prefix}.gate_proj.weight"))
    assert torch.equal(up, checkpoint.read(f"{prefix}.up_proj.weight"))
    assert torch.equal(weights.down, checkpoint.read(f"{prefix}.down_proj.weight"))
    store.close()


def test_a_reader_that_fails_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_random_checkpoint(TINY, tmp_path / "tiny")
    checkpoint = Checkpoint.open(path)
    store = open_experts(checkpoint, method="buffered")
    num_calls = 0

    def fail(layer: int, expert: int, slot: torch.Tensor) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise OSError("the disk is gone")

    monkeypatch.setattr(store, "read_into", fail)
    with pytest.raises(OSError, match="gone"):
        roofline._disk_limit(checkpoint, store, 4, SMALL, np.random.default_rng(0))
    store.close()
