"""`oled-moe simulate` as people and scripts use it."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from replays import random_trace

from oled_moe import gantt
from oled_moe.cli import main
from oled_moe.costs import DEFAULT_PROFILE
from oled_moe.hardware import hardware_names, load_hardware
from oled_moe.policies import POLICIES
from oled_moe.simulator import simulate
from oled_moe.traces import save_trace

REQUIRED_KEYS = {
    "expert_cache_utilization",
    "hit_rate",
    "pooled_utilization",
    "pooled_hit_rate",
    "num_forwards",
    "tpot_s",
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run_main(*arguments: object) -> tuple[int, str, str]:
        code = main(["simulate", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, out, err

    return run_main


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "tiny.trace.safetensors"
    save_trace(random_trace(1, num_forwards=30, num_requests=3, num_experts=8), path)
    return path


def test_one_run_is_one_flat_object(run: Run, trace: Path) -> None:
    code, out, err = run(
        trace, "--policy", "lfu", "--experts-per-layer", 3, "--no-cpu-experts", "--json"
    )
    values = json.loads(out)
    assert code == 0 and err == ""
    assert values.keys() >= REQUIRED_KEYS
    assert not any(isinstance(value, dict | list) for value in values.values())
    assert (values["policy"], values["experts_per_layer"]) == ("lfu", 3)
    assert values["trace"] == "tiny.trace.safetensors" and len(values["trace_hash"]) == 64
    assert values["hardware"] == "testbed-a" and values["has_cpu_experts"] is False


def test_the_command_line_is_the_function(run: Run, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(DEFAULT_PROFILE.to_json())
    _, out, _ = run(
        trace,
        *("--policy", "oled", "--experts-per-layer", 2.5, "--hardware", path),
        *("--staging", 3, "--warmup-requests", 1, "--json"),
    )
    report = simulate(
        random_trace(1, num_forwards=30, num_requests=3, num_experts=8),
        "oled",
        hardware=DEFAULT_PROFILE,
        experts_per_layer=2.5,
        num_staging=3,
        warmup_requests=1,
    )
    values = json.loads(out)
    assert values == {
        **report.to_dict(),
        "trace": values["trace"],
        "trace_hash": values["trace_hash"],
    }


def test_several_runs_are_a_list(run: Run, trace: Path) -> None:
    _, out, _ = run(
        trace, "--policy", "lfu", "--policy", "belady", "--experts-per-layer", "1,2", "--json"
    )
    results = json.loads(out)["results"]
    pairs = [(result["policy"], result["experts_per_layer"]) for result in results]
    assert pairs == [("lfu", 1), ("lfu", 2), ("belady", 1), ("belady", 2)]
    _, again, _ = run(
        trace,
        *("--policy", "lfu", "--policy", "belady"),
        *("--experts-per-layer", 1, "--experts-per-layer", 2, "--json"),
    )
    assert again == out


def test_a_table_says_where_numbers_come_from(run: Run, trace: Path) -> None:
    code, out, _ = run(trace, "--policy", "lfu", "--policy", "oracle", "--experts-per-layer", 3)
    assert code == 0
    assert "simulated on  testbed-a (from data sheets, not measured" in out
    assert "tiny.trace.safetensors, synthetic, sha256" in out
    assert "lfu" in out and "oracle" in out


def test_a_quarter_of_the_experts_where_nothing_is_asked(run: Run, trace: Path) -> None:
    _, out, _ = run(trace, "--json")
    values = json.loads(out)
    # 16 experts: 4 slots and staging together.
    assert values["policy"] == "oled"
    assert values["num_slots"] + values["num_staging"] == 4
    _, out, _ = run(trace, "--expert-memory", "100%", "--json")
    assert json.loads(out)["num_slots"] == 16


def test_the_best_interval_is_found(run: Run, trace: Path) -> None:
    arguments = ("--policy", "tide:interval=best", "--experts-per-layer", 2)
    _, out, _ = run(trace, *arguments, "--json")
    values = json.loads(out)
    times = values["tpot_s_by_interval"]
    assert {"1", "2", str(values["interval"])} <= times.keys()
    assert values["tpot_s"] == min(times.values()) == times[str(values["interval"])]
    assert values["policy"] == f"tide:interval={values['interval']}"
    _, out, _ = run(trace, *arguments)
    assert f"Best interval {values['interval']}: " in out


def test_list_names_every_policy(run: Run) -> None:
    code, out, _ = run("--list", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)["policies"]}
    assert code == 0 and list(entries) == list(POLICIES)
    assert entries["belady"]["is_clairvoyant"] and not entries["oled"]["is_clairvoyant"]
    assert "prefill" in entries["oled"]["parameters"]
    _, out, _ = run("--list")
    for name, entry in POLICIES.items():
        assert name in out and entry.summary in out and entry.source in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--policy", "best-ever"), 2, "known: "),
        (("--policy", "lfu:speed=3"), 2, "no parameter 'speed'"),
        (("--experts-per-layer", 9), 2, "allowed: 0 to 8"),
        (("--experts-per-layer", "many"), 2, "write a number"),
        (("--experts-per-layer", "nan"), 2, "allowed: 0 to 8"),
        (("--experts-per-layer", 1, "--expert-memory", "50%"), 2, "give one of them"),
        (("--expert-memory", "1"), 4, "raise it to 1000B"),
        (("--hardware", "abacus"), 3, "known: h200"),
        (("--staging", -1), 2, "num_staging"),
        (("--warmup-requests", 3), 2, "0 to 2"),
        (("--forward", 1), 2, "give --gantt"),
        (("--gantt", "x.svg", "--experts-per-layer", "1,2"), 2, "one run"),
        (("--gantt", "x.svg", "--forward", 99), 2, "0 to 29"),
        (("--gantt", "/no/such/folder/x.svg"), 1, "cannot be written"),
    ],
)
def test_errors_say_what_to_do(
    run: Run, trace: Path, arguments: tuple[object, ...], code: int, words: str
) -> None:
    got, out, err = run(trace, *arguments)
    assert (got, out) == (code, "")
    assert words in err and err.count("\n") == 1 and err.startswith("error: ")


def test_a_trace_must_be_there_and_whole(run: Run, trace: Path, tmp_path: Path) -> None:
    assert run()[0] == 2
    assert run(tmp_path / "absent.trace.safetensors")[0] == 3
    broken = tmp_path / "broken.trace.safetensors"
    broken.write_bytes(trace.read_bytes()[:-100])
    code, out, err = run(broken, "--json")
    assert code == 2 and json.loads(out)["error"]["exit_code"] == 2
    assert err.count("\n") == 1


def test_gantt_is_a_picture_of_three_lanes(run: Run, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "lanes.svg"
    code, out, _ = run(trace, "--policy", "oled", "--experts-per-layer", 2, "--gantt", path)
    assert code == 0 and str(path) in out
    root = ElementTree.parse(path).getroot()
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"device", "copy lane", "CPU"} <= texts
    assert any("simulated on testbed-a" in (text or "") for text in texts)
    assert "prefers-color-scheme: dark" in path.read_text()
    width = float(root.attrib["width"])
    for bar in root.iter("{http://www.w3.org/2000/svg}rect"):
        left, size = float(bar.get("x", 0)), float(bar.attrib["width"])
        assert left >= 0 and size > 0 and left + size <= width


def test_every_kind_of_span_has_a_colour(trace: Path) -> None:
    kinds: set[str] = set()
    loaded = random_trace(1, num_forwards=30, num_requests=3, num_experts=8)
    for policy in POLICIES:
        report = simulate(
            loaded,
            policy,
            hardware=load_hardware("h200"),
            experts_per_layer=2,
            record_forward=20,
        )
        kinds |= {span.kind for span in report.spans}
        assert gantt.gantt_svg(report, 20).startswith("<svg")
    assert kinds <= set(gantt._KINDS)


def test_help_needs_no_numpy() -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from oled_moe.cli import main\n"
        "sys.exit(main(['simulate', '--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "--experts-per-layer" in done.stdout
    for name in hardware_names():
        assert name in done.stdout
