"""Packs: the same weights in one read each, the same bytes after any kill, no damage unseen."""

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Convention, load_weights, synthetic_llada2, write_checkpoint
from torch import Tensor

from oled_moe import cli, pack_writer
from oled_moe.checkpoint import Checkpoint, find_weights
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.engine import Engine
from oled_moe.errors import CheckpointError, ConfigError
from oled_moe.inspection import describe_checkpoint, verify_pack
from oled_moe.model_paths import DEMO_MODEL
from oled_moe.models import find_family
from oled_moe.outlook import open_sizes
from oled_moe.pack_places import partial_path
from oled_moe.packing import pack_checkpoint
from oled_moe.packs import MANIFEST_NAME, PackManifest
from oled_moe.quantization import QuantSpec, quantize
from oled_moe.store import PAGE_BYTES, DiskExpertStore, ExpertLayout, aligned_empty

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))
CONVENTIONS: tuple[Convention, ...] = ("single", "llada20", "llada21", "merged")
# One matrix takes 1320 bytes: no expert fills its slot.
CONFIG = {
    "model_type": "llada2_moe",
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 33,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "vocab_size": 40,
    "mask_token_id": 37,
    "eos_token_id": 36,
}
ROUTER = "model.layers.1.mlp.gate.weight"
NORM = "model.norm.weight"
PROFILES = {"cpu": DEFAULT_PROFILE, "emulated": DEFAULT_EMULATED_PROFILE}


def write_source(
    path: Path, convention: Convention = "single", dtype: torch.dtype = torch.bfloat16
) -> Path:
    tensors = synthetic_llada2(CONFIG, dtype=dtype, seed=3)
    write_checkpoint(
        path, tensors, CONFIG, convention=convention, generation_config={"eos_token_id": 36}
    )
    (path / "README.md").write_text("words\n")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "pack"
    pack_checkpoint(source, out)
    return out


def slots_of(store: DiskExpertStore) -> list[Tensor]:
    """Every expert, each read into memory full of ones."""
    slots = []
    for layer in range(store.num_layers):
        for expert in range(store.num_experts):
            slot = aligned_empty(store.layout.slot_bytes).fill_(0xFF)
            store.read_into(layer, expert, slot)
            slots.append(slot)
    store.close()
    return slots


def check_same(
    found: tuple[dict[str, Tensor], DiskExpertStore],
    wanted: tuple[dict[str, Tensor], DiskExpertStore],
) -> None:
    """The same numbers bit for bit."""
    assert found[0].keys() == wanted[0].keys()
    for name, weight in wanted[0].items():
        assert found[0][name].dtype == weight.dtype and torch.equal(found[0][name], weight)
    layout = wanted[1].layout
    assert found[1].layout == layout
    for slot, other in zip(slots_of(found[1]), slots_of(wanted[1]), strict=True):
        for matrix, expected in zip(layout.views(slot), layout.views(other), strict=True):
            assert torch.equal(matrix.view(torch.uint8), expected.view(torch.uint8))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# The same model


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_as_stored_from_every_layout(
    tmp_path: Path, convention: Convention, dtype: torch.dtype
) -> None:
    source = write_source(tmp_path / "source", convention, dtype)
    report = pack_checkpoint(source, tmp_path / "pack")
    assert report.expert_dtype == str(dtype).removeprefix("torch.")
    check_same(load_weights(tmp_path / "pack"), load_weights(source))
    check_same(load_weights(tmp_path / "pack", torch.float32), load_weights(source, torch.float32))


@pytest.mark.parametrize("model", GOLDEN_MODELS)
def test_golden_models_are_the_same_bits(model: str, tmp_path: Path) -> None:
    pack_checkpoint(GOLDEN / model, tmp_path / "pack")
    check_same(load_weights(tmp_path / "pack"), load_weights(GOLDEN / model))


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_the_demo_model_says_the_same(device: str, dtype: str | None, tmp_path: Path) -> None:
    pack_checkpoint(DEMO_MODEL, tmp_path / "pack", dtype=dtype)
    config = EngineConfig(
        device=device, expert_memory="25%", hardware=PROFILES[device], cpu_experts=False
    )
    params = SamplingParams(max_tokens=48)
    answers = []
    for model in (DEMO_MODEL, tmp_path / "pack"):
        with Engine(model, config) as engine:
            answers.append(engine.generate("What is 12 + 30?", params))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].text == answers[1].text
    assert answers[0].probabilities == answers[1].probabilities


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_demo_model_runs_in_whole_numbers(dtype: str, tmp_path: Path) -> None:
    """The slots keep whole numbers, and what is cached does not change the answer."""
    pack_checkpoint(DEMO_MODEL, tmp_path / "pack", dtype=dtype)
    answers = []
    for device, memory in (("cpu", "25%"), ("cpu", "100%"), ("emulated", "25%")):
        config = EngineConfig(
            device=device, expert_memory=memory, hardware=PROFILES[device], cpu_experts=False
        )
        with Engine(tmp_path / "pack", config) as engine:
            layout = engine.experts.pool.arena.layout
            assert layout.quant == QuantSpec.parse(dtype)
            assert engine.memory_plan.shape.expert_bytes == layout.slot_bytes
            assert str(layout.quant) in engine.dtype_words
            answers.append(engine.generate("What is 12 + 30?", SamplingParams(max_tokens=48)))
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert answers[0].text is not None and "42" in answers[0].text


def test_narrower_only_where_asked(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", dtype=torch.float32)
    pack_checkpoint(source, tmp_path / "experts", dtype="bf16")
    weights, store = load_weights(tmp_path / "experts")
    assert store.layout.dtype == torch.bfloat16 and weights[NORM].dtype == torch.float32
    for slot, other in zip(slots_of(store), slots_of(load_weights(source)[1]), strict=True):
        wide = ExpertLayout(20, 33, torch.float32).views(other)
        for matrix, expected in zip(store.layout.views(slot), wide, strict=True):
            assert torch.equal(matrix, expected.to(torch.bfloat16))
    pack_checkpoint(source, tmp_path / "all", dtype="bf16", dense_dtype="bf16")
    weights, store = load_weights(tmp_path / "all")
    store.close()
    assert weights[NORM].dtype == torch.bfloat16 and weights[ROUTER].dtype == torch.float32


@pytest.mark.parametrize("form", ["int8", "int4", "int8-g32", "int4-g32-asym", "int4-row"])
def test_whole_numbers_are_those_of_the_reference(form: str, source: Path, tmp_path: Path) -> None:
    spec = QuantSpec.parse(form)
    report = pack_checkpoint(source, tmp_path / "pack", dtype=form)
    weights, store = load_weights(tmp_path / "pack")
    original = load_weights(source)
    assert store.layout.quant == spec and report.expert_dtype == str(spec)
    assert report.slot_bytes == store.layout.slot_bytes
    for name, weight in original[0].items():
        assert torch.equal(weights[name], weight)
    plain = original[1].layout
    for slot, other in zip(slots_of(store), slots_of(original[1]), strict=True):
        gate_up, down = plain.views(other)
        for packed, matrix in zip(
            store.layout.packed_views(slot), (gate_up[:33], gate_up[33:], down), strict=True
        ):
            assert torch.equal(packed, quantize(matrix, spec, "searched"))
    verify_pack(tmp_path / "pack")


@pytest.mark.parametrize("method", ["nearest", "searched"])
def test_ways_of_rounding(method: str, source: Path, tmp_path: Path) -> None:
    pack_checkpoint(source, tmp_path / "pack", dtype="int4-g32", method=method)
    assert PackManifest.read(tmp_path / "pack" / MANIFEST_NAME).method == method
    layout = Checkpoint.open(tmp_path / "pack").pack
    assert layout is not None and layout.layout.quant is not None
    slot = slots_of(load_weights(tmp_path / "pack")[1])[7]
    gate_up, _ = ExpertLayout(20, 33, torch.bfloat16).views(slots_of(load_weights(source)[1])[7])
    up = layout.layout.packed_views(slot).up
    assert torch.equal(up, quantize(gate_up[33:], layout.layout.quant, method))


def test_what_quantised_experts_are_multiplied_with_may_be_chosen(
    source: Path, tmp_path: Path
) -> None:
    pack_checkpoint(source, tmp_path / "pack", dtype="int8")
    _, narrow = load_weights(tmp_path / "pack")
    _, wide = load_weights(tmp_path / "pack", torch.float32)
    assert wide.layout.dtype == torch.float32 and narrow.layout.dtype == torch.bfloat16
    for slot, other in zip(slots_of(narrow), slots_of(wide), strict=True):
        assert torch.equal(slot, other)


@pytest.mark.parametrize("form", [None, "int4"])
def test_a_pack_of_a_pack_is_the_pack(form: str | None, source: Path, tmp_path: Path) -> None:
    pack_checkpoint(source, tmp_path / "one", dtype=form)
    pack_checkpoint(tmp_path / "one", tmp_path / "two")
    pack_checkpoint(tmp_path / "one", tmp_path / "three", dtype=form)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "three")


def test_packing_a_packed_model_again_as_whole_numbers(
    source: Path, packed: Path, tmp_path: Path
) -> None:
    pack_checkpoint(packed, tmp_path / "via", dtype="int4")
    pack_checkpoint(source, tmp_path / "straight", dtype="int4")
    assert contents(tmp_path / "via") == contents(tmp_path / "straight")
    for dtype in ("bf16", "int8"):
        with pytest.raises(ConfigError, match="int4-g64; pack the checkpoint that it came from"):
            pack_checkpoint(tmp_path / "via", tmp_path / "no", dtype=dtype)


# Layout


def test_one_expert_is_one_aligned_read(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, store = load_weights(packed)
    if store.method != "direct":
        pytest.skip("no direct reads in this file system")
    reads: list[tuple[int, list[int]]] = []
    real = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        reads.append((offset, [buffer.nbytes for buffer in buffers]))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    num_experts = len(slots_of(store))
    assert len(reads) == num_experts
    assert all(offset % PAGE_BYTES == 0 for offset, _ in reads)
    assert all(sizes == [store.layout.slot_bytes] for _, sizes in reads)
    # Straight into the slot: no thread needs a buffer.
    assert store.scratch_bytes == 0


def test_padding_is_zero(packed: Path) -> None:
    _, store = load_weights(packed)
    layout = store.layout
    for slot in slots_of(store):
        assert not slot[layout.gate_up_bytes : layout.down_offset].any()
        assert not slot[layout.down_offset + layout.down_bytes :].any()


def test_others_can_open_the_files(packed: Path) -> None:
    from safetensors.torch import load_file

    weights, store = load_weights(packed)
    dense = load_file(packed / "dense.safetensors")
    assert all(torch.equal(dense[name], weight) for name, weight in weights.items())
    slots = load_file(packed / "experts-00001.safetensors")
    expected = aligned_empty(store.layout.slot_bytes)
    store.read_into(1, 4, expected)
    assert torch.equal(slots["layers.1.experts.4"], expected)
    store.close()


def test_what_is_copied(source: Path, packed: Path) -> None:
    for name in ("config.json", "generation_config.json", "README.md"):
        assert (packed / name).read_bytes() == (source / name).read_bytes()
    assert sorted(path.name for path in packed.iterdir()) == [
        "README.md",
        "config.json",
        "dense.safetensors",
        "experts-00000.safetensors",
        "experts-00001.safetensors",
        "generation_config.json",
        MANIFEST_NAME,
    ]


def test_sizes_are_known_before_loading(source: Path, tmp_path: Path) -> None:
    pack_checkpoint(source, tmp_path / "pack", dtype="int8")
    plain, small = open_sizes(source), open_sizes(tmp_path / "pack")
    assert small.weights.layout.quant == QuantSpec.parse("int8")
    assert small.sizes.shape.expert_bytes == small.weights.layout.slot_bytes
    assert small.weights.dense_bytes == plain.weights.dense_bytes
    summary = describe_checkpoint(tmp_path / "pack")
    assert summary.expert_dtype == "int8-row" and summary.is_pack
    assert summary.num_parameters == describe_checkpoint(source).num_parameters
    assert summary.routed_bytes == 12 * small.weights.layout.slot_bytes


# Stopped and resumed

KILLER = """
    import os, random, shutil, signal, sys, time, traceback
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from oled_moe import pack_writer
    from oled_moe.pack_places import partial_path
    from oled_moe.packing import pack_checkpoint

    source, out, seconds = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    # Every piece is brought to the disk by itself.
    pack_writer.CHUNK_BYTES = 4096
    generator = random.Random(7)

    def attempt(limit_s):
        # The system kills it after so much of its time from the first write on.
        child = os.fork()
        if not child:
            start_s = None

            def arm(*_):
                nonlocal start_s
                if start_s is None:
                    start_s = time.process_time()
                    if limit_s is not None:
                        signal.setitimer(signal.ITIMER_PROF, limit_s)

            code = 1
            try:
                pack_checkpoint(source, out, dtype="int8", progress=arm)
                seconds.write_text(str(time.process_time() - start_s))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0, "a run failed"
        return os.WIFSIGNALED(status)

    assert not attempt(None)
    whole_s = float(seconds.read_text())
    shutil.rmtree(out)
    num_killed = num_runs = num_partial = 0
    while num_killed < 10 and num_runs < 50:
        num_runs += 1
        if attempt(max(1e-5, generator.random() * whole_s / 8)):
            num_killed += 1
            num_partial += len(list(partial_path(out).glob("experts-*"))) > 0
        # A kill may come after the last rename: the pack is whole then, and a second run refuses.
        if out.exists() and num_killed < 10:
            shutil.rmtree(out)
    if not out.exists():
        attempt(None)
    seconds.unlink()
    print(num_killed, num_partial)
"""


def test_killed_ten_times_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    config = {**CONFIG, "num_experts": 40}
    write_checkpoint(tmp_path / "source", synthetic_llada2(config, seed=3), config)
    pack_checkpoint(tmp_path / "source", tmp_path / "straight", dtype="int8")
    arguments = [tmp_path / "source", tmp_path / "killed", tmp_path / "seconds"]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLER), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    num_killed, num_partial = map(int, run.stdout.split())
    assert num_killed == 10 and num_partial >= 3
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["killed", "source", "straight"]


class PowerLoss(BaseException):
    """The machine is off."""


def lose_power_at(
    monkeypatch: pytest.MonkeyPatch, moment: int, partial: Path, generator: random.Random
) -> Callable[[], None]:
    """At the n-th call that brings something to the disk, or just behind it, all is over.

    What a file has beyond its last such call is then cut at a random place.
    """
    synced: dict[int, int] = {}
    count = 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == moment and generator.random() < 0.5:
                raise PowerLoss
            result = real(*arguments, **options)
            if name in ("fsync", "fdatasync"):
                state = os.fstat(arguments[0])
                synced[state.st_ino] = state.st_size
            if count == moment:
                raise PowerLoss
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "fdatasync", "rename"):
        wrap(name)

    def lose() -> None:
        monkeypatch.undo()
        for path in (*partial.glob("*"), partial.with_name(f"{partial.name}.journal")):
            if path.is_file():
                state = path.stat()
                kept = min(synced.get(state.st_ino, 0), state.st_size)
                os.truncate(path, generator.randint(kept, state.st_size))

    return lose


def test_power_lost_at_any_sync_and_resumed_gives_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(11)
    pack_checkpoint(source, tmp_path / "straight", dtype="int4")
    expected, out = contents(tmp_path / "straight"), tmp_path / "pack"
    moment, num_lost = 1, 0
    while True:
        monkeypatch.setattr(pack_writer, "CHUNK_BYTES", 4 * 4096)
        lose = lose_power_at(monkeypatch, moment, partial_path(out), generator)
        try:
            pack_checkpoint(source, out, dtype="int4", num_threads=1)
        except PowerLoss:
            num_lost += 1
            lose()
            if not out.exists():
                pack_checkpoint(source, out, dtype="int4", num_threads=1)
        else:
            monkeypatch.undo()
            break
        assert contents(out) == expected, f"lost at call {moment}"
        shutil.rmtree(out)
        partial_path(out).with_name("pack.partial.journal").unlink(missing_ok=True)
        moment += 1
    assert num_lost > 20


def test_a_resumed_run_does_not_begin_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_writer, "CHUNK_BYTES", 4096)
    total = pack_checkpoint(source, tmp_path / "other").pack_bytes

    def stop(what: str, done: int, size: int) -> None:
        if done > size // 2:
            raise KeyboardInterrupt

    out = tmp_path / "pack"
    with pytest.raises(KeyboardInterrupt):
        pack_checkpoint(source, out, progress=stop)
    assert partial_path(out).is_dir() and not out.exists()
    report = pack_checkpoint(source, out)
    assert total // 4 < report.num_resumed_bytes < total
    assert not partial_path(out).exists()
    assert contents(out) == contents(tmp_path / "other")


def interrupt(source: Path, out: Path, **options: Any) -> None:
    def stop(what: str, done: int, size: int) -> None:
        if done > size // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_checkpoint(source, out, progress=stop, **options)


def test_a_source_that_changed_between_tries_is_noticed(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    interrupt(source, tmp_path / "pack")
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed.*remove it"):
        pack_checkpoint(source, tmp_path / "pack")


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")

    def touch(what: str, done: int, size: int) -> None:
        os.utime(source / "model.safetensors", ns=(1, 1))

    with pytest.raises(CheckpointError, match="has changed while it was packed"):
        pack_checkpoint(source, tmp_path / "pack", progress=touch)
    assert not (tmp_path / "pack").exists()


def test_other_options_do_not_go_on_with_a_run(source: Path, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "pack")
    with pytest.raises(CheckpointError, match=r"other options; remove it and pack\.partial\.jour"):
        pack_checkpoint(source, tmp_path / "pack", dtype="int8")
    pack_checkpoint(source, tmp_path / "pack")


# Refused


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int3"},
        {"dtype": ""},
        {"dense_dtype": "int8"},
        {"dtype": "int8", "method": "best"},
        {"method": "nearest"},
    ],
)
def test_what_is_not_known(options: dict[str, str], source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="(dtype|method).*allowed"):
        pack_checkpoint(source, tmp_path / "pack", **options)
    assert not any(tmp_path.iterdir())


def test_weights_that_cannot_be_rounded(tmp_path: Path) -> None:
    tensors = synthetic_llada2(CONFIG, seed=3)
    tensors["model.layers.2.mlp.experts.4.up_proj.weight"][3, 3] = float("inf")
    write_checkpoint(tmp_path / "source", tensors, CONFIG)
    with pytest.raises(CheckpointError, match="layer 1, expert 4"):
        pack_checkpoint(tmp_path / "source", tmp_path / "pack", dtype="int8")


# Damage


def flip(path: Path, position: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ mask]))


def inspect(path: Path) -> None:
    describe_checkpoint(path)
    verify_pack(path)


def load_all(path: Path) -> None:
    slots_of(load_weights(path)[1])


def test_a_flipped_byte_anywhere_is_found(packed: Path, tmp_path: Path) -> None:
    """By inspect in every file; by loading in every file too, as all but words are loaded."""
    copy = tmp_path / "pack"
    shutil.copytree(packed, copy)
    inspect(copy)
    generator = random.Random(5)
    for path in sorted(copy.iterdir()):
        size = path.stat().st_size
        positions = {0, size - 1, *(generator.randrange(size) for _ in range(20))}
        for position in positions:
            mask = 1 << generator.randrange(8)
            flip(path, position, mask)
            for check in (inspect, load_all):
                with pytest.raises(CheckpointError) as caught:
                    check(copy)
                assert path.name in str(caught.value), (path, position)
            flip(path, position, mask)
    inspect(copy)
    load_all(copy)


def test_any_byte_of_the_manifest_counts(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / MANIFEST_NAME
    content = (packed / MANIFEST_NAME).read_bytes()
    assert PackManifest.read(packed / MANIFEST_NAME).to_bytes() == content
    generator = random.Random(6)
    # Its own checksum is at the end.
    last = range(len(content) - 40, len(content))
    for position in (*generator.sample(range(len(content)), 300), *last):
        value = generator.choice([b" ", b"\n", b"0", b"f", bytes([generator.randrange(256)])])
        changed = content[:position] + value + content[position + 1 :]
        if changed != content:
            path.write_bytes(changed)
            with pytest.raises(CheckpointError):
                PackManifest.read(path)


def test_the_expert_that_is_damaged_is_named_when_it_is_read(packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "pack"
    shutil.copytree(packed, copy)
    path = copy / "experts-00001.safetensors"
    # Somewhere in the last expert, which is the last of the file.
    flip(path, path.stat().st_size - 2000, 4)
    _, store = load_weights(copy)
    slot = aligned_empty(store.layout.slot_bytes)
    store.read_into(1, 4, slot)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"experts-00001.*layer 1, expert 5.*damaged"):
            store.read_into(1, 5, slot)
    store.close()
    with pytest.raises(CheckpointError, match=r"experts-00001.*'layers\.1\.experts\.5'"):
        verify_pack(copy)


def test_an_engine_finds_damage_of_an_expert_it_reads(tmp_path: Path) -> None:
    pack_checkpoint(DEMO_MODEL, tmp_path / "pack")
    for path in tmp_path.glob("pack/experts-*"):
        for expert in range(96):
            flip(path, path.stat().st_size - 1 - 24576 * expert - 4096, 1)
    config = EngineConfig(expert_memory="25%", hardware=DEFAULT_PROFILE)
    with pytest.raises(CheckpointError, match="layer 0, expert"):
        with Engine(tmp_path / "pack", config) as engine:
            engine.generate("What is 1 + 1?", SamplingParams(max_tokens=16))


@pytest.mark.parametrize("name", ["dense.safetensors", "experts-00001.safetensors", "README.md"])
@pytest.mark.parametrize("what", ["cut", "missing", "longer"])
def test_files_that_are_not_whole(what: str, name: str, packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "pack"
    shutil.copytree(packed, copy)
    content = (copy / name).read_bytes()
    if what == "missing":
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content[:-1] if what == "cut" else content + b"x")
    for check in (inspect, load_all):
        with pytest.raises(CheckpointError, match=name):
            check(copy)


def test_a_pack_without_its_manifest(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    (tmp_path / "pack" / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match="not finished or not whole"):
        Checkpoint.open(tmp_path / "pack")


def test_another_version_is_named(packed: Path, tmp_path: Path) -> None:
    values = json.loads((packed / MANIFEST_NAME).read_text())
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**values, "version": 2}))
    with pytest.raises(CheckpointError, match="format version 2; allowed: 1; pack the model again"):
        PackManifest.read(tmp_path / MANIFEST_NAME)


def test_a_config_of_another_model(packed: Path, source: Path) -> None:
    checkpoint = Checkpoint.open(packed)
    family = find_family(CONFIG)
    config = family.config({**CONFIG, "num_experts": 8})
    with pytest.raises(CheckpointError, match="2 layers of 6 experts of 20 x 33"):
        find_weights(
            checkpoint,
            map_weight=lambda _: None,
            shapes={},
            num_moe_layers=config.num_moe_layers,
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            dtype=None,
        )


def test_only_packs_can_be_verified(source: Path) -> None:
    with pytest.raises(CheckpointError, match="is no pack"):
        verify_pack(source)


# The command


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_command(
    run: Callable[..., tuple[int, str, str]], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pack"
    code, text, err = run("pack", source, out, "--dtype", "int4", "--json")
    assert code == 0 and err == ""
    report = json.loads(text)
    assert report["expert_dtype"] == "int4-g64" and report["num_experts"] == 12
    assert report["pack_bytes"] == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    code, text, _ = run("inspect", out)
    assert code == 0 and "int4-g64" in text and "every other file are as packed" in text
    code, text, _ = run("inspect", out, "--no-verify", "--json")
    assert code == 0 and json.loads(text)["verified_bytes"] is None
    flip(out / "experts-00000.safetensors", out.stat().st_size + 5000, 1)
    code, text, err = run("inspect", out, "--json")
    assert code == 2 and "experts-00000.safetensors" in json.loads(text)["error"]["message"]
    code, _, err = run("pack", source, out)
    assert code == 2 and "is there already" in err
    code, _, err = run("pack", tmp_path / "nothing", tmp_path / "else")
    assert code == 3


def test_interrupted_it_says_how_to_go_on(
    run: Callable[..., tuple[int, str, str]],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = pack_writer._settle

    num_settled = 0

    def stop(target: Any, settled: int) -> None:
        nonlocal num_settled
        num_settled += 1
        real(target, settled)
        if num_settled == limit:
            raise KeyboardInterrupt

    monkeypatch.setattr(pack_writer, "_settle", stop)
    limit = 1
    code, _, err = run("pack", source, tmp_path / "pack")
    assert code == 130 and "stays" not in err and not any(tmp_path.iterdir())
    num_settled, limit = 0, 2
    code, _, err = run("pack", source, tmp_path / "pack")
    assert code == 130 and "pack.partial stays; the same command goes on from there" in err
    monkeypatch.undo()
    code, text, _ = run("pack", source, tmp_path / "pack")
    assert code == 0 and "pack.partial" not in text


def test_running_in_whole_numbers_needs_a_pack(
    run: Callable[..., tuple[int, str, str]], source: Path
) -> None:
    code, _, err = run("generate", source, "--prompt-ids", "1", "--dtype", "int4")
    assert code == 2 and "oled-moe pack MODEL OUT --dtype int4" in err
