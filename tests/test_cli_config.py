"""Flags from a file, and which of several places for one won."""

import json
import os
from pathlib import Path

import pytest

from oled_moe.cli import main

TOML = """
model = "demo"
threads = 3
expert-memory = "25%"
[serve]
port = 8123
no-cpu-experts = true
threads = 2
[trace.synth]
preset = "llada2-mini"
"""


def settings(
    capsys: pytest.CaptureFixture[str], *words: str | Path
) -> dict[str, tuple[object, str]]:
    """What `config show` says: value and source by flag."""
    assert main(["config", "show", *map(str, words), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    return {flag: (entry["value"], entry["source"]) for flag, entry in shown.items()}


def written(folder: Path, text: str, name: str = "some.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_flag_then_environment_then_file_then_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, TOML)
    found = settings(capsys, "serve", "--config", path)
    assert found["model"] == ("demo", "config file")
    assert found["threads"] == (2, "config file"), "a command's own table wins"
    assert found["port"] == (8123, "config file")
    assert found["no-cpu-experts"] == (True, "config file")
    assert found["host"] == ("127.0.0.1", "default")
    monkeypatch.setenv("OLED_MOE_PORT", "8200")
    monkeypatch.setenv("OLED_MOE_CONFIG", str(path))
    monkeypatch.setenv("OLED_MOE_API_KEY", "not to be seen")
    found = settings(capsys, "serve", "other", "--threads", "1")
    assert found["model"] == ("other", "command line")
    assert found["threads"] == (1, "command line")
    assert found["port"] == (8200, "OLED_MOE_PORT")
    assert found["api-key"] == ("(hidden)", "OLED_MOE_API_KEY")
    assert settings(capsys, "generate")["threads"] == (3, "config file")
    assert settings(capsys, "trace", "synth")["preset"] == ("llada2-mini", "config file")
    assert "threads" not in settings(capsys, "version"), "a command without the flag leaves it"
    assert main(["config", "show", "serve"]) == 0
    assert "port            8200  (OLED_MOE_PORT)" in capsys.readouterr().out


def test_a_run_takes_what_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        'model: demo\nexpert_memory: 25%\ngenerate:\n  prompt: "What is 12 + 30?"\n  quiet: true\n'
    )
    path = written(tmp_path, text, "run.yaml")
    assert main(["generate", "--config", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "42" in answer["text"]


def test_a_table_takes_the_place_of_what_excludes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, 'memory = "1GiB"\n[serve]\nexperts-per-layer = 24\n')
    found = settings(capsys, "serve", "demo", "--config", path)
    assert found["experts-per-layer"] == (24, "config file") and "memory" not in found
    assert settings(capsys, "generate", "--config", path)["memory"] == ("1GiB", "config file")


def test_keys_of_sglang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "threshold: 0.9\nblock_size: 32\nedit_threshold: 0.5\nmax_post_edit_steps: 4\n"
    path = written(tmp_path, text + "penalty_lambda: 0\n", "sglang.yml")
    found = settings(capsys, "generate", "--config", path)
    for flag, value in {"threshold": 0.9, "block-length": 32, "edit-threshold": 0.5}.items():
        assert found[flag] == (value, "config file")
    assert found["max-post-edit-steps"] == (4, "config file")


def test_flags_that_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is given takes the place of another from a weaker place."""
    path = written(tmp_path, 'memory = "1B"\nthreshold = 0.9\n')
    asked = ["generate", "demo", "-p", "What is 12 + 30?", "--config", str(path)]
    assert main(asked) == 4
    assert main([*asked, "--experts-per-layer", "24"]) == 0
    monkeypatch.setenv("OLED_MOE_EXPERTS_PER_LAYER", "24")
    assert main([*asked, "--algorithm", "factor", "--factor", "1"]) == 0
    assert "threshold 0.9" not in capsys.readouterr().err.rsplit("decoding", 1)[-1]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "thread = 1", "thread is no flag; did you mean threads?"),
        ("a.toml", "[serv]\nport = 1", "table serv is no command; did you mean serve?"),
        ("a.toml", "[serve]\npreset = 'x'", "serve.preset is no flag"),
        ("a.toml", "[trace]\npreset = 'x'", "trace.preset is no table"),
        ("a.toml", "threads = 1\nthreads = 2", "Cannot overwrite a value"),
        ("a.toml", "config = 'b.toml'", "config cannot be set in a file"),
        ("a.toml", "json = true", "json cannot be set in a file; give --json"),
        ("a.toml", "quiet = 'yes'", "quiet is 'yes'; allowed: true or false"),
        ("a.toml", "threads = true", "threads is True; allowed: text or a number"),
        ("a.yaml", "threads:", "threads is None; allowed: text or a number"),
        ("a.yaml", "penalty_lambda: 0.5", "penalty_lambda is no flag"),
        ("a.yaml", "- threads", "holds no keys with values"),
        ("a.yaml", "threads: [", "mend the file"),
        ("a.yaml", "[" * 5000, "mend the file"),
        ("a.yaml", "threads: 1\nthreads: 2", "line 2: threads comes twice"),
        ("a.yaml", "block_size: 8\nblock-length: 16", "block_size and block-length are one flag"),
        ("a.yaml", "generate:\n  threads: {a: 1}", "threads is a table; allowed: text or a number"),
        ("a.yaml", "!!map [a]", "mend the file"),
        ("a.yaml", "quiet: !!bool perhaps", "not what its tag says"),
        ("a.yaml", "threads: !!timestamp x", "not what its tag says"),
        ("a.yaml", "stop: &a [*a]", "stop is a list; allowed: text or a number"),
        ("a.yaml", "stop-token-ids: [1, [2]]", "stop-token-ids is a list; allowed"),
        ("a.yaml", "quiet: [true]", "quiet is a list; allowed: true or false"),
        ("a.ini", "threads = 1", "ends in .toml, .yaml or .yml"),
        ("a.toml", "threads = 'x'", "Invalid value for '--threads'"),
        ("a.toml", "threads = 'x'", "(in the config file)"),
    ],
)
def test_wrong_files_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    path = written(tmp_path, text, name)
    assert main(["generate", "demo", "-p", "x", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error and "unexpected" not in error


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    (tmp_path / "folder.toml").mkdir()
    for path in (tmp_path / "none.toml", tmp_path, tmp_path / "folder.toml", pipe):
        assert main(["generate", "demo", "-p", "x", "--config", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["api-key: unseen: x", 'api-key: "unseen', "api-key: [unseen, [unseen]]"]
)
def test_keys_are_in_no_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = written(tmp_path, f"serve:\n  {text}\n", "a.yaml")
    assert main(["config", "show", "serve", "--config", str(path)]) == 2
    assert "unseen" not in capsys.readouterr().err


def test_show_leaves_out_what_has_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "memory = '4GiB'\nalgorithm = 'factor'\nfactor = 2\n")
    asked = ("serve", "demo", "--config", path)
    assert {"memory", "factor"} <= settings(capsys, *asked).keys()
    found = settings(capsys, *asked, "--expert-memory", "25%", "--algorithm", "threshold")
    assert not {"memory", "factor"} & found.keys()


def test_show_of_a_command_without_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "version"]) == 0
    assert "no settings" in capsys.readouterr().out
    assert main(["config", "show", "trace"]) == 2
    assert "'trace' is no command; allowed: demo" in capsys.readouterr().err


def test_show_of_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "nope"]) == 2
    assert "'nope' is no command; allowed: demo, generate" in capsys.readouterr().err
    assert main(["config", "show"]) == 0
    assert "config show serve --config" in " ".join(capsys.readouterr().out.split())
