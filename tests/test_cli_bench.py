"""`oled-moe bench`, on engines that only pretend to run, and once on the bundled model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import FakeEngine, World

import oled_moe.engine
from oled_moe.cli import main
from oled_moe.cli_bench import DEFAULT_POLICIES, read_prompts
from oled_moe.errors import InputError
from oled_moe.policies import POLICIES, is_clairvoyant

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile, no model cache and no setting of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("OLED_MOE_", "HF_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def kept_threads() -> Any:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run_main(*arguments: str) -> tuple[int, str, str]:
        code = main(("bench", *arguments))
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run_main


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Engines of this world are what `bench` opens."""
    made = World()
    monkeypatch.setattr(
        oled_moe.engine, "Engine", lambda model, config, **_: FakeEngine(made, config)
    )
    return made


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": [i, 2, 3]}) + "\n" for i in range(5)))
    return str(path)


def test_table_names_policies_and_conditions(run: Run, world: World, prompts: str) -> None:
    code, out, err = run("m", "--prompts", prompts, "--num-prompts", "3")
    assert (code, err) == (0, "")
    for policy in DEFAULT_POLICIES:
        assert sum(line.startswith(policy) for line in out.splitlines()) == 2
    for words in ("TPOT ratio", "baseline", "93.75 %", "same tokens", "kept open", "interleaved"):
        assert words in out
    # Five times three prompts each; the other two prompts warm up.
    assert len(world.asked()) == 5 * 3 * len(DEFAULT_POLICIES)
    assert {ids[0] for _, ids in world.asked("generate")} == {3, 4}
    assert all(len(line) == len(line.rstrip()) for line in out.splitlines())


def test_json_page_and_rows(run: Run, world: World, prompts: str, tmp_path: Path) -> None:
    page, rows = tmp_path / "report.html", tmp_path / "rows.jsonl"
    code, out, err = run(
        "m", "--prompts", prompts, "--policy", "lfu", "--policy", "oled:overlap=0.5", "--json",
        "--out", str(page), "--save", str(rows), "--num-prompts", "2", "--warmup", "0", "--seed",
        "7",
    )  # fmt: skip
    values = json.loads(out)
    assert code == 0 and str(page) in err and str(rows) in err
    assert [case["policy"] for case in values["cases"]] == ["lfu", "oled:overlap=0.5"]
    assert values["seed"] == 7 and values["warmup"]["num_requests"] == 0
    assert values["config"]["expert_memory"] == "25%"
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert len(rows.read_text().splitlines()) == 10


def test_quick_is_said(run: Run, world: World, prompts: str) -> None:
    code, out, _ = run("m", "--prompts", prompts, "--num-prompts", "1", "--quick")
    assert code == 0 and "Quick run: 2 repetitions" in out


def test_other_tokens_are_exit_1(run: Run, world: World, prompts: str) -> None:
    world.tokens_of = lambda policy, ids: (len(policy),)
    asked = ("m", "--prompts", prompts, "--num-prompts", "1", "--quick")
    code, out, _ = run(*asked)
    assert code == 1 and "different tokens" in out
    code, out, _ = run(*asked, "--device", "emulated")
    assert code == 0 and "Answers equal to those of the first policy" in out
    assert run(*asked, "--device", "emulated", "--no-cpu-experts")[0] == 1


def test_failed_requests_are_exit_1(run: Run, world: World, prompts: str) -> None:
    world.fails = lambda policy, ids: True
    code, out, _ = run("m", "--prompts", prompts, "--num-prompts", "1", "--quick")
    assert code == 1 and "No request was answered" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "nope"], "naive-lru"),
        (["--policy", "lfu", "--policy", "lfu"], "twice"),
        (["--policy", "belady"], "simulate"),
        (["--repetitions", "3"], "--quick"),
        (["--repetitions", "many"], "--repetitions"),
        (["--warmup", "-1"], "warmup is -1"),
        (["--num-prompts", "0"], "num-prompts is 0"),
        (["--num-prompts", "99"], "1 to 5"),
        (["--capacity", "2", "--expert-memory", "50%"], "give one of them"),
        (["--threshold", "7"], "threshold is 7"),
        (["--device", "cuda"], "cpu, emulated"),
        (["--out", "no/such/place/report.html"], "no/such/place"),
        (["--save", "/"], "is a directory"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_flags_are_one_sentence(
    run: Run, world: World, prompts: str, arguments: list[str], words: str
) -> None:
    code, out, err = run("m", "--prompts", prompts, *arguments)
    assert (code, out) == (2, "") and world.asked() == []
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_a_model_that_is_not_there_is_3(run: Run) -> None:
    code, out, err = run("./nowhere")
    assert (code, out) == (3, "") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "\n  \n", "holds no prompt"),
        ("a.jsonl", "{", "line 1: is not JSON"),
        ("a.jsonl", '"yes"\n{"text": "no"}', "line 2: is no prompt"),
        ("a.jsonl", '{"prompt_ids": [1, true]}', "line 1: is no prompt"),
        ("a.jsonl", '{"prompt": "x", "prompt_ids": [1]}', "line 1: is no prompt"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_prompts(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "absent")


def test_prompt_files_hold_text_or_ids(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("first\n\nsecond {}\n")
    assert read_prompts(path) == ["first", "second {}"]
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one"}\n"two"\n{"prompt_ids": [3, 4]}\n')
    assert read_prompts(path) == ["one", "two", (3, 4)]


def test_default_policies_run_live() -> None:
    assert set(DEFAULT_POLICIES) <= set(POLICIES)
    assert not any(map(is_clairvoyant, DEFAULT_POLICIES))


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from oled_moe.cli import main\n"
        "code = main(['bench', '--help'])\n"
        "print(code, [m for m in ('torch', 'numpy', 'rich', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("0 []\n") and done.stderr == ""
    assert "--repetitions" in done.stdout and "repeat it" in done.stdout


def test_demo_live(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, out, err = run(
        "demo", "--policy", "naive-lru", "--policy", "priority", "--num-prompts", "2", "--warmup",
        "1", "--quick", "--max-tokens", "8", "--json", "--out", str(page),
    )  # fmt: skip
    assert code == 0, err
    values = json.loads(out)
    assert values["tokens"]["difference"] is None and values["tokens"]["must_agree"]
    for case in values["cases"]:
        assert case["completed"] == 4 and case["failed"] == 0
        assert 0 < case["medians"]["hit_rate"]["median"] < 1
        assert case["medians"]["expert_loads"]["median"] > 0
        assert case["median_ttft_ms"] > 0 and case["median_e2el_ms"] >= case["median_ttft_ms"]
        assert case["num_slots"] + case["num_staging"] == values["plan"]["num_experts"] // 4
        assert 0 < case["peak_resident_experts"] <= case["num_slots"] + case["num_staging"]
    assert values["peak_process_bytes"] > 0 and "torch" in values["versions"]
    assert "bundled questions" in values["prompts"] and "<svg" in page.read_text()
