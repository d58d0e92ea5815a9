"""`oled-moe trace`, run in this process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from oled_moe import cli_trace, recording, synthesis, traces
from oled_moe.cli import main
from oled_moe.cli_trace import RecordFlags
from oled_moe.traces import load_trace

Run = Callable[..., tuple[int, str, str]]
SHORT = ("--max-tokens", "8", "--threads", "1")
TINY = ("--num-requests", "2", "--answer-tokens", "20", "--num-layers", "2")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def made(tmp_path: Path, run: Run) -> Path:
    assert run("trace", "synth", "--out", tmp_path / "made", *TINY)[0] == 0
    return tmp_path / "made.trace.safetensors"


def test_names_are_those_of_the_modules() -> None:
    assert cli_trace.SUFFIX == traces.SUFFIX
    assert set(cli_trace.PRESET_NAMES) == set(synthesis.PRESETS)
    assert cli_trace.WORKLOAD_NAMES == (*synthesis.WORKLOADS, "mixed")
    everything = RecordFlags(gate_scores=True, hidden_cosine=True, input_embedding=True)
    assert everything.include() == recording.OPTIONAL
    assert RecordFlags().include() == recording.DEFAULT_INCLUDE


@pytest.mark.parametrize("command", [(), ("record",), ("show",), ("synth",)])
def test_help(run: Run, command: tuple[str, ...]) -> None:
    code, out, _ = run("trace", *command, "--help")
    assert code == 0 and "Usage: oled-moe trace" in out


def test_synth_appends_the_suffix_and_says_what_it_made(tmp_path: Path, run: Run) -> None:
    for name in ("a", "a.safetensors", "a.trace", "a.trace.safetensors"):
        code, out, err = run("trace", "synth", "--out", tmp_path / name, *TINY, "--overwrite")
        assert (code, err) == (0, "")
        assert str(tmp_path / "a.trace.safetensors") in out and "2 layers, 256 per layer" in out
    assert len(list(tmp_path.iterdir())) == 1


def test_synth_takes_every_flag(tmp_path: Path, run: Run) -> None:
    values = {
        "preset": "llada2-flash",
        "workload": "code",
        "prompt-tokens": 20,
        "block-length": 8,
        "batch-size": 2,
        "heterogeneity": 0.2,
        "flip": 0.4,
        "threshold": 0.8,
        "seed": 3,
        "model-seed": 4,
    }
    flags = [item for name, value in values.items() for item in (f"--{name}", value)]
    code, out, _ = run("trace", "synth", "--out", tmp_path / "a", *TINY, *flags, "--json")
    assert code == 0
    made = json.loads(out)["synthesis"]
    assert made["expert_bytes"] == 25165824 and made["answer_tokens"] == 20
    for name, value in values.items():
        if name != "preset":
            assert made[name.replace("-", "_")] == value


def test_show_prints_tables(made: Path, run: Run) -> None:
    code, out, err = run("trace", "show", made)
    assert (code, err) == (0, "")
    for words in ("steps apart", "last denoise to commit", "still masked", "8 of 8", "SRP", "SCH"):
        assert words in out


def test_show_json_is_strict(made: Path, run: Run) -> None:
    code, out, _ = run("trace", "show", made, "--json")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    shown = json.loads(out, parse_constant=refuse)
    assert code == 0 and shown["num_requests"] == 2
    assert 0 < shown["stats"]["gaps"][0]["overlap"] <= 1


def test_inspect_knows_traces(made: Path, run: Run) -> None:
    code, out, _ = run("inspect", made)
    assert code == 0 and "synthetic, llada2-mini" in out
    code, out, _ = run("inspect", made, "--json")
    assert code == 0 and json.loads(out)["num_moe_layers"] == 2


@pytest.mark.parametrize("command", [("trace", "show"), ("inspect",)])
def test_broken_and_missing_files(made: Path, run: Run, command: tuple[str, ...]) -> None:
    made.write_bytes(made.read_bytes()[:-5])
    code, out, err = run(*command, made)
    assert (code, out) == (2, "") and str(made) in err
    assert run("trace", "show", made.with_name("none"))[0] == 3


def test_no_file_is_overwritten_unasked(made: Path, run: Run) -> None:
    before = made.read_bytes()
    code, _, err = run("trace", "synth", "--out", made, *TINY)
    assert code == 2 and "--overwrite" in err and made.read_bytes() == before
    code, _, err = run("trace", "synth", "--out", made.parent / "no" / "x", *TINY)
    assert code == 2 and "no such directory" in err


def test_synth_names_wrong_values(tmp_path: Path, run: Run) -> None:
    for flags, words in (
        (("--preset", "llada3"), "llada2-mini"),
        (("--block-length", "1025"), "--block-length is 1025"),
        (("--workload", "poems"), "poems"),
    ):
        code, _, err = run("trace", "synth", "--out", tmp_path / "a", *flags)
        assert code == 2 and words in err
    assert not list(tmp_path.iterdir())


def test_record_json_lines(tmp_path: Path, run: Run) -> None:
    prompts = tmp_path / "prompts.jsonl"
    entries = [
        {"prompt": "What is 2 + 3?", "id": "sum", "workload": "math"},
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"prompt_ids": [20, 21, 22], "id": 7},
        {"prompt": "never reached"},
    ]
    prompts.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    out = tmp_path / "a.trace.safetensors"
    flags = ("--workload", "other", "--limit", 3, "--gate-scores", "--no-token-ids")
    code, said, err = run(
        "trace", "record", "demo", "--prompts", prompts, "--out", out, *flags, *SHORT
    )
    assert (code, err) == (0, "") and "3: 1 math, 2 other" in said
    trace = load_trace(out)
    assert [request.id for request in trace.requests] == ["sum", "1", "7"]
    assert trace.requests[2].num_prompt_tokens == 3
    assert trace.gate_scores is not None and trace.token_ids is None
    assert trace.model_name == "demo"


def test_record_plain_text_and_raw(tmp_path: Path, run: Run) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is 2 + 3?\n\nWhat is 4 + 4?\n")
    lengths = []
    for flags in ((), ("--raw",)):
        out = tmp_path / f"a{len(flags)}"
        command = ("trace", "record", "demo", "--prompts", prompts, "--out", out)
        code, said, _ = run(*command, *flags, *SHORT, "--json")
        assert code == 0 and json.loads(said)["num_requests"] == 2
        trace = load_trace(tmp_path / f"a{len(flags)}.trace.safetensors")
        lengths.append(trace.requests[0].num_prompt_tokens)
    assert lengths[0] > lengths[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2: is no JSON"),
        ('{"prompt": "a"}\n\n[1]', "line 3: is no object"),
        ('{"text": "a"}', "line 1: has 'text'"),
        ('{"prompt": "a", "prompt_ids": [1]}', "line 1: has prompt and prompt_ids"),
        ('{"prompt": 3}', "line 1: prompt is 3"),
        ('{"prompt_ids": [1, "2"]}', "line 1: prompt_ids is"),
        ('{"messages": [{"role": "user"}]}', "line 1: messages is"),
        ('{"prompt": "a", "id": []}', "line 1: id is"),
    ],
)
def test_wrong_prompt_files_name_the_line(
    tmp_path: Path, run: Run, content: str, words: str
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text(content)
    code, _, err = run("trace", "record", "demo", "--prompts", prompts, "--out", tmp_path / "a")
    assert code == 2 and words in err and str(prompts) in err
    assert [file.name for file in tmp_path.iterdir()] == ["prompts"]


def test_prompt_files_that_cannot_be_read(tmp_path: Path, run: Run) -> None:
    latin = tmp_path / "latin"
    latin.write_bytes(b"\xe9")
    for file, words in ((latin, "UTF-8"), (tmp_path / "none", "cannot be read")):
        code, _, err = run("trace", "record", "demo", "--prompts", file, "--out", tmp_path / "a")
        assert code == 2 and words in err


def test_prompts_behind_a_byte_order_mark_and_with_odd_line_ends(tmp_path: Path) -> None:
    from oled_moe.cli_shared import read_prompt_lines

    path = tmp_path / "prompts"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\n{"prompt": "c"}\n'.encode())
    is_json, lines = read_prompt_lines(path)
    assert is_json and [line for _, line in lines] == ['{"prompt": "a\u2028b"}', '{"prompt": "c"}']
    assert lines[1][0].endswith("line 3")


def test_alone_it_says_what_there_is_like_the_program_itself(run: Run) -> None:
    code, out, err = run("trace")
    assert (code, err) == (0, "") and out == run("trace", "--help")[1]
    assert "Record routing, look at it, make it up." in run("--help")[1]
