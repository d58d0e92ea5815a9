"""Where packs are written: places that are refused, and what a run that ends too early leaves."""

import fcntl
import json
import os
import random
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import synthetic_llada2, write_checkpoint
from test_packing import CONFIG, contents, interrupt, write_source

from oled_moe import cli, pack_writer
from oled_moe.errors import CheckpointError, ConfigError, DoesNotFitError, OledMoeError
from oled_moe.inspection import verify_pack
from oled_moe.pack_places import check_place, journal_path, partial_path
from oled_moe.packing import pack_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    before = sorted(tmp_path.rglob("*"))
    yield
    assert sorted(tmp_path.rglob("*")) == before


def line_of(values: Any) -> bytes:
    """As a journal has it."""
    text = json.dumps(values, sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def names_in(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


# Places


@pytest.mark.parametrize("kind", ["directory", "file", "link", "link to nothing"])
def test_what_is_there_is_not_overwritten(kind: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    {
        "directory": out.mkdir,
        "file": out.touch,
        "link": lambda: out.symlink_to(tmp_path),
        "link to nothing": lambda: out.symlink_to(tmp_path / "nothing"),
    }[kind]()
    with pytest.raises(ConfigError, match="is there already; remove it"):
        pack_checkpoint(source, out)
    assert names_in(tmp_path) == ["pack"]


@pytest.mark.parametrize(
    "place", ["file/pack", "file/a/b/pack", "loop/pack", "lost/pack", "long" * 62, "\0"]
)
def test_places_where_nothing_can_be(place: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "lost").symlink_to("nothing")
    with pytest.raises(ConfigError, match="name another place"):
        pack_checkpoint(source, tmp_path / place)
    assert names_in(tmp_path) == ["file", "loop", "lost"]


@pytest.mark.parametrize("place", [".", "/", ""])
def test_a_place_without_a_name(place: str, source: Path) -> None:
    with pytest.raises(ConfigError, match="has no name that a pack could get"):
        pack_checkpoint(source, Path(place))


def test_the_command_ends_with_2_there(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["pack", str(source), str(tmp_path / "file" / "pack")]) == 2
    assert "is no directory; name another place" in capsys.readouterr().err


def test_a_place_without_permission(tmp_path: Path) -> None:
    """As another user, where tests run as root, whom nothing is refused."""
    tmp_path.chmod(0o555)
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            check_place(tmp_path / "deep" / "pack")
        except ConfigError as error:
            code = 0 if "may not be written to; name another place" in str(error) else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_pack_does_not_lie_in_its_source(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    link = tmp_path / "link"
    link.symlink_to(source)
    for out in (source / "pack", source / "a" / "pack", link / "pack", tmp_path / "x/../link/p"):
        with pytest.raises(ConfigError, match="lies in .*name a place outside of it"):
            pack_checkpoint(source, out)
        with pytest.raises(ConfigError, match="lies in .*name a place outside of it"):
            pack_checkpoint(link, out)
    assert names_in(source) == ["README.md", "config.json", "generation_config.json"] + [
        "model.safetensors"
    ]


def test_a_source_does_not_lie_in_the_pack_to_be(tmp_path: Path) -> None:
    source = write_source(tmp_path / "pack.partial")
    nested = write_source(tmp_path / "other.partial" / "deep")
    for model, out in ((source, tmp_path / "pack"), (nested, tmp_path / "other")):
        with pytest.raises(ConfigError, match="lies in .*where the pack is written"):
            pack_checkpoint(model, out)
    assert names_in(tmp_path) == ["other.partial", "pack.partial"]
    assert "model.safetensors" in names_in(source)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_in_the_way(kind: str, source: Path, tmp_path: Path) -> None:
    partial = tmp_path / "pack.partial"
    partial.touch() if kind == "file" else partial.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"pack\.partial is no directory; remove it"):
        pack_checkpoint(source, tmp_path / "pack")
    assert names_in(tmp_path) == ["pack.partial"]


def test_a_directory_of_somebody_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "pack.partial").mkdir()
    (tmp_path / "pack.partial" / "mine").touch()
    with pytest.raises(CheckpointError, match="was not left by a pack; remove it"):
        pack_checkpoint(source, tmp_path / "pack")
    assert names_in(tmp_path) == ["pack.partial"]


# Nothing stays of what has not begun


@pytest.mark.usefixtures("nothing_stays")
def test_no_room(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match="free space, name another place"):
        pack_checkpoint(source, tmp_path / "a" / "b" / "pack", free_bytes=lambda _: 2**30)


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_ended_before_anything_is_on_the_disk(
    error: BaseException, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(pack_writer, "_settle", fail)
    with pytest.raises((KeyboardInterrupt, DoesNotFitError)) as caught:
        pack_checkpoint(source, tmp_path / "pack")
    assert "stays" not in str(caught.value)


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file may be longer: writing more is refused by the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    """What was written before stays, and the next run has the rest."""
    config = {**CONFIG, "num_experts": 40}
    write_checkpoint(tmp_path / "source", synthetic_llada2(config, seed=3), config)
    out, other = tmp_path / "pack", tmp_path / "other"
    pack_checkpoint(tmp_path / "source", other)
    with files_up_to(200_000):
        with pytest.raises(DoesNotFitError, match=r"File too large.*stays for the next run"):
            pack_checkpoint(tmp_path / "source", out)
    assert partial_path(out).is_dir() and not out.exists()
    assert pack_checkpoint(tmp_path / "source", out).num_resumed_bytes > 0
    assert contents(out) == contents(other)
    assert names_in(tmp_path) == ["other", "pack", "source"]


# Journals


def test_a_journal_without_its_directory_tells_nothing(source: Path, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "pack")
    shutil.rmtree(tmp_path / "pack.partial")
    assert pack_checkpoint(source, tmp_path / "pack", dtype="int8").num_resumed_bytes == 0


@pytest.mark.parametrize("has_directory", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        b"a shopping list",
        b"a shopping list\n",
        b"\xff\xfe\n\n",
        b"{}\n",
        line_of([1, 2]),
        line_of({}),
        line_of({"source": 3, "journal": 3}),
        line_of({"source": {}}) + b"\n",
    ],
)
def test_a_file_that_is_no_journal(
    content: bytes, has_directory: bool, source: Path, tmp_path: Path
) -> None:
    path = journal_path(tmp_path / "pack")
    path.write_bytes(content)
    if has_directory:
        partial_path(tmp_path / "pack").mkdir()
    with pytest.raises(CheckpointError, match=r"partial\.journal: is not the journal of a pack"):
        pack_checkpoint(source, tmp_path / "pack")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        b"rubbish\n",
        b'["dense.safetensors", 0, 5]\n',
        b"[" * 100_000 + b"\n",
        line_of([]),
        line_of(["dense.safetensors", 0]),
        line_of(["dense.safetensors", -1, 5]),
        line_of(["dense.safetensors", 1000, 5]),
        line_of(["dense.safetensors", True, 5]),
        line_of(["dense.safetensors", 0, "5"]),
        line_of(["dense.safetensors", 0, 2**32]),
        line_of(["other", 0, 5]),
        line_of([[], 0, 5]),
        line_of({}),
    ],
)
def test_a_line_that_is_no_piece(line: bytes, source: Path, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "pack")
    with open(journal_path(tmp_path / "pack"), "ab") as file:
        file.write(line)
    with pytest.raises(CheckpointError, match=r"names no piece of this pack.*remove .*partial"):
        pack_checkpoint(source, tmp_path / "pack")


def change_job(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    first, *rest = journal_path(out).read_bytes().splitlines(keepends=True)
    job = json.loads(first.partition(b" ")[2])
    change(job)
    journal_path(out).write_bytes(line_of(job) + b"".join(rest))


def test_a_flipped_byte_of_a_journal_is_found(source: Path, tmp_path: Path) -> None:
    """None becomes a checksum of the pack."""
    out, generator = tmp_path / "pack", random.Random(8)
    interrupt(source, out)
    content = journal_path(out).read_bytes()
    assert content.count(b"\n") > 5
    for at in (*range(10), *generator.sample(range(len(content) - 1), 20)):
        value = content[at] ^ 1 << generator.randrange(8)
        journal_path(out).write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            pack_checkpoint(source, out)
    journal_path(out).write_bytes(content)
    pack_checkpoint(source, out)


def test_a_journal_of_another_version(source: Path, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "pack")
    change_job(tmp_path / "pack", lambda job: job.update(journal=2))
    with pytest.raises(CheckpointError, match="begun by another version of oled-moe; remove it"):
        pack_checkpoint(source, tmp_path / "pack")


def test_models_that_differ_in_nothing_but_their_place(tmp_path: Path) -> None:
    """Two models of one size, unpacked with the same times, are two models."""
    sources = [write_source(tmp_path / name) for name in ("one", "two")]
    for path in sources[0].iterdir():
        shutil.copystat(path, sources[1] / path.name)
    interrupt(sources[0], tmp_path / "pack")
    with pytest.raises(CheckpointError, match="begun from another model than .*two; remove it"):
        pack_checkpoint(sources[1], tmp_path / "pack")
    pack_checkpoint(sources[0], tmp_path / "pack")


# Two at a time


def test_another_process_is_waited_for(source: Path, tmp_path: Path) -> None:
    with open(tmp_path / "pack.partial.journal", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OledMoeError, match="another process writes"):
            pack_checkpoint(source, tmp_path / "pack")


def test_a_pack_that_another_run_ends_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look at the place and the lock."""
    out, real = tmp_path / "pack", pack_writer.write_pieces
    monkeypatch.setattr(
        "oled_moe.packing.check_place",
        lambda *_: [monkeypatch.undo(), pack_checkpoint(source, out)],
    )
    with pytest.raises(ConfigError, match="is there already"):
        pack_checkpoint(source, out)
    assert real is pack_writer.write_pieces and names_in(tmp_path) == ["pack"]
    verify_pack(out)


def test_a_journal_that_goes_while_it_is_waited_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gets the lock of a journal without a name takes another."""
    out, real, calls = tmp_path / "pack", fcntl.flock, []

    def slow(descriptor: Any, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            journal_path(out).unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    pack_checkpoint(source, out)
    assert len(calls) == 2 and names_in(tmp_path) == ["pack"]


@pytest.mark.parametrize("kind", ["empty directory", "directory", "file"])
def test_a_name_that_is_taken_meanwhile(kind: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"

    def take(*_: Any) -> None:
        if not out.exists():
            out.touch() if kind == "file" else out.mkdir()
            if kind == "directory":
                (out / "mine").touch()

    with pytest.raises(ConfigError, match=r"pack has come while .*lies whole in .*pack\.partial"):
        pack_checkpoint(source, out, progress=take)
    assert out.exists() and not (out / "config.json").exists()
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    assert pack_checkpoint(source, out).num_resumed_bytes > 0
    verify_pack(out)


def test_the_journal_of_a_whole_pack_goes(source: Path, tmp_path: Path) -> None:
    """A run that is killed between its last two steps leaves it."""
    pack_checkpoint(source, tmp_path / "pack")
    journal_path(tmp_path / "pack").write_text("{}")
    with pytest.raises(ConfigError, match="is there already"):
        pack_checkpoint(source, tmp_path / "pack")
    assert names_in(tmp_path) == ["pack"]


# Sources that change


@pytest.mark.parametrize("name", ["model.safetensors", "README.md"])
def test_a_source_that_goes_meanwhile(name: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")

    def remove(*_: Any) -> None:
        (source / name).unlink(missing_ok=True)

    with pytest.raises(CheckpointError, match=f"has changed while it was packed|{name}: cannot be"):
        pack_checkpoint(source, tmp_path / "pack", progress=remove)
    assert not (tmp_path / "pack").exists()


def test_a_source_that_is_cut_short_meanwhile(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")

    def cut(*_: Any) -> None:
        os.truncate(source / "model.safetensors", 9000)

    with pytest.raises(CheckpointError, match="model.safetensors"):
        pack_checkpoint(source, tmp_path / "pack", progress=cut)
    assert not (tmp_path / "pack").exists()
