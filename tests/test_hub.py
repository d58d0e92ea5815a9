"""Downloads from a small hub that misbehaves, into a cache of their own."""

import errno
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fake_hub import COMMIT, Asked, FakeHub, Fault, checksum, fake_hub, leave_settings
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st

import oled_moe.hub
from oled_moe.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    DownloadError,
    MissingDependencyError,
    ModelNotFoundError,
    OledMoeError,
    ServerNotFoundError,
)
from oled_moe.hub import HubModel, PullReport, pull, stream_weights
from oled_moe.hub_cache import CachedModel, default_hub_cache, is_hub_id
from oled_moe.hub_client import HubClient, HubFile, LostConnectionError
from oled_moe.model_paths import find_model

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FIRST, SECOND = SHARDS
CONTENT = {
    "config.json": b'{"model_type": "anything"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    # The same bytes as another file.
    "special_tokens_map.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": FIRST, "b": SECOND, "c": FIRST}}
    ).encode(),
    FIRST: bytes(range(256)) * 40,
    SECOND: bytes(reversed(range(256))) * 50,
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"import os",
    "README.md": b"# tiny",
}
READ = [name for name in CONTENT if not name.startswith(("conso", "pytorch", "modeling", "READ"))]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No settings and no token of this machine, no pauses, no connection left open."""
    leave_settings(monkeypatch, tmp_path)
    yield
    huggingface_hub.close_session()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub(dict(CONTENT)) as hub:
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def open_model(hub: FakeHub, cache: Path, revision: str | None = None, **settings: Any) -> HubModel:
    client = HubClient(endpoint=hub.url, **{"timeout_s": 5, **settings})
    return HubModel(client, cache, hub.model, revision)


def pull_all(hub: FakeHub, cache: Path, **settings: Any) -> PullReport:
    return pull(open_model(hub, cache, **settings), check_config=lambda config: None)


def file_of(hub: FakeHub, name: str) -> HubFile:
    return HubFile(name, len(hub.files[name]), checksum(name, hub.files[name]))


def partial_of(hub: FakeHub, cache: Path, name: str) -> Path:
    path = CachedModel(cache, hub.model).partial(file_of(hub, name).checksum)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# What is brought


def test_what_is_read_comes_and_nothing_else(hub: FakeHub, cache: Path) -> None:
    report = pull_all(hub, cache)
    assert sorted(path.name for path in report.path.iterdir()) == sorted(READ)
    assert all((report.path / name).read_bytes() == CONTENT[name] for name in READ)
    # One has the same bytes as another.
    downloaded = {name for name, state in report.states.items() if state == "downloaded"}
    assert downloaded == {*READ} - {"special_tokens_map.json"}
    assert report.downloaded_bytes == sum(len(CONTENT[name]) for name in downloaded)
    assert {file.name for file in report.selection.left_out} == CONTENT.keys() - set(READ)
    assert find_model(hub.model, hub_cache=cache) == report.path
    # Other tools of Hugging Face find it too.
    for name in READ:
        found = huggingface_hub.try_to_load_from_cache(hub.model, name, cache_dir=cache)
        assert found == str(report.path / name)


def test_what_other_tools_brought_is_taken_as_it_is(hub: FakeHub, cache: Path) -> None:
    for name in READ:
        huggingface_hub.hf_hub_download(hub.model, name, cache_dir=cache, endpoint=hub.url)
    assert find_model(hub.model, hub_cache=cache).name == COMMIT
    hub.asked.clear()
    report = pull_all(hub, cache)
    assert not hub.asked
    assert set(report.states.values()) == {"present"} and report.downloaded_bytes == 0


def test_a_complete_model_is_checked_and_nothing_asked_again(hub: FakeHub, cache: Path) -> None:
    pull_all(hub, cache)
    hub.asked.clear()
    seen: list[str] = []
    report = pull(
        open_model(hub, cache),
        check_config=lambda config: None,
        progress=lambda action, file, num_bytes: seen.append(f"{action} {file.name}"),
    )
    assert not hub.asked and report.downloaded_bytes == 0
    assert {f"checking {name}" for name in READ} == set(seen)


def test_without_an_index_all_safetensors_files_come(hub: FakeHub, cache: Path) -> None:
    del hub.files["model.safetensors.index.json"]
    report = pull_all(hub, cache)
    assert {file.name for file in report.selection.weights} == {*SHARDS, "consolidated.safetensors"}


def test_nothing_is_found_by_the_models_name_before_all_is_there(hub: FakeHub, cache: Path) -> None:
    hub.faults[SECOND] = [Fault(status=404)]
    with pytest.raises(ModelNotFoundError, match=f"has no {SECOND}"):
        pull_all(hub, cache)
    with pytest.raises(ModelNotFoundError, match="oled-moe pull some/tiny"):
        find_model(hub.model, hub_cache=cache)
    hub.faults.clear()
    hub.asked.clear()
    pull_all(hub, cache)
    assert [asked.name for asked in hub.asked if asked.is_cdn] == [SECOND]


def test_a_new_commit_brings_what_changed(hub: FakeHub, cache: Path) -> None:
    old = pull_all(hub, cache)
    hub.commit, hub.files[SECOND] = "d" * 40, b"new weights"
    new = pull_all(hub, cache)
    assert new.path != old.path and new.path.name == "d" * 40
    assert {name for name, state in new.states.items() if state != "present"} == {SECOND}
    assert (old.path / SECOND).read_bytes() == CONTENT[SECOND]
    assert find_model(hub.model, hub_cache=cache) == new.path


def test_a_revision_is_kept_apart_from_main(hub: FakeHub, cache: Path) -> None:
    main = pull_all(hub, cache)
    hub.commit = "e" * 40
    tagged = pull(open_model(hub, cache, "v1"), check_config=lambda config: None)
    assert (tagged.revision, tagged.path.name) == ("v1", "e" * 40)
    assert find_model(hub.model, hub_cache=cache) == main.path
    assert CachedModel(cache, hub.model).find_snapshot("v1") == tagged.path
    assert CachedModel(cache, hub.model).find_snapshot("v2") is None


def test_a_disk_without_links_holds_the_files_themselves(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: str) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    report = pull_all(hub, cache)
    assert not any((report.path / name).is_symlink() for name in READ)
    assert set(pull_all(hub, cache).states.values()) == {"present"}
    (report.path / FIRST).write_bytes(b"x" * len(CONTENT[FIRST]))
    assert pull_all(hub, cache).states[FIRST] == "replaced"
    assert (report.path / FIRST).read_bytes() == CONTENT[FIRST]


# Interruptions


def test_cut_connections_are_continued(hub: FakeHub, cache: Path) -> None:
    hub.faults[FIRST] = [Fault(cut_at=100), Fault(cut_at=3000), Fault(cut_at=3000), Fault()]
    report = pull_all(hub, cache)
    assert hub.asked_of(FIRST) == [None, "bytes=100-", "bytes=3000-", "bytes=3000-"]
    assert (report.path / FIRST).read_bytes() == CONTENT[FIRST]


def test_a_connection_that_keeps_breaking_is_given_up(hub: FakeHub, cache: Path) -> None:
    hub.faults[FIRST] = [Fault(cut_at=5000)]
    with pytest.raises(DownloadError, match=r"broke off at 4\.9 KiB of 10\.0 KiB, which are kept"):
        pull_all(hub, cache)
    assert hub.asked_of(FIRST) == [None, "bytes=5000-", "bytes=5000-", "bytes=5000-"]
    assert partial_of(hub, cache, FIRST).read_bytes() == CONTENT[FIRST][:5000]


def test_long_downloads_may_break_off_often(hub: FakeHub, cache: Path) -> None:
    size = 2**20
    hub.files[FIRST] = os.urandom(6 * size)
    hub.faults[FIRST] = [*(Fault(cut_at=i * size) for i in range(1, 6)), Fault()]
    report = pull_all(hub, cache)
    assert len(hub.asked_of(FIRST)) == 6
    assert (report.path / FIRST).read_bytes() == hub.files[FIRST]


def test_a_hub_that_says_nothing_more_is_given_up(hub: FakeHub, cache: Path) -> None:
    hub.faults[FIRST] = [Fault(cut_at=10, is_stalled=True)]
    with pytest.raises(DownloadError, match=r"broke off at 10 B .*timed out"):
        pull_all(hub, cache, timeout_s=1)
    assert len(hub.asked_of(FIRST)) == 4


def test_passing_faults_pass(hub: FakeHub, cache: Path) -> None:
    hub.listing_faults = [(500, {}), (503, {"Retry-After": "0"})]
    hub.faults[SECOND] = [Fault(status=502), Fault(status=429), Fault()]
    pull_all(hub, cache)
    assert hub.num_listings == 3 and len(hub.asked_of(SECOND)) == 3


def test_faults_that_do_not_pass_end_it(hub: FakeHub, cache: Path) -> None:
    hub.listing_faults = [(500, {})] * 9
    with pytest.raises(DownloadError, match="status 500; try again later"):
        open_model(hub, cache)
    assert hub.num_listings == 4
    hub.listing_faults = [(429, {"Retry-After": "300"})]
    with pytest.raises(DownloadError, match="ask again in 300 s"):
        open_model(hub, cache)


def test_a_refused_or_ignored_range_starts_the_file_anew(hub: FakeHub, cache: Path) -> None:
    partial_of(hub, cache, FIRST).write_bytes(CONTENT[FIRST][:5000])
    hub.faults[FIRST] = [Fault(status=416), Fault()]
    partial_of(hub, cache, SECOND).write_bytes(CONTENT[SECOND][:5000])
    hub.faults[SECOND] = [Fault(is_range_ignored=True)]
    report = pull_all(hub, cache)
    assert hub.asked_of(FIRST) == ["bytes=5000-", None] and hub.asked_of(SECOND) == ["bytes=5000-"]
    assert all((report.path / name).read_bytes() == CONTENT[name] for name in SHARDS)


@bounded(60)
@given(
    faults=st.lists(
        st.builds(
            Fault,
            status=st.sampled_from([0, 0, 0, 416, 503]),
            cut_at=st.none() | st.integers(0, 3000),
            flip_at=st.none() | st.integers(0, 2999),
            is_range_ignored=st.booleans(),
            tail=st.sampled_from([b"", b"", b"more"]),
        ),
        max_size=6,
    ),
    there=st.none() | st.binary(max_size=3100) | st.integers(0, 3000),
)
def test_whatever_goes_wrong_no_wrong_byte_is_taken(
    faults: list[Fault], there: bytes | int | None
) -> None:
    content = os.urandom(3000)
    with pytest.MonkeyPatch.context() as patch, scratch() as cache:
        patch.setattr(oled_moe.hub, "_PAUSES_S", (0.0, 0.0, 0.0))
        file = HubFile("model.safetensors", 3000, checksum("model.safetensors", content))
        model = HubModel(ScriptedClient(file, content, faults), cache, "some/tiny")  # type: ignore[arg-type]
        partial = model.cached.partial(file.checksum)
        partial.parent.mkdir(parents=True)
        if there is not None:
            partial.write_bytes(content[:there] if isinstance(there, int) else there)
        try:
            path = model.fetch(file)
        except DownloadError:
            assert faults and model.find(file) is None
        else:
            assert path.read_bytes() == content and not partial.exists()


@contextmanager
def scratch() -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


class ScriptedClient:
    """A hub of one file without a network; each read has the next fault, then none."""

    def __init__(self, file: HubFile, content: bytes, faults: list[Fault]) -> None:
        self.file, self.content, self.faults = file, content, list(faults)

    def list_files(self, name: str, revision: str) -> tuple[str, list[HubFile]]:
        return COMMIT, [self.file]

    @contextmanager
    def read(
        self, name: str, commit: str, file: HubFile, start: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        fault = self.faults.pop(0) if self.faults else Fault()
        if fault.status == 503:
            raise LostConnectionError("status 503")
        first = 0 if fault.is_range_ignored else start
        yield (0, iter(())) if fault.status == 416 else (first, self.chunks(fault, first))

    def chunks(self, fault: Fault, first: int) -> Iterator[bytes]:
        content = bytearray(self.content)
        if fault.flip_at is not None:
            content[fault.flip_at] ^= 1
        content += fault.tail
        end = len(content) if fault.cut_at is None else fault.cut_at
        for at in range(first, end, 1000):
            yield bytes(content[at : min(at + 1000, end)])
        if fault.cut_at is not None:
            raise LostConnectionError("cut")


# Damage


def test_a_byte_that_is_flipped_on_the_way_is_noticed(hub: FakeHub, cache: Path) -> None:
    hub.faults[FIRST] = [Fault(flip_at=1234), Fault()]
    assert (pull_all(hub, cache).path / FIRST).read_bytes() == CONTENT[FIRST]
    hub.faults[SECOND] = [Fault(flip_at=1234)]
    shutil.rmtree(cache)
    with pytest.raises(DownloadError, match="came damaged twice"):
        pull_all(hub, cache)
    blobs = CachedModel(cache, hub.model).folder / "blobs"
    assert not list(blobs.glob(f"{file_of(hub, SECOND).checksum}*"))


@pytest.mark.parametrize("name", [FIRST, "tokenizer.json"])
def test_a_damaged_file_in_the_cache_is_replaced(hub: FakeHub, cache: Path, name: str) -> None:
    report = pull_all(hub, cache)
    damaged = bytearray(CONTENT[name])
    damaged[-1] ^= 1
    (report.path / name).write_bytes(damaged)
    again = pull_all(hub, cache)
    assert {n for n, state in again.states.items() if state == "replaced"} == {name}
    assert (again.path / name).read_bytes() == CONTENT[name]


def test_a_damaged_beginning_is_not_continued_for_ever(hub: FakeHub, cache: Path) -> None:
    partial_of(hub, cache, FIRST).write_bytes(b"\0" * 5000)
    partial_of(hub, cache, SECOND).write_bytes(b"\0" * 50000)
    report = pull_all(hub, cache)
    assert hub.asked_of(FIRST) == ["bytes=5000-", None] and hub.asked_of(SECOND) == [None]
    assert all((report.path / name).read_bytes() == CONTENT[name] for name in SHARDS)


def test_a_reply_without_end_is_cut_short(hub: FakeHub, cache: Path) -> None:
    hub.faults[FIRST] = [Fault(tail=b"more")]
    with pytest.raises(DownloadError, match="longer than the 10240 bytes"):
        pull_all(hub, cache)


# Who may read


def test_tokens_go_to_the_hub_and_not_to_whoever_holds_the_bytes(hub: FakeHub, cache: Path) -> None:
    hub.token = "hf_right"
    pull_all(hub, cache, token="hf_right")
    assert {asked.token for asked in hub.asked if not asked.is_cdn} == {"hf_right"}
    assert {asked.token for asked in hub.asked if asked.is_cdn} == {None}


@pytest.mark.parametrize(
    ("token", "words"),
    [(None, "or is private.*HF_TOKEN or with --token"), ("hf_wrong", "token that was sent")],
)
def test_private_models(hub: FakeHub, cache: Path, token: str | None, words: str) -> None:
    hub.token = "hf_right"
    with pytest.raises(ModelNotFoundError, match=words) as caught:
        open_model(hub, cache, token=token)
    assert "hf_wrong" not in str(caught.value)


@pytest.mark.parametrize(
    ("token", "words"),
    [(None, "is gated: accept the terms at .*/some/tiny, then"), ("hf_a", "may not read it")],
)
def test_gated_models(hub: FakeHub, cache: Path, token: str | None, words: str) -> None:
    hub.is_gated = True
    with pytest.raises(ModelNotFoundError, match=words):
        pull_all(hub, cache, token=token)
    assert [asked.name for asked in hub.asked] == []


@pytest.mark.parametrize("token", [None, "hf_any"])
def test_models_and_revisions_that_are_not_there(
    hub: FakeHub, cache: Path, token: str | None
) -> None:
    client = HubClient(endpoint=hub.url, token=token)
    with pytest.raises(ModelNotFoundError, match="other/tiny is not on"):
        HubModel(client, cache, "other/tiny")
    with pytest.raises(ModelNotFoundError, match="no revision 'v9'.*/tree/main"):
        HubModel(client, cache, hub.model, "v9")


@pytest.mark.parametrize(
    "name",
    ["tiny", "", "a/b/c", "../etc", "a/..", "a b/c", "a/b--c", "https://x.y/a/b", "a/" + "b" * 99],
)
def test_names_that_no_model_has(hub: FakeHub, cache: Path, name: str) -> None:
    assert not is_hub_id(name)
    with pytest.raises(ConfigError, match="ORG/NAME"):
        HubModel(HubClient(endpoint=hub.url), cache, name)
    assert hub.num_listings == 0


@pytest.mark.parametrize("revision", ["../x", "a b", "..", "x/../../y", "-?"])
def test_revisions_that_no_model_has(hub: FakeHub, cache: Path, revision: str) -> None:
    with pytest.raises(ConfigError, match="revision is"):
        open_model(hub, cache, revision)


@pytest.mark.parametrize("token", ["", "  ", "hf_ä", "hf_a\nb"])
def test_tokens_that_are_none(hub: FakeHub, token: str) -> None:
    with pytest.raises(ConfigError, match="token is empty or has letters"):
        HubClient(endpoint=hub.url, token=token)


# No hub


def test_no_hub_is_said_at_once(hub: FakeHub, cache: Path) -> None:
    client = HubClient(endpoint="http://127.0.0.1:9")
    with pytest.raises(ServerNotFoundError, match="cannot be reached .*check the network"):
        HubModel(client, cache, hub.model)
    pull_all(hub, cache)
    with pytest.raises(ServerNotFoundError, match="in the local cache already"):
        HubModel(client, cache, hub.model)


@pytest.mark.parametrize(
    "listing",
    [
        [],
        {"hello": "world"},
        {"id": "a/b", "sha": "main", "siblings": []},
        {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]},
        {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": "x", "size": 1, "blobId": "../x"}]},
    ],
)
def test_what_is_no_hub(hub: FakeHub, cache: Path, listing: Any) -> None:
    hub.listing = listing or {"": ""}
    with pytest.raises(ServerNotFoundError, match="is no hub"):
        open_model(hub, cache)


def test_files_with_names_that_could_lie_elsewhere_are_left_alone(
    hub: FakeHub, cache: Path
) -> None:
    hub.files["../../evil.safetensors"] = b"evil"
    hub.files["folder/model.safetensors"] = b"other"
    del hub.files["model.safetensors.index.json"]
    report = pull_all(hub, cache)
    assert "evil" not in " ".join(path.name for path in cache.rglob("*"))
    assert {"../../evil.safetensors", "folder/model.safetensors"} <= {
        file.name for file in report.selection.left_out
    }


@pytest.mark.parametrize(
    ("version", "words"), [(None, "is not installed"), ("1.2.3", "2.0 or newer, 1.2.3 is")]
)
def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    with pytest.raises(MissingDependencyError, match=rf"{words}.*'oled-moe\[hub\]'"):
        HubClient()


# What is no model, or does not fit


def test_models_that_cannot_run_are_refused_before_anything_large(
    hub: FakeHub, cache: Path
) -> None:
    def refuse(config: Any) -> None:
        raise CheckpointError(f"model_type is {config['model_type']!r}")

    with pytest.raises(
        CheckpointError, match="cannot be run here: model_type is 'anything'.*force"
    ):
        pull(open_model(hub, cache), check_config=refuse)
    assert hub.asked == [Asked("config.json", None, None, False)]
    pull(open_model(hub, cache), check_config=refuse, is_forced=True)


@pytest.mark.parametrize(
    ("remove", "add", "words"),
    [
        ("config.json", {}, "has no config.json"),
        ("safetensors", {}, r"pickle files only \(pytorch_model.bin\)"),
        (SECOND, {}, "lacks 1 of 2 files"),
        ("", {"model.safetensors.index.json": b"{}"}, "no weight_map"),
        ("", {"config.json": b"{"}, "not valid JSON"),
        ("", {"config.json": b"[]"}, "not a JSON object"),
    ],
)
def test_repositories_without_a_checkpoint(
    hub: FakeHub, cache: Path, remove: str, add: dict[str, bytes], words: str
) -> None:
    hub.files = {n: c for n, c in hub.files.items() if not remove or remove not in n} | add
    with pytest.raises(CheckpointError, match=words):
        pull_all(hub, cache)


def test_a_disk_that_is_too_small_is_found_out_first(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial_of(hub, cache, FIRST).write_bytes(CONTENT[FIRST][:10000])
    needed = sum(len(CONTENT[name]) for name in READ) - 10000 - len(CONTENT["config.json"])
    needed -= len(CONTENT["model.safetensors.index.json"])

    def free(num_bytes: int) -> Any:
        return lambda path: shutil._ntuple_diskusage(2**40, 2**40 - num_bytes, num_bytes)

    monkeypatch.setattr(shutil, "disk_usage", free(needed - 1))
    with pytest.raises(DoesNotFitError, match="HF_HUB_CACHE"):
        pull_all(hub, cache)
    assert not hub.asked_of(FIRST) and not hub.asked_of(SECOND)
    monkeypatch.setattr(shutil, "disk_usage", free(needed))
    pull_all(hub, cache)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_disk_that_fills_up_meanwhile(hub: FakeHub, cache: Path) -> None:
    partial_of(hub, cache, FIRST).symlink_to("/dev/full")
    with pytest.raises(DoesNotFitError, match=r"is full; make room"):
        pull_all(hub, cache)
    partial_of(hub, cache, FIRST).unlink()
    pull_all(hub, cache)


def test_a_cache_that_cannot_be_written(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OledMoeError, match="hub cache .* cannot be used .*HF_HUB_CACHE"):
        pull_all(hub, tmp_path / "file" / "hub")


# Side by side, and one by one


def test_two_pulls_at_once_fetch_every_file_once(hub: FakeHub, cache: Path) -> None:
    hub.faults[FIRST] = [Fault(cut_at=5000, is_stalled=True), Fault()]
    is_waiting = threading.Event()
    reports: list[PullReport] = []

    def run(progress: Any) -> None:
        reports.append(
            pull(open_model(hub, cache), check_config=lambda config: None, progress=progress)
        )

    def note_waiting(action: str, file: HubFile, num_bytes: int) -> None:
        if action.startswith("waiting"):
            is_waiting.set()
            hub.released.set()

    threads = [threading.Thread(target=run, args=(note_waiting,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_waiting.is_set() and len(reports) == 2
    assert hub.asked_of(FIRST) == [None, "bytes=5000-"] and hub.asked_of(SECOND) == [None]
    for name in READ:
        states = [report.states[name] for report in reports]
        assert states.count("downloaded") <= 1
        assert (reports[0].path / name).read_bytes() == CONTENT[name]


def test_weights_one_by_one_never_lie_on_the_disk_together(hub: FakeHub, cache: Path) -> None:
    names = [f"model-{i:05d}-of-00006.safetensors" for i in range(6)]
    weight_map = {f"tensor{i}": name for i, name in enumerate(names)}
    hub.files = {
        "config.json": CONTENT["config.json"],
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        **{name: os.urandom(200_000) for name in names},
    }
    model = open_model(hub, cache)
    weights = model.select().weights
    packed: dict[str, bytes] = {}
    most_bytes = 0

    def use(file: HubFile, path: Path) -> None:
        nonlocal most_bytes
        most_bytes = max(most_bytes, sum(p.stat().st_size for p in cache.rglob("*") if p.is_file()))
        packed[file.name] = path.read_bytes()[::4]

    stream_weights(model, weights, use)
    assert packed == {name: hub.files[name][::4] for name in names}
    small_bytes = len(hub.files["config.json"]) + len(hub.files["model.safetensors.index.json"])
    assert 200_000 <= most_bytes <= 200_000 + small_bytes + 1000
    assert not list(cache.rglob(file_of(hub, names[0]).checksum))


def test_weights_one_by_one_leave_a_pulled_model_as_it_is(hub: FakeHub, cache: Path) -> None:
    report = pull_all(hub, cache)
    model = open_model(hub, cache)
    seen = []
    stream_weights(model, model.select().weights, lambda file, path: seen.append(file.name))
    assert seen == list(SHARDS)
    assert all((report.path / name).read_bytes() == CONTENT[name] for name in READ)


def test_a_shard_that_is_being_used_stays_when_its_user_fails(hub: FakeHub, cache: Path) -> None:
    model = open_model(hub, cache)
    weights = model.select().weights

    def fail(file: HubFile, path: Path) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        stream_weights(model, weights, fail)
    stream_weights(model, weights, lambda file, path: None)
    assert hub.asked_of(FIRST) == [None]
    assert model.find(weights[0]) is None


# The cache


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "HOME/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "~/hf"}, "HOME/hf/hub"),
        ({"HF_HOME": "/hf", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_CACHE": "$HOME/new"}, "HOME/new"),
        ({"HF_HUB_CACHE": ""}, "HOME/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_other_tools_have_it(
    settings: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert str(default_hub_cache()) == expected.replace("HOME", str(tmp_path))


def test_models_are_found_in_the_cache_of_the_environment(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = pull_all(hub, cache)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    assert find_model(hub.model) == report.path


def test_downloads_need_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None\nimport oled_moe.hub, oled_moe.cli_pull"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
