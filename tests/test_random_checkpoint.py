"""Random checkpoints: what is written is read, and killed runs leave nothing that misleads."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_shapes import tiny_config

import oled_moe.random_checkpoint as random_checkpoint
from oled_moe.checkpoint import INDEX_NAME, Checkpoint
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.engine import Engine
from oled_moe.errors import CheckpointError, ConfigError, DoesNotFitError, OledMoeError
from oled_moe.inspection import describe_checkpoint
from oled_moe.models import find_family
from oled_moe.random_checkpoint import (
    checkpoint_bytes,
    checkpoint_shards,
    make_random_checkpoint,
)
from oled_moe.shapes import ALIASES, SHAPES, find_shape
from oled_moe.store import PAGE_BYTES, DiskExpertStore

TINY = tiny_config("llada2-mini")


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_checkpoint, "_POOL_VALUES", 2**16)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


# The shapes


@pytest.mark.parametrize(
    ("name", "expert_bytes", "num_experts", "dense_bytes"),
    [
        # models.md 1.5, whose sizes are rounded.
        ("llada2-mini", 3 * 2048 * 512 * 2, 19 * 256, 1.91e9),
        ("llada2-flash", 3 * 4096 * 1024 * 2, 31 * 256, 6.06e9),
        ("sdar-30b", 3 * 2048 * 768 * 2, 48 * 128, 3.08e9),
        ("rnd1", 3 * 2048 * 768 * 2, 48 * 128, 3.08e9),
        ("llada-moe-7b", 3 * 2048 * 1024 * 2, 16 * 64, 1.83e9),
        ("llada2.2-flash", 3 * 4096 * 1024 * 2, 31 * 256, 6.06e9),
        ("diffusion-gemma-26b", 3 * 2816 * 704 * 2, 30 * 128, 4.83e9),
    ],
)
def test_shapes_have_the_published_sizes(
    name: str, expert_bytes: int, num_experts: int, dense_bytes: float
) -> None:
    config = find_shape(name).config_with(None)
    shards = checkpoint_shards(config)
    experts = [t for shard in shards for t in shard.tensors if ".experts." in t.name]
    rest = [t for shard in shards for t in shard.tensors if ".experts." not in t.name]
    assert sum(t.num_bytes for t in experts) == num_experts * expert_bytes
    assert sum(t.num_bytes for t in rest) == pytest.approx(dense_bytes, rel=0.003)
    assert checkpoint_bytes(config) > num_experts * expert_bytes
    # Exactly what the published indexes of LLaDA2.0-mini and SDAR-30B-A3B-Chat say, and the counts
    # of parameters in models.md 1; RND1 is the same network as SDAR.
    published = {
        "llada2-mini": 32_511_286_784,
        "llada2-flash": 2 * 102_889_705_216,
        "sdar-30b": 61_064_245_248,
        "rnd1": 61_064_245_248,
        "llada-moe-7b": 2 * 7_356_880_896,
        # Nothing is added to flash. Of the published 51,647,701,024 bytes of DiffusionGemma, what
        # sees images takes the rest.
        "llada2.2-flash": 2 * 102_889_705_216,
        "diffusion-gemma-26b": 51_647_701_024 - 1_145_727_400,
    }
    assert sum(t.num_bytes for t in experts + rest) == published[name]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_count_layers_as_their_families_do(name: str) -> None:
    shape = SHAPES[name]
    for num_moe_layers in (None, 1, 2):
        values = shape.config_with(num_moe_layers)
        config = find_family(values).config(values)
        assert config.num_moe_layers == (num_moe_layers or shape.num_moe_layers)
        assert config.num_layers == shape.num_dense_layers + config.num_moe_layers
        assert config.num_experts == shape.num_experts


def test_published_names_lead_to_shapes() -> None:
    # LLaDA2.2-flash is called here as it was published.
    assert set(ALIASES.values()) == set(SHAPES) - {"llada2.2-flash"}
    assert find_shape("LLaDA2.2-flash") is SHAPES["llada2.2-flash"]
    assert find_shape("LLaDA2.1-mini") is SHAPES["llada2-mini"]
    assert all(find_shape(name).name == name for name in SHAPES)
    assert not set(ALIASES) & set(SHAPES) and all(name == name.lower() for name in ALIASES)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_tiny_checkpoint_of_every_shape_is_read_and_run(name: str, tmp_path: Path) -> None:
    config = tiny_config(name, 2)
    path = make_random_checkpoint(config, tmp_path / "tiny")
    assert describe_checkpoint(path).num_moe_layers == 2
    with Engine(path, EngineConfig(experts_per_layer=4, max_model_len=64)) as engine:
        result = engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(result.token_ids) == 4


def test_fewer_moe_layers_keep_the_dense_one() -> None:
    shape = find_shape("llada2-mini")
    model = find_family(shape.config).config(shape.config_with(5))
    assert (model.num_layers, model.num_moe_layers) == (6, 5)
    for wrong in (0, 20):
        with pytest.raises(ConfigError, match="moe-layers is .*; allowed: a whole number, 1 to 19"):
            shape.config_with(wrong)
    with pytest.raises(
        ConfigError, match="unknown shape 'x'; known: diffusion-gemma-26b, llada-moe"
    ):
        find_shape("x")


# What is written


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_expert_is_one_aligned_run(name: str) -> None:
    """Direct reads then need no buffer in between."""
    for shard in checkpoint_shards(find_shape(name).config_with(1)):
        start = len(shard.header())
        assert start % PAGE_BYTES == 0
        for tensor in shard.tensors:
            if tensor.num_bytes % PAGE_BYTES == 0:
                assert start % PAGE_BYTES == 0, tensor.name
            start += tensor.num_bytes
        assert start == shard.num_bytes


def test_it_loads_and_answers(tmp_path: Path) -> None:
    path = make_random_checkpoint(TINY, tmp_path / "sub" / "tiny")
    summary = describe_checkpoint(path)
    assert (summary.num_moe_layers, summary.num_experts, summary.top_k) == (3, 16, 4)
    assert summary.dtypes == {"bfloat16": summary.num_parameters * 2}
    assert summary.num_files == 4 and summary.num_unused_tensors == 0
    index = json.loads((path / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == summary.routed_bytes + summary.rest_bytes
    on_disk = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert on_disk == checkpoint_bytes(TINY)
    with Engine(path, EngineConfig(experts_per_layer=6)) as engine:
        params = SamplingParams(max_tokens=16, block_length=8, ignore_eos=True)
        assert len(engine.generate([1, 2, 3], params).token_ids) == 16


def test_values_are_random_of_unit_norms_and_differ(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_random_checkpoint(TINY, tmp_path / "tiny"))
    gates = [
        checkpoint.read(f"model.layers.1.mlp.experts.{expert}.gate_proj.weight").float()
        for expert in (0, 1)
    ]
    assert not torch.equal(*gates)
    for gate in gates:
        assert gate.std().item() == pytest.approx(0.02, rel=0.1) and abs(gate.mean()) < 0.005
    assert checkpoint.read("model.norm.weight").eq(1).all()


def test_read_through_the_store(tmp_path: Path) -> None:
    """The spans that read_weights finds hold what the tensors hold."""
    path = make_random_checkpoint(TINY, tmp_path / "tiny")
    with Engine(path, EngineConfig(experts_per_layer=16)) as engine:
        assert engine.memory_plan.holds_all_experts
        store = engine._tiers.store
        assert isinstance(store, DiskExpertStore)
        slot = torch.empty(store.layout.slot_bytes, dtype=torch.uint8)
        store.read_into(2, 7, slot)
        down = store.layout.views(slot).down
    name = "model.layers.3.mlp.experts.7.down_proj.weight"
    assert torch.equal(down, Checkpoint.open(path).read(name))


def test_the_same_again(tmp_path: Path) -> None:
    first = make_random_checkpoint(TINY, tmp_path / "a")
    second = make_random_checkpoint(TINY, tmp_path / "b")
    assert contents(first) == contents(second)
    before = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    make_random_checkpoint(TINY, first, free_bytes=lambda path: 0)
    assert before == {file: file.stat().st_mtime_ns for file in first.iterdir()}


# What is in the way


def test_something_else_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="is not the random checkpoint.*checkpoint-dir"):
        make_random_checkpoint(TINY, tmp_path / "mine")
    assert contents(tmp_path / "mine") == {"letter.txt": b"dear"}
    path = make_random_checkpoint(TINY, tmp_path / "tiny")
    with pytest.raises(CheckpointError, match="is not the random checkpoint"):
        make_random_checkpoint({**TINY, "num_experts": 32}, path)
    shard = sorted(path.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged or missing"):
        make_random_checkpoint(TINY, path)


def test_too_little_disk_is_said_before_anything(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        make_random_checkpoint(TINY, tmp_path / "tiny", free_bytes=lambda path: 2**30)
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
    assert "are free" in str(caught.value) and "--moe-layers" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]


def test_a_disk_that_becomes_full_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, num_calls = os.write, 0

    def fill(descriptor: int, part: Any) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, part)

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(DoesNotFitError, match="became full.*removed"):
        make_random_checkpoint(TINY, tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OledMoeError, match="cannot be written.*checkpoint-dir"):
        make_random_checkpoint(TINY, tmp_path / "file" / "tiny")


# Interrupted and side by side


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    whole = contents(make_random_checkpoint(TINY, tmp_path / "whole"))
    total = checkpoint_bytes(TINY)

    def stop(what: str, done: int, all_bytes: int) -> None:
        assert all_bytes == total
        if done > 0.6 * total:
            raise Stopped

    with pytest.raises(Stopped):
        make_random_checkpoint(TINY, tmp_path / "tiny", progress=stop)
    assert not (tmp_path / "tiny").exists()
    partial = tmp_path / ".tiny.partial"
    kept = sorted(partial.glob("*.safetensors"))
    assert 0 < len(kept) < 4 and list(partial.glob("*.tmp"))
    # One that only looks complete is written again.
    kept[0].write_bytes(bytes(kept[0].stat().st_size))
    (partial / "stray").mkdir()
    seen: list[int] = []
    made = make_random_checkpoint(
        TINY, tmp_path / "tiny", progress=lambda what, done, all_bytes: seen.append(done)
    )
    assert contents(made) == whole and not partial.exists()
    assert seen == sorted(seen) and seen[-1] == total


KILLER = """
import json, os, signal, sys
from pathlib import Path
import oled_moe.random_checkpoint as random_checkpoint
random_checkpoint._POOL_VALUES = 2**16
config, path = json.loads(sys.argv[1]), Path(sys.argv[2])
for last in (1, 20, 20, 59):
    if not os.fork():
        write, num_calls = os.write, 0
        def write_and_die(descriptor, part):
            global num_calls
            num_calls += 1
            if num_calls < last:
                return write(descriptor, part)
            write(descriptor, part[:len(part) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        os.write = write_and_die
        random_checkpoint.make_random_checkpoint(config, path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
    assert not path.exists()
"""


def test_killed_writers_leave_nothing_that_looks_finished(tmp_path: Path) -> None:
    """Each dies with half of its last write on the disk, the next goes on from there."""
    whole = contents(make_random_checkpoint(TINY, tmp_path / "whole"))
    path = tmp_path / "tiny"
    command = [sys.executable, "-c", KILLER, json.dumps(TINY), str(path)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert killed.returncode == 0, killed.stderr
    assert any((tmp_path / ".tiny.partial").iterdir())
    assert contents(make_random_checkpoint(TINY, path)) == whole
    names = {found.name for found in tmp_path.iterdir()}
    assert names == {"tiny", ".tiny.lock", "whole", ".whole.lock"}


def test_two_at_once_write_one(tmp_path: Path) -> None:
    said: list[str] = []
    in_middle, go_on = threading.Event(), threading.Event()

    def pause(what: str, done: int, total: int) -> None:
        in_middle.set()
        assert go_on.wait(60)

    def tell(what: str, done: int, total: int) -> None:
        said.append(what)
        go_on.set()

    path = tmp_path / "tiny"
    first = threading.Thread(
        target=make_random_checkpoint,
        args=(
            TINY,
            path,
        ),
        kwargs={"progress": pause},
    )
    first.start()
    assert in_middle.wait(60)
    make_random_checkpoint(TINY, path, progress=tell)
    first.join()
    assert len(said) == 1 and said[0].startswith("waiting: another process")
    describe_checkpoint(path)
