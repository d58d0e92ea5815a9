"""`oled-moe pull` against a small hub: what it prints, its exit codes, and the model it brings."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from checkpoints import synthetic_llada2, write_checkpoint
from fake_hub import (
    COMMIT,
    FakeHub,
    Fault,
    checksum,
    fake_hub,
    leave_settings,
    read_files,
    wait_until,
)
from huggingface_hub import constants
from test_cli import CONFIG, SHORT, write_tokenizer

from oled_moe.cli import main
from oled_moe.cli_pull import _Meter
from oled_moe.hub_cache import CachedModel
from oled_moe.hub_client import HubFile

Run = Callable[..., tuple[int, str, str]]
SHARDS = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A checkpoint with random weights, as its repository has it."""
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, synthetic_llada2(CONFIG), CONFIG, convention="llada20")
    write_tokenizer(directory)
    return {**read_files(directory), "pytorch_model.bin": b"pickle", "modeling.py": b"import os"}


@pytest.fixture
def hub(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    """The hub that the environment names; no other setting of whoever runs the tests."""
    leave_settings(monkeypatch, tmp_path)
    with fake_hub(dict(files)) as hub:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub
    huggingface_hub.close_session()


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run_main(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run_main


def test_a_model_is_pulled_and_answers(hub: FakeHub, run: Run, tmp_path: Path) -> None:
    code, _, err = run("generate", hub.model, "-p", "x", *SHORT)
    assert code == 3 and f"oled-moe pull {hub.model}" in err
    code, out, err = run("pull", hub.model)
    assert code == 0 and "every checksum right" in out and f"oled-moe doctor {hub.model}" in out
    assert "modeling.py" in err and "pytorch_model.bin" in err and str(tmp_path / "hf/hub") in err
    code, out, _ = run("generate", hub.model, "-p", "x", "--json", *SHORT)
    assert code == 0 and len(json.loads(out)["token_ids"]) > 0


def test_the_second_time_nothing_is_downloaded(hub: FakeHub, run: Run) -> None:
    run("pull", hub.model)
    hub.asked.clear()
    code, out, err = run("pull", hub.model)
    assert code == 0 and "complete already" in out and "nothing; checking" in err
    assert not hub.asked


def test_quiet_and_json(hub: FakeHub, run: Run) -> None:
    code, out, err = run("pull", hub.model, "--json", "-q")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert Path(report["path"]).name == report["commit"] == COMMIT
    states = {file["name"]: file["state"] for file in report["files"]}
    assert {states[name] for name in SHARDS} == {"downloaded"}
    assert (
        report["downloaded_bytes"]
        == report["num_bytes"]
        == sum(len(hub.files[name]) for name in states)
    )
    assert [file["name"] for file in report["left_out"]] == ["pytorch_model.bin", "modeling.py"]
    damaged = Path(report["path"]) / SHARDS[1]
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    code, out, err = run("pull", hub.model, "-q")
    assert code == 0 and "1 of them because the one here was damaged" in out and err == ""


def test_a_revision_is_run_by_its_directory(hub: FakeHub, run: Run) -> None:
    code, out, _ = run("pull", hub.model, "--revision", "v1")
    assert code == 0 and f"snapshots/{COMMIT}" in out


def test_a_model_that_cannot_run_is_refused_first(hub: FakeHub, run: Run) -> None:
    hub.files["config.json"] = json.dumps({**CONFIG, "model_type": "llama"}).encode()
    code, _, err = run("pull", hub.model)
    assert code == 2 and "model_type is 'llama'" in err and "--force" in err
    assert {asked.name for asked in hub.asked} == {"config.json"}
    code, out, _ = run("pull", hub.model, "--force")
    assert code == 0 and "every checksum right" in out


def test_a_quantised_model_that_can_run_is_not_refused(hub: FakeHub, run: Run) -> None:
    form = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    hub.files["config.json"] = json.dumps({**CONFIG, "quantization_config": form}).encode()
    assert run("pull", hub.model)[0] == 0
    form = {"quant_method": "awq"}
    hub.files["config.json"] = json.dumps({**CONFIG, "quantization_config": form}).encode()
    code, _, err = run("pull", hub.model)
    assert code == 2 and "quant_method 'awq'" in err


def test_packed_while_it_comes(
    hub: FakeHub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("pull", hub.model, "--pack", "int8")
    assert code == 0 and "every checksum right" in out and "oled-moe doctor tiny-int8" in out
    assert "3 files of weights" in err and "besides the pack" in err
    code, out, _ = run("generate", "tiny-int8", "-p", "x", "--json", *SHORT)
    assert code == 0 and len(json.loads(out)["token_ids"]) > 0
    assert run("inspect", "tiny-int8")[0] == 0
    # No file of weights has stayed, and nothing else that the pack was made from.
    assert not [path for path in (tmp_path / "hf/hub").rglob("*") if path.parent.name == "blobs"]
    code, _, err = run("pull", hub.model, "--pack", "int8")
    assert code == 2 and "tiny-int8 is there already" in err
    code, out, err = run("pull", hub.model, "--pack", "bf16", "--out", "wide", "--json", "-q")
    report = json.loads(out)
    assert (code, err, report["path"], report["commit"]) == (0, "", "wide", COMMIT)
    assert report["downloaded_bytes"] > report["pack"]["source_bytes"]
    run("pull", hub.model)
    run("pack", hub.model, "straight", "--dtype", "int8")
    names = [path.name for path in Path("straight").iterdir()]
    assert {name: Path("tiny-int8", name).read_bytes() for name in names} == {
        name: Path("straight", name).read_bytes() for name in names
    }


def test_interrupted_while_packing_it_says_how_to_go_on(
    hub: FakeHub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oled_moe import hub_packing

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    out = str(tmp_path / "pack")
    monkeypatch.setattr(hub_packing, "write_pieces", interrupt)
    code, _, err = run("pull", hub.model, "--pack", "int8", "--out", out, "-q")
    assert code == 130 and "stay" not in err and not list(tmp_path.glob("pack*"))
    monkeypatch.undo()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(hub_packing, "seal_pack", interrupt)
    code, _, err = run("pull", hub.model, "--pack", "int8", "--out", out, "-q")
    assert code == 130 and "pack.partial.shards stay; the same command goes on from there" in err
    monkeypatch.undo()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    assert run("pull", hub.model, "--pack", "int8", "--out", out, "-q")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["some/tiny", "--out", "x"], 2, "with --pack"),
        (["some/tiny", "--pack", "int3"], 2, "pack is 'int3'; allowed: bfloat16 or bf16, int8"),
        (["demo"], 2, "comes with the program"),
        (["."], 2, "is a directory here"),
        (["tiny"], 2, "ORG/NAME"),
        (["no/such", "--pack", "int5"], 2, "pack is 'int5'"),
        (["no/such"], 3, "no/such is not on"),
        (["some/tiny", "--revision", "v9"], 3, "no revision 'v9'"),
        (["some/tiny", "--token", " "], 2, "copy it again"),
        (["some/tiny", "--pack"], 2, "--pack"),
    ],
)
def test_errors_are_one_line(
    hub: FakeHub, run: Run, arguments: list[str], exit_code: int, words: str
) -> None:
    code, out, err = run("pull", *arguments)
    assert (code, out) == (exit_code, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_faults_of_the_hub_are_one_line(hub: FakeHub, run: Run) -> None:
    hub.faults[SHARDS[0]] = [Fault(cut_at=100)]
    code, out, err = run("pull", hub.model, "-q")
    assert (code, out) == (1, "") and err.count("\n") == 1 and "broke off at 100 B" in err
    hub.is_gated = True
    code, out, err = run("pull", hub.model, "-q")
    assert code == 3 and err.count("\n") == 1 and "accept the terms" in err


def test_tokens_come_from_the_environment_and_are_never_shown(
    hub: FakeHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_right"
    code, _, err = run("pull", hub.model)
    assert code == 3 and "HF_TOKEN" in err
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    code, out, err = run("pull", hub.model, "--json", "--log-level", "debug")
    assert code == 3 and "hf_wrong" not in out + err
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert run("pull", hub.model)[0] == 0
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert run("pull", hub.model, "--token", "hf_right")[0] == 0


def test_offline_takes_what_is_there(
    hub: FakeHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = run("pull", hub.model)
    assert (code, out) == (3, "") and err.count("\n") == 1 and "HF_HUB_OFFLINE is set" in err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    run("pull", hub.model)
    num_listings = hub.num_listings
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = run("pull", hub.model, "--json")
    assert (code, err, json.loads(out)["is_checked"]) == (0, "", False)
    assert Path(json.loads(out)["path"]).name == COMMIT
    code, out, err = run("pull", hub.model)
    assert (code, err) == (0, "") and "not checked: HF_HUB_OFFLINE is set" in out
    code, out, err = run("pull", hub.model, "--pack", "int4")
    assert (code, out) == (3, "") and f"oled-moe pack {hub.model} OUT --dtype int4" in err
    assert hub.num_listings == num_listings


def test_no_hub_is_one_line(hub: FakeHub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    code, out, err = run("pull", hub.model)
    assert (code, out) == (3, "") and err.count("\n") == 1 and "cannot be reached" in err


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_ended_at_any_moment_it_continues(
    hub: FakeHub, run: Run, tmp_path: Path, ending: signal.Signals
) -> None:
    hub.faults[SHARDS[2]] = [Fault(cut_at=9000, is_stalled=True), Fault()]
    sha256 = checksum(SHARDS[2], hub.files[SHARDS[2]])
    partial = CachedModel(tmp_path / "hf/hub", hub.model).partial(sha256)
    controller, terminal = pty.openpty()
    # --force: a process that checks the config takes seconds to load torch.
    process = subprocess.Popen(
        [sys.executable, "-m", "oled_moe", "pull", hub.model, "--force"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    wait_until(lambda: partial.is_file() and partial.stat().st_size == 9000, process)
    process.send_signal(ending)
    assert process.wait(timeout=60) == (130 if ending == signal.SIGINT else -ending)
    shown = os.read(controller, 100_000).decode()
    os.close(terminal)
    os.close(controller)
    assert f"\x1b[Kasking {hub.url}" in shown and "Traceback" not in shown
    hub.released.set()
    assert run("pull", hub.model)[0] == 0
    assert hub.asked_of(SHARDS[2]) == [None, "bytes=9000-"]
    assert run("inspect", hub.model)[0] == 0


def test_progress_has_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    meter = _Meter(said.append)
    meter.total_bytes = 300 * 2**20
    one, two = HubFile("one", 100 * 2**20, "a"), HubFile("two", 200 * 2**20, "b")
    meter.tell("checking", one, one.num_bytes)
    meter.tell("downloading", two, 2**20)
    now_s = 2.0
    meter.tell("downloading", two, 21 * 2**20)
    assert said[-1] == (
        "downloading two: 21.0 MiB of 200.0 MiB; all: 121.0 MiB of 300.0 MiB, 10.0 MiB/s, 18 s left"
    )
