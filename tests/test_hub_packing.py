"""Packs made while a model comes: the bytes of `pull` and `pack`, on a disk that holds less."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import synthetic_llada2, write_checkpoint
from fake_hub import COMMIT, checksum, read_files
from quantised import gptq, gptq_config, write_quantised
from safetensors.torch import save_file
from test_packing import CONFIG, contents
from torch import Tensor

import oled_moe.hub
from oled_moe import pack_writer
from oled_moe.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    DownloadError,
    OledMoeError,
)
from oled_moe.hub import HubModel, pull
from oled_moe.hub_client import HubFile, LostConnectionError
from oled_moe.hub_packing import PackPlan, PulledPack, pull_pack
from oled_moe.inspection import check_config, verify_pack
from oled_moe.pack_places import partial_path
from oled_moe.packing import pack_checkpoint

LAYOUTS = ("names", "experts", "layers", "matrices")
WIDE = {**CONFIG, "hidden_size": 64, "moe_intermediate_size": 256, "num_experts": 16}
INDEX = "model.safetensors.index.json"


class FakeClient:
    """A hub of one model without a network; `damage` flips a byte of what `read` gives."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.content = dict(files)
        self.starts: list[tuple[str, int]] = []
        self.num_sent = dict.fromkeys(files, 0)
        self.lost: set[str] = set()
        self.damage: dict[str, int] = {}

    def list_files(self, name: str, revision: str) -> tuple[str, list[HubFile]]:
        return COMMIT, [HubFile(n, len(c), checksum(n, c)) for n, c in self.content.items()]

    @contextmanager
    def read(
        self, name: str, commit: str, file: HubFile, start: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        self.starts.append((file.name, start))
        if file.name in self.lost:
            raise LostConnectionError("status 503")
        yield start, self.chunks(file.name, start)

    def chunks(self, name: str, start: int) -> Iterator[bytes]:
        content = bytearray(self.content[name])
        if name in self.damage:
            content[self.damage.pop(name)] ^= 1
        for at in range(start, len(content), 65536):
            self.num_sent[name] += len(content[at : at + 65536])
            yield bytes(content[at : at + 65536])


def write_shards(path: Path, layout: str, config: Mapping[str, Any], num_files: int = 3) -> Path:
    """A checkpoint cut in one of LAYOUTS: the last puts the matrices of every expert apart."""
    tensors = synthetic_llada2(config, dtype=torch.bfloat16, seed=3)
    if layout in ("names", "experts"):
        convention = "llada20" if layout == "names" else "llada21"
        write_checkpoint(path, tensors, config, convention=convention, num_files=num_files)  # type: ignore[arg-type]
    else:
        cut = {"layers": layer_of, "matrices": matrix_of}[layout]
        save_shards(path, config, {name: (cut(name), tensor) for name, tensor in tensors.items()})
    (path / "generation_config.json").write_text("{}")
    (path / "special_tokens_map.json").write_text("{}")
    return path


def layer_of(name: str) -> int:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else 0


def matrix_of(name: str) -> int:
    kinds = ("gate_proj", "up_proj", "down_proj")
    return next((i for i, kind in enumerate(kinds) if f".experts.0.{kind}" in name), 0) or next(
        (i for i, kind in enumerate(kinds) if kind in name), 0
    )


def save_shards(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, Tensor]]
) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    shards: dict[str, dict[str, Tensor]] = {}
    for name, (number, tensor) in tensors.items():
        shards.setdefault(f"model-{number:05d}.safetensors", {})[name] = tensor
    for name, shard in shards.items():
        save_file(shard, path / name, {"format": "pt"})
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def pack_while(client: FakeClient, root: Path, **options: Any) -> PulledPack:
    model = HubModel(client, root / "hub", "some/tiny")  # type: ignore[arg-type]
    options = {"dtype": "int8", "num_threads": 1, "check_config": check_config, **options}
    return pull_pack(model, root / "pack", **options)


def pull_then_pack(client: FakeClient, root: Path, dtype: str = "int8") -> dict[str, bytes]:
    model = HubModel(client, root / "hub", "some/tiny")  # type: ignore[arg-type]
    path = pull(model, check_config=check_config).path
    pack_checkpoint(path, root / "pack", dtype=dtype)
    return contents(root / "pack")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oled_moe.hub, "_PAUSES_S", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    root = tmp_path_factory.mktemp("models")
    return {each: read_files(write_shards(root / each, each, CONFIG)) for each in LAYOUTS}


@pytest.fixture(scope="module")
def expected(
    models: dict[str, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, bytes]]:
    root = tmp_path_factory.mktemp("expected")
    return {each: pull_then_pack(FakeClient(models[each]), root / each) for each in LAYOUTS}


def names_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# The same bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_are_those_of_pull_and_pack(
    layout: str, models: Any, expected: Any, tmp_path: Path
) -> None:
    client = FakeClient(models[layout])
    packed = pack_while(client, tmp_path)
    assert contents(tmp_path / "pack") == expected[layout]
    verify_pack(tmp_path / "pack")
    assert names_in(tmp_path) == {"hub", "pack"}
    blobs = list((tmp_path / "hub").glob("*/blobs/*"))
    assert blobs == [] and packed.commit == COMMIT
    assert packed.downloaded_bytes == sum(map(len, {*models[layout].values()}))
    assert packed.pack.num_resumed_bytes == 0


@pytest.mark.parametrize("dtype", ["bf16", "int4-g32-asym"])
def test_other_forms(dtype: str, models: Any, tmp_path: Path) -> None:
    wanted = pull_then_pack(FakeClient(models["names"]), tmp_path / "other", dtype)
    pack_while(FakeClient(models["names"]), tmp_path, dtype=dtype, num_threads=3)
    assert contents(tmp_path / "pack") == wanted


@pytest.mark.parametrize("convention", ["single", "merged"])
def test_one_file_of_weights(convention: Any, tmp_path: Path) -> None:
    tensors = synthetic_llada2(CONFIG, seed=3)
    write_checkpoint(tmp_path / "source", tensors, CONFIG, convention=convention)
    client = FakeClient(read_files(tmp_path / "source"))
    wanted = pull_then_pack(client, tmp_path / "other")
    pack_while(client, tmp_path)
    assert contents(tmp_path / "pack") == wanted


def fp8(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
    """Experts in fp8, their scales in the file behind that of their values."""
    found: dict[str, tuple[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name] = (0, tensor)
            continue
        scale = tensor.float().abs().amax() / 448
        file = int(name.split(".experts.")[1].split(".")[0]) % 3
        found[name] = (file, (tensor.float() / scale).to(torch.float8_e4m3fn))
        found[f"{name}_scale_inv"] = (file + 1, scale.reshape(1, 1))
    return found


def test_weights_whose_scales_come_later(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    tensors = fp8(synthetic_llada2(CONFIG, dtype=torch.bfloat16, seed=3))
    save_shards(tmp_path / "source", config, tensors)
    client = FakeClient(read_files(tmp_path / "source"))
    wanted = pull_then_pack(client, tmp_path / "other")
    pack_while(client, tmp_path)
    assert contents(tmp_path / "pack") == wanted


def test_codes_are_kept_on_the_way(tmp_path: Path) -> None:
    settings = gptq_config(4, 32, sym=True)
    config = {**CONFIG, "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32}
    write_quantised(tmp_path / "source", gptq(4, 32, is_symmetric=True), settings, config)
    client = FakeClient(read_files(tmp_path / "source"))
    wanted = pull_then_pack(client, tmp_path / "other", "int4")
    packed = pack_while(client, tmp_path, dtype="int4")
    assert packed.pack.expert_dtype == "int4-g32" and "codes as stored" in packed.pack.rounding
    assert contents(tmp_path / "pack") == wanted


def test_a_model_that_was_pulled_stays_and_is_not_fetched(models: Any, tmp_path: Path) -> None:
    client = FakeClient(models["names"])
    model = HubModel(client, tmp_path / "hub", "some/tiny")  # type: ignore[arg-type]
    path = pull(model, check_config=check_config).path
    before, client.starts = contents(path), []
    packed = pack_while(client, tmp_path)
    assert packed.downloaded_bytes == 0 and contents(path) == before
    # What is asked of the hub is the beginning of each file of weights.
    assert len(client.starts) == 3


# The disk


def taken_bytes(root: Path) -> int:
    """What the files below take on the disk, holes not counted."""
    found = 0
    for path in root.rglob("*"):
        try:
            found += 0 if path.is_dir() or path.is_symlink() else path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_disk_never_holds_more_than_was_said(layout: str, tmp_path: Path) -> None:
    num_files = 6 if layout in ("names", "experts") else 3
    files = read_files(write_shards(tmp_path / "source", layout, WIDE, num_files))
    shutil.rmtree(tmp_path / "source")
    root, plans, most = tmp_path / "root", list[PackPlan](), [0]

    def look(*_: Any) -> None:
        most[0] = max(most[0], taken_bytes(root) - taken_bytes(partial_path(root / "pack")))

    root.mkdir()
    pack_while(FakeClient(files), root, on_plan=plans.append, downloading=look, packing=look)
    weights = {name: len(content) for name, content in files.items() if "safetensors" in name}
    del weights[INDEX]
    # Files of the file system begin at blocks, and so do their holes.
    slack = 8 * 4096 * len(files)
    (plan,) = plans
    assert plan.most_bytes <= most[0] + slack and most[0] <= plan.most_bytes + slack
    assert plan.most_bytes <= max(weights.values()) + plan.aside_bytes
    assert [file.name for file in plan.fetched] == sorted(weights)
    if layout in ("experts", "layers"):
        assert plan.aside_bytes == 0
        assert plan.most_bytes == max(weights.values())
    if layout == "matrices":
        assert plan.aside_bytes > 0.6 * sum(weights.values())
    if layout == "names":
        # No more than the matrices of one expert wait, from one file to the next.
        assert 0 < plan.aside_bytes <= 2 * 3 * 2 * 64 * 256


def test_only_headers_come_before_the_disk_is_looked_at(models: Any, tmp_path: Path) -> None:
    client = FakeClient(models["names"])
    room: list[Path] = []

    def free(directory: Path) -> int:
        room.append(directory)
        return 2**30

    with pytest.raises(DoesNotFitError, match=r"takes up to .* more in .*or give --force"):
        pack_while(client, tmp_path, free_bytes=free)
    assert room == [tmp_path] and not (tmp_path / "pack").exists()
    assert not list((tmp_path / "hub").glob("*/blobs/" + "?" * 64))
    pack_while(client, tmp_path, free_bytes=free, is_forced=True)
    assert (tmp_path / "pack").exists()


# Stopped and resumed


class PowerLoss(BaseException):
    """The machine is off."""


def lose_power_at(patch: pytest.MonkeyPatch, moment: int) -> None:
    """At the n-th call that changes the disk for good, or just before it, all is over."""
    count = [0]

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            is_last = count[0] == moment
            if is_last and moment % 2:
                raise PowerLoss
            try:
                return real(*arguments, **options)
            finally:
                if is_last:
                    raise PowerLoss

        patch.setattr(os, name, call)

    for name in ("fsync", "fdatasync", "rename", "replace", "unlink", "symlink"):
        wrap(name)


def test_ended_at_any_call_and_resumed_gives_the_same_bytes(
    models: Any, expected: Any, tmp_path: Path
) -> None:
    """Every `step`-th call, by turns before and behind it; with a step of 1 it takes minutes."""
    layout, root, step = "matrices", tmp_path / "root", 7
    moment, num_lost = step, 0
    while True:
        client = FakeClient(models[layout])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pack_writer, "CHUNK_BYTES", 8 * 4096)
            lose_power_at(patch, moment)
            try:
                pack_while(client, root)
                break
            except PowerLoss:
                num_lost += 1
        if not (root / "pack").exists():
            pack_while(client, root)
            assert not partial_path(root / "pack").exists()
            assert not list(root.glob("*.shards*")) and not list(root.glob("hub/*/blobs/*"))
        assert contents(root / "pack") == expected[layout], f"ended at call {moment}"
        shutil.rmtree(root)
        moment += step
    assert num_lost > 8


def killed(run: Callable[[], object], after_s: float) -> bool:
    """Run in a process that the system kills after so much of its time; whether it was killed."""
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, after_s)
            run()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0, "a run failed"
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_killed_at_random_moments_and_resumed_gives_the_same_bytes(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_files(write_shards(tmp_path / "source", layout, {**CONFIG, "num_experts": 40}))
    wanted = pull_then_pack(FakeClient(files), tmp_path / "straight")
    monkeypatch.setattr(pack_writer, "CHUNK_BYTES", 4096)
    start_s = time.process_time()
    pack_while(FakeClient(files), tmp_path / "once")
    whole_s = time.process_time() - start_s
    assert contents(tmp_path / "once" / "pack") == wanted
    generator, num_killed, num_begun = random.Random(7), 0, 0
    root = tmp_path / "killed"
    for _ in range(40):
        was_killed = killed(
            lambda: pack_while(FakeClient(files), root), 1e-3 + generator.random() * whole_s
        )
        num_killed += was_killed
        num_begun += was_killed and partial_path(root / "pack").is_dir()
        # The kill may come after the last rename: the pack is whole then, and a second run refuses.
        if (root / "pack").exists():
            assert contents(root / "pack") == wanted
            shutil.rmtree(root)
        if num_killed == 4:
            break
    assert num_killed == 4 and num_begun > 0
    if not (root / "pack").exists():
        pack_while(FakeClient(files), root)
    assert contents(root / "pack") == wanted
    assert names_in(root) == {"hub", "pack"}


@pytest.mark.parametrize("kind", ["file", "link", "files", "directory"])
def test_what_is_not_a_packs_own_stays_where_shards_would_lie(
    kind: str, models: Any, tmp_path: Path
) -> None:
    precious, shards = tmp_path / "precious", tmp_path / "pack.partial.shards"
    precious.mkdir()
    (precious / "mine").write_text("mine")
    if kind == "file":
        shards.write_text("mine")
    elif kind == "link":
        shards.symlink_to(precious)
    elif kind == "files":
        precious.rename(shards)
    else:
        (shards / "below").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"pack\.partial\.shards (is no|was not left)"):
        pack_while(FakeClient(models["names"]), tmp_path)
    # The hub's cache apart.
    assert [path for path in sorted(tmp_path.rglob("*")) if "hub" not in path.parts] == before


def interrupted(client: FakeClient, root: Path, name: str) -> None:
    """A run that ends as the hub no longer gives a file."""
    model = HubModel(client, root / "hub", "some/tiny")  # type: ignore[arg-type]
    with pytest.raises(DownloadError, match=r"broke off at 0 B"):
        pull_pack(
            model,
            root / "pack",
            dtype="int8",
            check_config=check_config,
            on_plan=lambda plan: client.lost.add(name),
        )
    client.lost.clear()


def test_files_that_were_used_do_not_come_again(models: Any, expected: Any, tmp_path: Path) -> None:
    client = FakeClient(models["names"])
    *used, last = sorted(name for name in client.content if name.endswith(".safetensors"))
    interrupted(client, tmp_path, last)
    assert taken_bytes(tmp_path / "hub") < len(client.content[last])
    client.num_sent = dict.fromkeys(client.num_sent, 0)
    packed = pack_while(client, tmp_path)
    assert [client.num_sent[name] for name in used] == [0, 0]
    assert packed.pack.num_resumed_bytes > packed.pack.pack_bytes // 3
    assert contents(tmp_path / "pack") == expected["names"]


@pytest.mark.parametrize("lost", ["pack.partial", "pack.partial.shards", "both"])
def test_what_is_removed_between_runs_is_made_again(
    lost: str, models: Any, expected: Any, tmp_path: Path
) -> None:
    """Without what was set aside, or without what was written, no zeros take their place."""
    client = FakeClient(models["matrices"])
    interrupted(client, tmp_path, "model-00002.safetensors")
    for path in tmp_path.glob("pack.partial*"):
        if path.is_dir() and lost in (path.name, "both"):
            shutil.rmtree(path)
    pack_while(client, tmp_path)
    assert contents(tmp_path / "pack") == expected["matrices"]


def test_a_record_that_is_damaged_is_not_trusted(
    models: Any, expected: Any, tmp_path: Path
) -> None:
    """All comes again then; zeros are never taken for what was set aside."""
    client = FakeClient(models["matrices"])
    generator = random.Random(4)
    for _ in range(3):
        interrupted(client, tmp_path, "model-00002.safetensors")
        record = tmp_path / "pack.partial.shards" / ".aside"
        content = bytearray(record.read_bytes())
        content[generator.randrange(len(content) - 1)] ^= 4
        record.write_bytes(content)
        pack_while(client, tmp_path)
        assert contents(tmp_path / "pack") == expected["matrices"]
        shutil.rmtree(tmp_path / "pack")


def test_a_stand_in_that_is_removed_is_made_again(
    models: Any, expected: Any, tmp_path: Path
) -> None:
    client = FakeClient(models["matrices"])
    interrupted(client, tmp_path, "model-00002.safetensors")
    (tmp_path / "pack.partial.shards/model-00001.safetensors").unlink()
    pack_while(client, tmp_path)
    assert contents(tmp_path / "pack") == expected["matrices"]


def test_a_model_that_changed_between_tries_is_noticed(models: Any, tmp_path: Path) -> None:
    client = FakeClient(models["matrices"])
    interrupted(client, tmp_path, "model-00002.safetensors")
    weights = bytearray(client.content["model-00001.safetensors"])
    # The low byte of every value, of those that were set aside too.
    for at in range(8 + int.from_bytes(weights[:8], "little"), len(weights), 2):
        weights[at] ^= 1
    client.content["model-00001.safetensors"] = bytes(weights)
    with pytest.raises(CheckpointError, match=r"model-00001\.safetensors has changed in some/tiny"):
        pack_while(client, tmp_path)
    shutil.rmtree(partial_path(tmp_path / "pack"))
    wanted = pull_then_pack(FakeClient(client.content), tmp_path / "other")
    pack_while(client, tmp_path)
    assert contents(tmp_path / "pack") == wanted


def test_other_options_do_not_go_on_with_a_run(models: Any, expected: Any, tmp_path: Path) -> None:
    client = FakeClient(models["names"])
    interrupted(client, tmp_path, max(n for n in client.content if n.endswith("3.safetensors")))
    with pytest.raises(CheckpointError, match="other options; remove it"):
        pack_while(client, tmp_path, dtype="int4")
    pack_while(client, tmp_path)
    assert contents(tmp_path / "pack") == expected["names"]


# Refused


def test_a_header_that_was_damaged_on_its_way_is_noticed(
    models: Any, expected: Any, tmp_path: Path
) -> None:
    client = FakeClient(models["names"])
    name = min(n for n in client.content if n.endswith(".safetensors"))
    # A name in the header that still can be read, of a tensor that is asked for.
    client.damage[name] = client.content[name].index(b"lm_head")
    with pytest.raises(CheckpointError, match="download"):
        pack_while(client, tmp_path)
    assert not list(tmp_path.glob("pack*"))
    # Spaces behind the header tell nothing, and are compared all the same.
    length = int.from_bytes(client.content[name][:8], "little")
    padded = bytearray(client.content[name])
    assert padded[8 + length - 1 : 8 + length] in (b" ", b"}")
    client.damage[name] = client.content[name].index(b'"pt"') + 1
    with pytest.raises(DownloadError, match=r"header came damaged.*pack\.partial and run"):
        pack_while(client, tmp_path)
    for path in tmp_path.glob("pack.partial*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    pack_while(client, tmp_path)
    assert contents(tmp_path / "pack") == expected["names"]


def test_a_hub_that_does_not_answer_is_given_up(models: Any, tmp_path: Path) -> None:
    client = FakeClient(models["names"])
    client.lost = {name for name in client.content if name.endswith(".safetensors")}
    with pytest.raises(DownloadError, match=r"the beginning of model-00001.*status 503"):
        pack_while(client, tmp_path)
    assert len([name for name, _ in client.starts if name in client.lost]) == 4


def test_nothing_is_asked_where_it_cannot_end_well(models: Any, tmp_path: Path) -> None:
    client = FakeClient(models["names"])
    with pytest.raises(ConfigError, match=r"dtype.*allowed"):
        pack_while(client, tmp_path, dtype="int3")
    (tmp_path / "pack").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        pack_while(client, tmp_path)
    (tmp_path / "pack").rmdir()
    client.content["config.json"] = json.dumps({**CONFIG, "model_type": "llama"}).encode()
    with pytest.raises(CheckpointError, match="some/tiny cannot be packed here: .*model_type"):
        pack_while(client, tmp_path)
    assert {name for name, _ in client.starts} == {"config.json"}


def test_shapes_that_lie_among_weights_are_refused_before_anything_large(
    models: Any, tmp_path: Path
) -> None:
    client = FakeClient(models["names"])
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    form = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    client.content["config.json"] = json.dumps({**CONFIG, "quantization_config": form}).encode()
    with pytest.raises(CheckpointError, match=r"pack-quantized, 4 bits.*pull it without --pack"):
        pack_while(client, tmp_path)
    assert {name for name, _ in client.starts} == {"config.json"}


def test_two_at_a_time(models: Any, tmp_path: Path) -> None:
    client = FakeClient(models["names"])

    def second(plan: PackPlan) -> None:
        with pytest.raises(OledMoeError, match=r"another process writes .*pack\.partial\.shards"):
            pack_while(client, tmp_path)

    pack_while(client, tmp_path, on_plan=second)
    assert (tmp_path / "pack").exists()
