"""`oled-moe bench`, on engines that only pretend to run, and once on the bundled model."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import FakeEngine, World
from test_random_checkpoint import TINY
from test_roofline import SMALL

import oled_moe.engine
import oled_moe.random_checkpoint
import oled_moe.replay_bench
import oled_moe.shapes
from oled_moe.cli import main
from oled_moe.cli_bench import (
    DEFAULT_POLICIES,
    BenchFlags,
    choose_prompts,
    read_prompts,
    split_policies,
)
from oled_moe.errors import InputError
from oled_moe.model_paths import find_model
from oled_moe.policies import POLICIES, is_clairvoyant
from oled_moe.roofline import measure_limits
from oled_moe.shapes import Shape

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
    code, out, err = run("demo", "--prompts", prompts, "--num-prompts", "3")
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
        "demo", "--prompts", prompts, "--policy", "lfu", "--policy", "oled:overlap=0.5", "--json",
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
    code, out, _ = run("demo", "--prompts", prompts, "--num-prompts", "1", "--quick")
    assert code == 0 and "Quick run: 2 repetitions" in out


def test_other_tokens_are_exit_1(run: Run, world: World, prompts: str) -> None:
    world.tokens_of = lambda policy, ids: (len(policy),)
    asked = ("demo", "--prompts", prompts, "--num-prompts", "1", "--quick")
    code, out, _ = run(*asked)
    assert code == 1 and "different tokens" in out
    code, out, _ = run(*asked, "--device", "emulated")
    assert code == 0 and "Answers equal to those of the first policy" in out
    assert run(*asked, "--device", "emulated", "--no-cpu-experts")[0] == 1


def test_failed_requests_are_exit_1(run: Run, world: World, prompts: str) -> None:
    world.fails = lambda policy, ids: True
    code, out, _ = run("demo", "--prompts", prompts, "--num-prompts", "1", "--quick")
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
        (["--device", "tpu"], "device is 'tpu'; allowed: cpu"),
        (["--out", "no/such/place/report.html"], "no/such/place"),
        (["--save", "/"], "is a directory"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_flags_are_one_sentence(
    run: Run, world: World, prompts: str, arguments: list[str], words: str
) -> None:
    code, out, err = run("demo", "--prompts", prompts, *arguments)
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


def test_packs_of_demo_are_asked_its_questions(tmp_path: Path) -> None:
    # A name is not what makes it one, nor are its weights.
    names, demo = ("config.json", "tokenizer.json"), find_model("demo")
    for name in names:
        shutil.copy(demo / name, tmp_path / name)
    chosen = choose_prompts(str(tmp_path), BenchFlags())
    assert chosen == choose_prompts("demo", BenchFlags()) and "bundled questions" in chosen.words
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "built-in set" in choose_prompts(str(tmp_path), BenchFlags()).words
    assert "built-in set" in choose_prompts("absent", BenchFlags()).words


# Full size without weights, here a tiny one


@pytest.fixture
def tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shape that only tests know, limits measured on little; where its weights come to lie."""
    shape = Shape("tiny", TINY, num_dense_layers=1, note="tiny is a test.")
    monkeypatch.setattr(oled_moe.shapes, "SHAPES", {"tiny": shape})
    monkeypatch.setattr(oled_moe.random_checkpoint, "_POOL_VALUES", 2**16)

    def measure(*arguments: Any, **options: Any) -> Any:
        return measure_limits(*arguments, **{**options, "effort": SMALL})

    monkeypatch.setattr(oled_moe.replay_bench, "measure_limits", measure)
    return tmp_path / ".cache" / "oled-moe" / "shapes"


SHAPE_RUN = ("--shape", "tiny", "--forwards", "3", "--warmup", "1")


def test_shape_table(run: Run, tiny_shape: Path) -> None:
    code, out, err = run(
        *SHAPE_RUN, "--moe-layers", "2", "--policy", "naive-lru,oled+prefetch:words=true,least=0",
        "--experts-per-layer", "4,16", "--replay", "synth:llada2-mini:block=8",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert [path.name for path in tiny_shape.glob("[!.]*")] == ["tiny-2layers"]
    table = [line for line in out.splitlines() if line.startswith(("naive-lru", "oled+prefetch:"))]
    assert len(table) == 4
    for words in (
        "tiny, 2 of 3 MoE layers, bfloat16, random weights",
        "replayed: synthetic, preset llada2-mini, blocks of 8",
        "The weights are random and the routing is replayed (synthetic)",
        "tiny is a test.",
        "3 denoising forwards of 8 tokens a block counted",
    ):
        assert words in out
    # With a name of ordinary length the table fits a page.
    long_name = "oled+prefetch:words=true,least=0"
    assert max(map(len, table)) - len(long_name) + len("oled-load-aware") <= 100


def test_shape_json_and_rows(run: Run, tiny_shape: Path, tmp_path: Path) -> None:
    place, rows = tmp_path / "weights", tmp_path / "rows.jsonl"
    code, out, err = run(
        *SHAPE_RUN, "--policy", "lfu", "--json", "--save", str(rows), "--checkpoint-dir",
        str(place), "--replay", "synth:llada2-mini:block=8",
    )  # fmt: skip
    assert code == 0 and str(rows) in err

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    values = json.loads(out, parse_constant=refuse)
    (only,) = values["runs"]
    # A quarter of the experts where nothing is said.
    assert (only["policy"], only["experts_per_layer"], only["num_forwards"]) == ("lfu", 4, 3)
    assert values["shape"] == "tiny" and values["replayed"] and values["note"]
    assert values["checkpoint"] == str(place / "tiny-3layers")
    (row,) = [json.loads(line, parse_constant=refuse) for line in rows.read_text().splitlines()]
    assert row["forward_s_median"] == only["forward_s_median"] and row["shape"] == "tiny"
    assert row["notes"] == values["notes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo"], "both MODEL 'demo' and --shape"),
        (["--prompts", "p.txt"], "--prompts does not go with --shape"),
        (["--num-prompts", "2"], "--num-prompts does not go"),
        (["--capacity", "4"], "--capacity does not go with --shape; give --experts-per-layer"),
        (["--quick"], "--quick does not go"),
        (["--raw"], "--raw does not go"),
        (["--out", "x.html"], "--out does not go with --shape; give --json or --save"),
        (["--memory", "1GiB"], "--memory does not go with --shape; give --experts-per-layer"),
        (["--max-tokens", "4"], "--max-tokens does not go"),
        (["--temperature", "0"], "--temperature does not go"),
        (["--moe-layers", "9"], "moe-layers is 9; allowed: a whole number, 1 to 3"),
        (["--forwards", "0"], "forwards is 0"),
        (["--warmup", "-1"], "warmup is -1"),
        (["--repetitions", "0"], "repetitions is 0"),
        (["--experts-per-layer", "many"], "experts-per-layer is 'many'; allowed"),
        (["--experts-per-layer", "17"], "0 to 16"),
        (["--experts-per-layer", "4,4"], "is given twice"),
        (["--policy", "nope"], "unknown policy 'nope'"),
        (["--policy", "finemoe"], "all router scores"),
        (["--replay", "synth:nope"], "unknown preset 'nope'"),
        (["--replay", "synth:llada2-mini:num_requests=1", "--forwards", "9999"], "--forwards"),
        (["--shape", "nope"], "unknown shape 'nope'; known: tiny"),
        (["--save", "/"], "is a directory"),
    ],
)
def test_shape_refuses_before_anything_is_written(
    run: Run, tiny_shape: Path, arguments: list[str], words: str
) -> None:
    code, out, err = run(*SHAPE_RUN, *arguments)
    assert (code, out) == (2, "") and not tiny_shape.exists()
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--forwards", "3"], "--forwards goes with --shape"),
        (["demo", "--replay", "synth:llada2-mini"], "--replay goes with --shape"),
        (["demo", "--experts-per-layer", "4,8"], "repeat --capacity"),
        ([], "name one, or a --shape"),
    ],
)
def test_shape_flags_need_a_shape(run: Run, world: World, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


def test_shape_without_room_is_4(
    run: Run, tiny_shape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oled_moe.random_checkpoint, "_free_bytes", lambda directory: 2**20)
    code, out, err = run(*SHAPE_RUN)
    assert (code, out) == (4, "") and err.count("\n") == 1 and "--checkpoint-dir" in err


def test_a_trace_that_is_not_there_is_3(run: Run, tiny_shape: Path) -> None:
    assert run(*SHAPE_RUN, "--replay", "no.trace.safetensors")[0] == 3


def test_a_shape_wins_over_a_model_of_the_environment(
    run: Run, tiny_shape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLED_MOE_MODEL", "demo")
    code, _, err = run(*SHAPE_RUN, "--policy", "lfu", "--replay", "synth:llada2-mini:block=8")
    assert (code, err) == (0, "")


def test_policies_may_be_given_in_one_flag() -> None:
    assert split_policies(["a,b:k=1,l=2,c", "d:x=1", "e"]) == ["a", "b:k=1,l=2", "c", "d:x=1", "e"]
    assert split_policies(["k=1"]) == ["k=1"] and split_policies(["a", "k=1"]) == ["a", "k=1"]


def test_experts_per_layer_is_one_number_with_a_model(run: Run, world: World, prompts: str) -> None:
    asked = ("demo", "--prompts", prompts, "--num-prompts", "1", "--quick", "--json")
    code, out, _ = run(*asked, "--experts-per-layer", "2.5")
    assert code == 0 and json.loads(out)["config"]["experts_per_layer"] == 2.5
