"""The command line, run in this process wherever that shows the same."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import synthetic_llada2, write_checkpoint
from fakes import LIVE_POLICIES
from products import product
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import oled_moe.engine
import oled_moe.inspection
import oled_moe.measuring
import oled_moe.profiler
from oled_moe import block_screen, cli_flags, demo_screen
from oled_moe.cli import app, main
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.demo_screen import Question, pick_questions
from oled_moe.engine import Engine
from oled_moe.metrics import GenerationStats, combine_stats

MASK_ID, EOS_ID, ROLE_END_ID = 256, 257, 258
CONFIG: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "mask_token_id": MASK_ID,
    "eos_token_id": EOS_ID,
}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<|role_end|>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT = ("--max-tokens", "8", "--block-length", "4", "--threads", "1")

Run = Callable[..., tuple[int, str, str]]


def write_tokenizer(directory: Path) -> None:
    """One token a byte, then the special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|mask|>", "<|endoftext|>", "<|role_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"mask_token": "<|mask|>", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    generation_config = {"block_length": 16, "threshold": 0.9}
    write_checkpoint(
        directory, synthetic_llada2(CONFIG), CONFIG, generation_config=generation_config
    )
    write_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without tokenizer, in the shards of LLaDA2.1."""
    directory = tmp_path_factory.mktemp("models") / "bare"
    tensors = synthetic_llada2(CONFIG, dtype=torch.bfloat16)
    return str(write_checkpoint(directory, tensors, CONFIG, convention="llada21"))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile, no model cache and no setting of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("OLED_MOE_", "HF_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def kept_threads() -> Any:
    """--threads sets those of the whole process."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command line: its exit code, stdout and stderr."""

    def run_main(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run_main


# Background jobs of a shell inherit an ignored SIGINT; a terminal's commands do not.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from oled_moe.cli import main
print("started", file=sys.stderr, flush=True)
sys.exit(main())
"""


def start(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """The program in a process of its own, past its imports."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=options.pop("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert process.stderr.readline() == "started\n"
    return process


# generate


def test_generate_prints_the_text_alone(run: Run, model: str) -> None:
    code, out, err = run("generate", model, "-p", "hello", *SHORT)
    assert code == 0
    with Engine(model, EngineConfig(threads=1)) as engine:
        prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
        params = SamplingParams(
            max_tokens=8, block_length=4, eos_early_stop=True, stop_token_ids=(ROLE_END_ID,)
        )
        assert out.removesuffix("\n") == engine.generate(prompt, params).text.removesuffix("\n")
    assert "block length 4, threshold 0.9," in err
    assert "not measured: run" in err
    for words in ("device", "policy       oled", "threads      1", "total", "hit rate"):
        assert words in err
    assert "\x1b" not in out + err


def test_quiet_leaves_stderr_empty(run: Run, model: str) -> None:
    code, out, err = run("generate", model, "-p", "hello", "-q", *SHORT)
    assert (code, err) == (0, "") and out


def test_streamed_text_is_the_same_text(run: Run, model: str) -> None:
    _, at_once, _ = run("generate", model, "-p", "hello", "-q", "--no-stream", *SHORT)
    _, streamed, _ = run("generate", model, "-p", "hello", "-q", "--stream", *SHORT)
    assert streamed == at_once


def test_raw_takes_the_prompt_as_it_is(run: Run, model: str) -> None:
    _, out, _ = run("generate", model, "-p", "hello", "--raw", "--json", *SHORT)
    answer = json.loads(out)
    with Engine(model, EngineConfig(threads=1)) as engine:
        params = SamplingParams(max_tokens=8, block_length=4, eos_early_stop=True)
        assert answer["token_ids"] == engine.generate("hello", params).token_ids
    assert answer["params"]["stop_token_ids"] == []


def test_json_is_one_object_with_everything(run: Run, model: str) -> None:
    code, out, _ = run(
        "generate", model, "-p", "hello", "--json", "--device", "emulated",
        "--experts-per-layer", "4", "--policy", "priority+adapt", "--stop-token-ids", "7,8",
        "--algorithm", "JointThreshold", *SHORT,
    )  # fmt: skip
    answer = json.loads(out)
    assert code == 0
    assert answer["device"] == "emulated" and answer["policy"] == "priority+adapt"
    assert answer["plan"]["num_slots"] == 8 and answer["plan"]["num_experts"] == 16
    assert answer["stats"]["max_resident_experts"] <= 8 + answer["plan"]["num_staging"]
    assert answer["params"]["stop_token_ids"] == [7, 8, ROLE_END_ID]
    assert answer["params"]["algorithm"] == "joint_threshold"
    assert answer["params"]["eos_early_stop"] is True
    assert answer["finish_reason"] in ("stop", "length") and len(answer["token_ids"]) <= 8
    assert {"text", "hardware_source", "versions"} <= set(answer)


def test_emulated_says_so(run: Run, model: str) -> None:
    _, _, err = run("generate", model, "-p", "hello", "--device", "emulated", *SHORT)
    assert "emulated (a device simulated on this CPU)" in err
    assert "per token from the end of prefill on (emulated device)" in err


def test_token_ids_where_there_is_no_tokenizer(run: Run, bare_model: str) -> None:
    code, out, _ = run("generate", bare_model, "--prompt-ids", "1,2,3", *SHORT)
    assert code == 0 and all(part.isdecimal() for part in out.split())
    code, _, err = run("generate", bare_model, "-p", "hello", *SHORT)
    assert code == 2 and "tokenizer" in err


def test_prompts_from_file_and_stdin(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n")
    _, expected, _ = run("generate", model, "-p", "hello", "-q", *SHORT)
    assert run("generate", model, "--prompt-file", str(file), "-q", *SHORT)[1] == expected
    with file.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run("generate", model, "-q", *SHORT)[1] == expected


def test_system_message_needs_a_template(run: Run, model: str, bare_model: str) -> None:
    assert run("generate", model, "-p", "hi", "--system", "Be brief.", *SHORT)[0] == 0
    assert run("generate", bare_model, "-p", "hi", "--system", "Be brief.", *SHORT)[0] == 2
    code, _, err = run("generate", model, "-p", "hi", "--raw", "--system", "x", *SHORT)
    assert code == 2 and "--raw" in err


# Settings: flag, then environment, then default


def test_flag_wins_over_environment_over_default(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def policy_of(*arguments: str) -> str:
        _, out, _ = run("generate", model, "-p", "x", "--json", *SHORT, *arguments)
        return str(json.loads(out)["policy"])

    assert policy_of() == "oled"
    monkeypatch.setenv("OLED_MOE_POLICY", "lfu")
    assert policy_of() == "lfu"
    assert policy_of("--policy", "naive-lru") == "naive-lru"


def test_hub_cache_is_found_by_the_usual_variables(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hf" / "hub" / "models--some--tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model)
    code, _, err = run("inspect", "some/tiny")
    assert code == 3 and "oled-moe pull some/tiny" in err
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert run("inspect", "some/tiny")[0] == 0
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert run("inspect", "some/tiny")[0] == 3


def test_policy_names_in_help_are_those_of_the_registry() -> None:
    assert cli_flags.POLICY_NAMES == LIVE_POLICIES


def test_help_says_each_default_once_and_leaves_names_whole(run: Run) -> None:
    for command in (*app_commands(), ("trace", "record"), ("trace", "synth"), ("trace", "show")):
        code, out, _ = run(*command, "--help")
        assert code == 0
        for entry in re.split(r"\n  (?=\S)", out):
            num_defaults = len(re.findall(r"\bdefault:\s", entry))
            assert num_defaults <= 1 or "[default: " not in entry, entry
        assert not re.search(r"\w-\n", out), command


def app_commands() -> list[tuple[str]]:
    names = (c.name or c.callback.__name__ for c in app.registered_commands if c.callback)
    return [(name,) for name in names]


def test_a_model_that_is_not_there_is_told_before_torch_is_loaded() -> None:
    program = """
import sys
from oled_moe.cli import app, main
commands = (
    "inspect", "plan", "doctor", "serve", "generate -p x", "chat", "bench", "pack out",
    "trace record --prompts pyproject.toml --out x",
)
codes = []
for command in commands:
    codes.append(main([*command.split(), "./nowhere"] if command != "pack out" else
                      ["pack", "./nowhere", "out"]))
print(codes, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{[3] * 9} False\n", done.stderr
    assert done.stderr.count("no model at ./nowhere") == 9


# Errors: one line, the exit code of its kind


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["-p", "x", "--policy", "nope"], 2, "unknown policy 'nope'; known: fiddler, finemoe"),
        (["-p", "x", "--policy", "oled:depth=3"], 2, "prefetch=reuse"),
        (["-p", "x", "--policy", "oled:overlap=3"], 2, "0 to 1"),
        (["-p", "x", "--no-such-flag"], 2, "--no-such-flag"),
        (["-p", "x", "--max-tokens", "many"], 2, "--max-tokens"),
        (["-p", "x", "--threshold", "7"], 2, "error: --threshold is 7"),
        (["-p", "x", "--device", "tpu"], 2, "cpu, cuda, emulated"),
        (["-p", "x", "--algorithm", "magic"], 2, "joint_threshold"),
        (
            ["-p", "x", "--memory", "1GiB", "--expert-memory", "50%"],
            2,
            "--expert-memory and --memory are both given; give one of them",
        ),
        (["-p", "x", "--prompt-ids", "1"], 2, "give one of them"),
        (["--prompt-ids", "1,b"], 2, "1,2,3"),
        (["--prompt-ids", "99999"], 2, "259"),
        (["--prompt-file", "no/such/file"], 2, "no/such/file"),
        (["-p", "x", "--max-tokens", "100000"], 2, "raise --max-model-len"),
        (["-p", "x", "--expert-memory", "10"], 4, "error: --expert-memory is 10 B"),
        (["-p", "x", "--hardware", "no/such/profile"], 3, "oled-moe doctor"),
    ],
)
def test_errors_are_one_line(
    run: Run, model: str, arguments: list[str], exit_code: int, words: str
) -> None:
    code, out, err = run("generate", model, *arguments)
    assert (code, out) == (exit_code, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (["inspect", "no/such/place"], 3),
        (["inspect", "demo", "--json", "--bad"], 2),
        (["generate", "/", "-p", "x"], 3),
    ],
)
def test_errors_are_objects_too(run: Run, arguments: list[str], exit_code: int) -> None:
    code, out, err = run(*arguments, *([] if "--json" in arguments else ["--json"]))
    assert code == exit_code and err.startswith("error: ")
    assert json.loads(out)["error"]["exit_code"] == exit_code


def test_no_prompt_is_a_usage_error(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        code, _, err = run("generate", model)
    assert code == 2 and "--prompt-file" in err


def test_corrupt_checkpoint_is_2(run: Run, model: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(model) / name).read_bytes()[:-7])
    code, _, err = run("inspect", str(tmp_path))
    assert code == 2 and err.count("\n") == 1


def test_the_unexpected_is_one_line_too(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(Engine, "stream", fail)
    code, _, err = run("generate", model, "-p", "x", "-q")
    assert code == 1
    assert err.startswith("error: unexpected RuntimeError: the sky fell") and err.count("\n") == 1
    code, _, err = run("--log-level", "debug", "generate", model, "-p", "x", "-q")
    assert code == 1 and "Traceback" in err
    code, _, err = run("generate", model, "-p", "x", "-q", "--log-level", "debug")
    assert code == 1 and "Traceback" in err


def test_logs_as_json(run: Run, model: str) -> None:
    code, _, err = run("generate", model, "-p", "x", "--log-format", "json", *SHORT)
    events = [json.loads(line) for line in err.splitlines()]
    assert code == 0 and {"plan", "statistics"} <= {entry.get("event") for entry in events}


# Ctrl-C and closed pipes


def test_interrupt_while_waiting_for_the_prompt(model: str) -> None:
    process = start("--log-level", "debug", "generate", model, stdin=subprocess.PIPE)
    with process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
        assert process.wait(60) == 130
    assert "Traceback" not in err


def test_interrupt_while_generating(tmp_path: Path) -> None:
    # Many forwards: the signal may come late on a busy machine, and still in the middle.
    config = {**CONFIG, "max_position_embeddings": 4096}
    write_checkpoint(tmp_path, synthetic_llada2(config), config)
    write_tokenizer(tmp_path)
    process = start(
        "generate", str(tmp_path), "-p", "x", "--stream", "--threads", "1",
        "--ignore-eos", "--block-length", "4", "--threshold", "1", "--max-tokens", "4000",
    )  # fmt: skip
    with process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130
    assert "Traceback" not in err and "error: interrupted" in err


def test_interrupt_while_loading(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(oled_moe.engine, "read_weights", interrupt)
    code, out, err = run("generate", model, "-p", "x")
    assert (code, out, err) == (130, "", "error: interrupted\n")


def test_closed_pipe_is_quiet() -> None:
    with start("generate", "--help") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) in (0, 1)


# inspect, version, help


def test_inspect_says_what_is_there(run: Run, model: str, bare_model: str) -> None:
    code, out, _ = run("inspect", model, "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["num_experts"] == 8 and summary["num_moe_layers"] == 2
    assert summary["expert_bytes"] == 3 * 32 * 16 * 4
    assert summary["routed_bytes"] == 16 * summary["expert_bytes"]
    assert summary["kv_bytes_per_token"] == 2 * 3 * 1 * 16 * 4
    assert summary["has_tokenizer"] and summary["has_chat_template"]
    assert summary["sampling_defaults"]["block_length"] == 16
    code, out, _ = run("inspect", bare_model)
    assert code == 0
    assert "3: shards cut by expert" in out and "no: prompts must be token ids" in out
    assert all(len(line) == len(line.rstrip()) for line in out.splitlines())


def test_inspect_tells_conventions_apart(run: Run, tmp_path: Path) -> None:
    tensors = synthetic_llada2(CONFIG)
    for convention, words in (("llada20", "cut by size"), ("merged", "stacked")):
        path = write_checkpoint(tmp_path / convention, tensors, CONFIG, convention=convention)
        assert words in run("inspect", str(path))[1]


def test_inspect_names_what_is_missing(run: Run, tmp_path: Path) -> None:
    for name in ("model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"):
        tensors = synthetic_llada2(CONFIG)
        del tensors[name]
        path = write_checkpoint(tmp_path / name, tensors, CONFIG)
        code, _, err = run("inspect", str(path))
        assert code == 2 and "missing" in err or "asks for" in err


def test_version(run: Run) -> None:
    code, out, _ = run("version", "--json")
    assert code == 0
    assert {"oled_moe", "torch", "machine"} <= set(json.loads(out))
    assert torch.__version__ in run("version")[1]


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from oled_moe.cli import main\n"
        "codes = [main(a) for a in (['--help'], ['generate', '--help'], [])]\n"
        "print(codes, [m for m in ('torch', 'numpy', 'rich', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("[0, 0, 0] []\n") and done.stderr == ""
    assert "priority+adapt" in done.stdout and "Decoding:" in done.stdout


# doctor


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures next to nothing, with the code of the real thing."""
    small = oled_moe.measuring.Effort(2**21, 64, 2**20, 1, 2, 0.01, 0.2)
    measure = oled_moe.profiler.measure_hardware
    monkeypatch.setattr(oled_moe.profiler, "_MIN_WORKING_SET_BYTES", 2**21)
    monkeypatch.setattr(
        oled_moe.inspection, "measure_hardware", lambda **given: measure(**given, effort=small)
    )


def test_doctor_measures_and_stores(
    run: Run, model: str, quick_doctor: None, tmp_path: Path
) -> None:
    code, out, _ = run(
        "doctor", model, "--full", "--json", "--threads", "1", "--directory", str(tmp_path)
    )
    report = json.loads(out)
    assert code == 0
    for name in ("t_h2d_s", "tau_s", "mean_tokens_per_miss"):
        assert report[name] > 0
    assert report["mean_tokens_per_miss_source"] == f"measured on {model}"
    assert isinstance(report["disk_reads"], list) and isinstance(report["warnings"], list)
    assert report["fit"]["is_fitting"] and "all 16 experts" in report["fit"]["verdict"]
    assert set(report["devices"]) == {"cpu", "emulated"}
    # What was stored is what later runs decide by.
    stored = tmp_path / ".cache" / "oled-moe" / "hardware-cpu.json"
    _, out, _ = run("generate", model, "-p", "x", "--json", *SHORT)
    assert json.loads(out)["hardware_source"] == str(stored)


def test_doctor_prints_and_need_not_store(
    run: Run, model: str, quick_doctor: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oled_moe.inspection.measure_tokens_per_miss", lambda *_, **__: 2.5)
    code, out, err = run(
        "doctor", model, "--quick", "--no-save", "--device", "emulated", "--threads", "1",
        "--directory", str(tmp_path),
    )  # fmt: skip
    assert (code, err) == (0, "")
    for words in ("copying, emulated", "split, emulated", "CPU experts", "2.50 tokens", "It fits"):
        assert words in out
    assert "was not stored" in out
    # Rates have one unit everywhere.
    assert "GB/s" in out and "iB/s" not in out
    assert "copying, cpu" not in out and not (tmp_path / ".cache").exists()


def test_doctor_says_when_a_model_does_not_fit(
    run: Run, model: str, quick_doctor: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oled_moe.inspection.measure_tokens_per_miss", lambda *_, **__: 2.5)
    monkeypatch.setattr(oled_moe.engine, "usable_memory_bytes", lambda: 4096)
    code, out, _ = run(
        "doctor", model, "--quick", "--no-save", "--threads", "1", "--directory", str(tmp_path)
    )
    assert code == 4 and "It does not fit: " in out and "--max-model-len" in out


# demo


def test_demo_gives_the_same_tokens_in_a_quarter_of_the_memory(run: Run) -> None:
    code, out, err = run("demo", "--json", "-n", "5")
    assert code == 0, f"the bundled model in src/oled_moe/demo does not run: {err}{out}"
    report = json.loads(out)
    assert report["same_tokens"] is True and len(report["answers"]) == 5
    for answer in report["answers"]:
        assert answer["correct"] == (answer["expected"] in answer["answer"])
    offloaded, resident = report["offloaded"], report["resident"]
    assert offloaded["stats"]["max_resident_experts"] <= report["num_experts"] / 4
    assert resident["stats"]["max_resident_experts"] == report["num_experts"]
    assert resident["stats"]["expert_loads"] == 0 < offloaded["stats"]["expert_loads"]
    assert set(offloaded["stats"]) == set(GenerationStats.__dataclass_fields__)


def test_demo_tells_when_tokens_differ(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = demo_screen.Asked.answer
    count = iter(range(100))

    def answer(asked: demo_screen.Asked) -> demo_screen.Answer:
        given = real(asked)
        result = replace(given.result, token_ids=[*given.result.token_ids, next(count)])
        return replace(given, result=result)

    monkeypatch.setattr(demo_screen.Asked, "answer", answer)
    monkeypatch.setattr(demo_screen, "MAX_TOKENS", 16)
    code, out, _ = run("demo", "-n", "1")
    assert code == 1 and "other tokens" in out and "all experts" in out and "hit rate" in out
    assert "\x1b" not in out


def test_demo_questions_take_turns() -> None:
    families = {
        "arithmetic": ["= 1", "= 2", "= 3", '{"answer": 4}'],
        "code": ["a", "b"],
        "facts": ["c"],
    }
    questions = [
        Question(f"{family} {i}", family, expected)
        for family, answers in families.items()
        for i, expected in enumerate(answers)
    ]
    picked = [question.expected for question in pick_questions(questions, 5)]
    assert picked == ["= 1", '{"answer": 4}', "a", "b", "c"]
    assert len(pick_questions(questions, 99)) == 7


def test_a_block_is_shown_filling_in(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_screen, "MAX_TOKENS", 32)
    with Engine(model, EngineConfig(threads=1)) as engine:
        asked = demo_screen.Asked(engine, Question("hello", "none", "x"))
        frames = [asked.frame(event) for event in asked.events()]
    assert block_screen.MASK in frames[0].plain
    assert any("green" in str(span.style) or "red" in str(span.style) for span in frames[0].spans)
    # Finished text stays in front of the block at work.
    assert len(frames[-1].plain) >= len(frames[0].plain)


def test_combined_statistics() -> None:
    def stats(**values: float) -> GenerationStats:
        zero: Mapping[str, Any] = dict.fromkeys(GenerationStats.__dataclass_fields__, 0)
        return GenerationStats(**{**zero, **values})

    first = stats(
        num_denoise_forwards=3, num_commit_forwards=1, hit_rate=1.0, tpot_s=1.0, ttft_s=2.0,
        expert_loads=5, max_resident_experts=7,
    )  # fmt: skip
    second = stats(
        num_denoise_forwards=1, hit_rate=0.0, tpot_s=4.0, ttft_s=4.0, expert_loads=1,
        max_resident_experts=6,
    )  # fmt: skip
    combined = asdict(combine_stats([first, second], [8, 2]))
    expected = {
        "num_denoise_forwards": 4, "num_commit_forwards": 1, "tokens_per_forward": 2.0,
        "hit_rate": 0.75, "tpot_s": 1.6, "ttft_s": 3.0, "expert_loads": 6,
        "max_resident_experts": 7,
    }  # fmt: skip
    assert {name: combined[name] for name in expected} == pytest.approx(expected)


def test_a_flag_wins_over_what_it_excludes_in_the_environment(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLED_MOE_MEMORY", "1B")
    monkeypatch.setenv("OLED_MOE_PROMPT", "from the environment")
    code, out, _ = run("generate", model, "--json", "--prompt-ids", "1,2", "--expert-memory", "50%")
    assert code == 0
    assert json.loads(out)["plan"]["num_slots"] + json.loads(out)["plan"]["num_staging"] == 8


def test_the_environment_decodes_by_its_own_algorithm(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLED_MOE_THRESHOLD", "0.4")
    asked = ("generate", model, "--prompt-ids", "1,2", "--max-tokens", "4", "--experts-per-layer")
    code, _, err = run(*asked, "4", "--algorithm", "low_confidence")
    assert code == 0 and "threshold 0.4" in err
    code, _, err = run(*asked, "4", "--algorithm", "factor")
    assert code == 0 and "factor 1" in err and "threshold" not in err
    code, _, err = run(*asked, "4", "--algorithm", "factor", "--threshold", "0.4")
    assert code == 2 and "threshold is 0.4; it goes with" in err


def test_json_from_the_environment_holds_for_errors(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLED_MOE_JSON", "1")
    code, out, _ = run("generate", "./nowhere", "-p", "x")
    assert code == 3 and json.loads(out)["error"]["exit_code"] == 3


REDIRECTS = (">&-", "2>&-", "<&-", "> /dev/full", "| true")


@pytest.mark.parametrize(
    "redirect, command",
    [
        # One of these loads torch, which takes most of the time.
        *product(REDIRECTS, ("version --json", "trace show ./nowhere --json", "simulate --list")),
        *(
            pytest.param(redirect, command, marks=pytest.mark.full)
            for redirect in REDIRECTS
            for command in ("inspect ./nowhere --json", "version")
        ),
    ],
)
def test_streams_that_are_closed_or_full_make_no_traceback(redirect: str, command: str) -> None:
    shell = f"{sys.executable} -m oled_moe {command} {redirect}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr + done.stdout
    assert done.returncode in (0, 1, 3)


# Ctrl-C before there is a command, while its modules are loaded, and behind it

_KILL = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    ("arguments", "module", "out"),
    [
        (["--help"], "typer", ""),
        (["generate", "demo", "-p", "x"], "torch", ""),
        # An exception there may be lost, as in a destructor, or come out as another one.
        (
            ["generate", "demo", "-p", "x", "--json"],
            "torch",
            '{"error": {"message": "interrupted", "exit_code": 130}}\n',
        ),
        (["serve", "demo", "--port", "0"], "torch", ""),
        (["simulate", "x"], "numpy", ""),
    ],
)
def test_ctrl_c_while_modules_are_loaded_is_one_line(
    arguments: list[str], module: str, out: str, tmp_path: Path
) -> None:
    text = f"try:\n    {_KILL}\nexcept BaseException:\n    raise AttributeError('ma')\n"
    (tmp_path / f"{module}.py").write_text(text)
    done = run_with(tmp_path, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (130, out, "error: interrupted\n")


def test_ctrl_c_behind_a_command_says_nothing(tmp_path: Path) -> None:
    text = f"import atexit\ndef kill():\n    {_KILL}\natexit.register(kill)\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    done = run_with(tmp_path, "--version")
    # What a shell calls 130.
    assert done.returncode == -signal.SIGINT
    assert done.stdout.startswith("oled-moe") and done.stderr == ""


def run_with(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, which finds the modules of a folder before others."""
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from oled_moe.__main__ import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
