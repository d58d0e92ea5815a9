"""Order, statistics, comparison of tokens, and the page, on engines that only pretend to run."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import oled_moe.bench
from oled_moe.bench import (
    RATIO_METRICS,
    ROUND_METRICS,
    BenchReport,
    interleaved_order,
    looks_like_waiting,
    median_interval,
    run_bench,
)
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_PROFILE
from oled_moe.engine import GenerationResult, StepEvent
from oled_moe.errors import ConfigError, InputError, OledMoeError
from oled_moe.memory import MemoryPlan, ModelMemory
from oled_moe.metrics import GenerationStats
from oled_moe.report import render_report
from oled_moe.types import MoeShape

SHAPE = MoeShape(num_layers=2, num_experts=8, top_k=2, expert_bytes=1000)
MODEL = ModelMemory(
    process_bytes=10_000,
    dense_bytes=500,
    kv_bytes=0,
    activation_bytes=0,
    buffer_bytes=0,
    host_expert_bytes=0,
)
POLICIES = ("naive-lru", "lfu", "oled")
PROMPTS = ((1, 2, 3), (4, 5))
WARMUP = ((9,),)
CPU = EngineConfig(experts_per_layer=4)


def stats_of(**values: float) -> GenerationStats:
    zero: dict[str, Any] = dict.fromkeys(GenerationStats.__dataclass_fields__, 0)
    return GenerationStats(
        **{**zero, "num_denoise_forwards": 2, "num_commit_forwards": 1, **values}
    )


class World:
    """What happens to all fake engines: a log of what they were asked, and how they behave."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, tuple[int, ...]]] = []
        self.open: list[FakeEngine] = []
        self.num_opened = 0
        self.most_open = 0
        self.slots_of: Callable[[EngineConfig], int] = lambda config: round(
            2 * (config.experts_per_layer or 4)
        )
        self.tokens_of: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda policy, ids: (
            *ids,
            7,
            8,
            9,
        )
        self.stats_of: Callable[[str, int], GenerationStats] = lambda policy, turn: stats_of(
            ttft_s=0.5, tpot_s=0.25, hit_rate=0.5, expert_loads=3, bytes_loaded=3000
        )
        self.fails: Callable[[str, tuple[int, ...]], bool] = lambda policy, ids: False

    def asked(self, kind: str = "stream") -> list[tuple[str, tuple[int, ...]]]:
        return [(policy, ids) for what, policy, ids in self.log if what == kind]


class FakeEngine:
    """Answers at once: two steps fill the first block of four, one the second."""

    tokenizer = None
    sampling_defaults = SamplingParams(mask_token_id=99)
    hardware = DEFAULT_PROFILE
    hardware_source = "given"
    dtype = torch.float32
    dtype_words = "float32"
    lossy = None
    low_form = None

    def __init__(self, world: World, config: EngineConfig) -> None:
        self.world, self.config = world, config
        self.policy_name = str(config.policy)
        self.memory_plan = MemoryPlan(MODEL, SHAPE, world.slots_of(config), 2)
        self.num_answers = 0
        world.open.append(self)
        world.num_opened += 1
        world.most_open = max(world.most_open, len(world.open))

    def close(self) -> None:
        self.world.open.remove(self)

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> GenerationResult:
        self.world.log.append(("generate", self.policy_name, tuple(prompt)))
        return self._result(tuple(prompt))

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[StepEvent]:
        if not prompt:
            raise InputError("the prompt is empty")
        return self._events(tuple(prompt))

    def _events(self, ids: tuple[int, ...]) -> Iterator[StepEvent]:
        self.world.log.append(("stream", self.policy_name, ids))
        if self.world.fails(self.policy_name, ids):
            raise OledMoeError("the disk is gone")
        block = (0, 0, 0, 0)
        full, empty = (False,) * 4, (True,) * 4
        yield StepEvent(0, 0, 0, block, empty, (), False, None, (), (), None)
        yield StepEvent(0, 1, 0, block, full, (), True, None, (), (), None)
        yield StepEvent(1, 0, 4, block, full, (), True, None, (), (), self._result(ids))

    def _result(self, ids: tuple[int, ...]) -> GenerationResult:
        tokens = self.world.tokens_of(self.policy_name, ids)
        self.num_answers += 1
        stats = self.world.stats_of(self.policy_name, self.num_answers)
        return GenerationResult(None, list(tokens), "length", stats, [1.0] * len(tokens))


@pytest.fixture
def world() -> World:
    return World()


def run(world: World, config: EngineConfig = CPU, **options: Any) -> BenchReport:
    given: dict[str, Any] = {"policies": POLICIES, "prompts": PROMPTS, "warmup": WARMUP}
    given.update(options)
    return run_bench(
        "some/model",
        given.pop("policies"),
        config,
        SamplingParams(),
        given.pop("prompts"),
        open_engine=lambda wanted: FakeEngine(world, wanted),
        **given,
    )


# Statistics


@pytest.mark.parametrize("num", range(1, 12))
def test_intervals_cover_what_counting_all_patterns_says(num: int) -> None:
    interval = median_interval([float(i) for i in range(num)], level=0.95)
    # Each value is above or below the true median with equal chance; count the patterns that put
    # it between the two order statistics.
    low, high = int(interval.low), int(interval.high)
    assert low == num - 1 - high
    patterns = itertools.product((0, 1), repeat=num)
    num_inside = sum(low + 1 <= sum(pattern) <= high for pattern in patterns)
    assert interval.level == pytest.approx(num_inside / 2**num)
    narrower = sum(
        low + 2 <= sum(pattern) <= high - 1 for pattern in itertools.product((0, 1), repeat=num)
    )
    assert interval.level >= 0.95 or low == 0
    assert narrower / 2**num < 0.95


def test_five_repetitions_give_their_range_at_its_true_level() -> None:
    interval = median_interval([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (interval.median, interval.low, interval.high) == (3.0, 1.0, 5.0)
    assert interval.level == 0.9375
    assert median_interval([2.0]).level == 0
    assert 0.95 <= median_interval([float(i) for i in range(1000)]).level < 0.96


def test_waiting_for_a_core_is_told_from_work() -> None:
    steady = {(0, i): [0.010 + 0.001 * i] * 5 for i in range(4)}
    assert not looks_like_waiting(steady)
    # The same work takes a tenth of a millisecond, or eight.
    assert looks_like_waiting({(0, i): [1e-4, 8e-3, 8e-3, 8e-3, 8e-3] for i in range(4)})
    # Steps that differ from one another are work, and rare waits do not make a median.
    assert not looks_like_waiting({(0, 0): [1e-4] * 5, (0, 1): [0.5] * 5})
    assert not looks_like_waiting({(0, i): [1e-4, 1e-4, 1e-4, 8e-3, 8e-3] for i in range(4)})
    assert not looks_like_waiting({})


# Order


@pytest.mark.parametrize("num_cases", [1, 2, 3, 4, 7])
def test_order_favours_no_case(num_cases: int) -> None:
    order = interleaved_order(num_cases, 8, seed=3)
    assert all(sorted(row) == list(range(num_cases)) for row in order)
    for first, second in zip(order[::2], order[1::2], strict=True):
        for case in range(num_cases):
            assert first.index(case) + second.index(case) == num_cases - 1
    assert order == interleaved_order(num_cases, 8, seed=3)


def test_order_depends_on_the_seed() -> None:
    assert len({str(interleaved_order(5, 2, seed=seed)) for seed in range(20)}) > 10


def test_every_policy_runs_before_the_next_repetition(world: World) -> None:
    report = run(world, seed=1)
    asked = world.asked()
    size = len(POLICIES) * len(PROMPTS)
    assert len(asked) == 5 * size
    for repetition in range(5):
        part = asked[repetition * size : (repetition + 1) * size]
        row = [policy for policy, _ in part[:: len(PROMPTS)]]
        assert sorted(row) == sorted(POLICIES)
        assert row == report.setup["order"][repetition]
        assert [ids for _, ids in part] == list(PROMPTS) * len(POLICIES)


def test_warm_up_is_not_measured(world: World) -> None:
    report = run(world, warmup=((9,), (8,)))
    assert world.asked("generate") == [(p, ids) for p in POLICIES for ids in ((9,), (8,))]
    assert all(len(result.answers) == 5 * len(PROMPTS) for result in report.results)
    assert report.setup["warmup"]["is_disjoint"] is True
    again = run(World(), warmup=PROMPTS[:1]).setup["warmup"]
    assert again["is_disjoint"] is False and "share prompts" in again["words"]


# Engines


def test_engines_that_fit_together_stay_open(world: World) -> None:
    report = run(world)
    assert (world.num_opened, world.most_open, world.open) == (3, 3, [])
    assert report.setup["keeps_engines"] and "caches carry over" in report.setup["engines"]


def test_engines_that_do_not_fit_are_opened_in_turn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each takes 500 bytes and ten slots of 1,000.
    monkeypatch.setattr(oled_moe.bench, "usable_memory_bytes", lambda: 3 * 10_500 - 1)
    report = run(world)
    assert (world.most_open, world.open) == (1, [])
    assert world.num_opened == 1 + 5 * 3
    assert len(world.asked("generate")) == 5 * 3
    assert "opened anew, with empty caches" in report.setup["engines"]
    assert "each time" in report.setup["warmup"]["words"]
    monkeypatch.setattr(oled_moe.bench, "usable_memory_bytes", lambda: 3 * 10_500)
    assert run(world).setup["keeps_engines"]


def test_policies_get_the_same_slots(world: World) -> None:
    world.slots_of = lambda config: 9 if config.policy == "lfu" else 8
    with pytest.raises(OledMoeError, match="lfu got 9 slots"):
        run(world)
    assert world.open == []


def test_a_budget_for_everything_becomes_one_for_experts(world: World) -> None:
    seen: list[EngineConfig] = []

    def slots(config: EngineConfig) -> int:
        seen.append(config)
        return 8

    world.slots_of = slots
    run(world, EngineConfig(memory="1GiB"))
    assert seen[0].memory == "1GiB"
    assert [(c.memory, c.expert_memory) for c in seen[1:]] == [(None, 10_000)] * 2


def test_capacities_are_compared_with_their_own_baseline(world: World) -> None:
    report = run(world, policies=("lfu", "oled"), capacities=(2, 4)).to_dict()
    assert [(c["label"], c["baseline"], c["num_slots"]) for c in report["cases"]] == [
        ("lfu @ 2", "lfu @ 2", 4),
        ("oled @ 2", "lfu @ 2", 4),
        ("lfu @ 4", "lfu @ 4", 8),
        ("oled @ 4", "lfu @ 4", 8),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policies": ("lfu", "lfu")}, "twice"),
        ({"policies": ()}, "empty"),
        ({"policies": ("lfu", "nope")}, "nope"),
        ({"policies": ("lfu", "belady")}, "simulate"),
        ({"prompts": ()}, "empty"),
        ({"prompts": ((1,), ())}, "empty"),
        ({"repetitions": 4}, "--quick"),
        ({"repetitions": 0, "is_quick": True}, "repetitions is 0"),
        ({"capacities": (-1,)}, "capacities"),
    ],
)
def test_bad_requests_end_before_anything_runs(
    world: World, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, InputError), match=words):
        run(world, **options)
    assert world.asked() == [] and world.open == []


def test_quick_runs_are_marked(world: World) -> None:
    report = run(world, repetitions=2, is_quick=True).to_dict()
    assert report["meets_rule"] is False
    assert any("Quick run" in remark for remark in report["notes"])
    assert run(World()).to_dict()["meets_rule"] is True


# Tokens


def test_other_tokens_fail_where_they_must_be_the_same(world: World) -> None:
    assert not run(world).is_failed
    world.tokens_of = lambda policy, ids: (1, 2, 4) if (policy, ids) == ("oled", (4, 5)) else (1, 2)
    report = run(world)
    assert report.is_failed and report.tokens.must_agree
    assert report.tokens.difference == "oled, prompt 1, token 2"
    assert report.tokens.agreement == {"naive-lru": 1, "lfu": 1, "oled": 0.5}


def test_other_tokens_are_allowed_where_experts_run_on_the_cpu(world: World) -> None:
    world.tokens_of = lambda policy, ids: (1, 3) if policy == "oled" else (1, 2)
    emulated = replace(CPU, device="emulated")
    report = run(world, emulated)
    assert not report.is_failed and report.tokens.difference == "oled, prompt 0, token 1"
    assert any("rounds otherwise" in remark for remark in report.to_dict()["notes"])
    assert run(world, replace(emulated, cpu_experts=False)).is_failed


def test_tokens_that_change_between_repetitions_fail_too(world: World) -> None:
    turn = itertools.count()
    world.tokens_of = lambda policy, ids: (next(turn),)
    assert run(world, policies=("lfu",)).is_failed


def test_failed_requests_are_counted_and_left_out(world: World) -> None:
    world.fails = lambda policy, ids: (policy, ids) == ("lfu", (4, 5))
    report = run(world)
    lru, lfu, _ = report.to_dict()["cases"]
    assert report.is_failed and not report.tokens.is_failed
    assert (lru["completed"], lru["failed"]) == (10, 0)
    assert (lfu["completed"], lfu["failed"]) == (5, 5)
    assert lfu["errors"].count("the disk is gone") == 5 and lfu["errors"].count("") == 5
    world.fails = lambda policy, ids: policy == "lfu"
    values = run(world).to_dict()
    assert values["cases"][1]["medians"]["tpot_s"] is None
    assert "no answer" in render_report(values)


# The report


def test_ratios_are_paired_within_a_repetition(world: World) -> None:
    # The machine gets slower all the time, the second policy always takes twice as long.
    def stats(policy: str, turn: int) -> GenerationStats:
        tpot_s = 1.5**turn * (2 if policy == "lfu" else 1)
        return stats_of(tpot_s=tpot_s, hit_rate=0.5)

    world.stats_of = stats
    report = run(world, policies=("naive-lru", "lfu"), prompts=((1,),), warmup=())
    case = report.to_dict()["cases"][1]
    ratio = case["ratios"]["tpot_s"]
    assert ratio["values"] == pytest.approx([2.0] * 5)
    assert ratio["low"] == pytest.approx(ratio["high"]) == pytest.approx(2.0)
    assert case["medians"]["tpot_s"]["high"] > 4 * case["medians"]["tpot_s"]["low"]
    # Nothing was loaded, so there is nothing to compare with.
    assert case["ratios"]["bytes_loaded"] is None


def test_time_after_the_first_block_counts_its_tokens_out(world: World) -> None:
    report = run(world, prompts=((1, 2, 3),))
    for answer in report.results[0].answers:
        # A block of four holds three tokens of the prompt and one of the answer's six.
        assert (answer.num_prompt_tokens, answer.num_first_block_tokens) == (3, 1)
        expected = (answer.e2e_s - answer.first_block_s) / 5
        assert answer.tpot_after_first_block_s == pytest.approx(expected)
        assert len(answer.block_s) == 1 and len(answer.step_s) == 3
        assert answer.num_canvas_tokens == 8
        assert math.isclose(sum(answer.step_s), answer.e2e_s)


def test_json_has_the_names_of_server_benchmarks(world: World) -> None:
    values = json.loads(json.dumps(run(world).to_dict()))
    for case in values["cases"]:
        for name in (
            "completed failed duration total_input_tokens total_output_tokens request_throughput "
            "output_throughput total_token_throughput ttfts input_lens output_lens errors nfe tpf "
            "fps tps bytes_by_tier peak_expert_bytes num_slots num_staging is_waiting"
        ).split():
            assert name in case
        for measured in (
            "ttft_ms",
            "tpot_ms",
            "e2el_ms",
            "time_to_first_block_ms",
            "time_to_first_frame_ms",
        ):
            for key in ("mean", "median", "std", "p50", "p90", "p95", "p99"):
                assert f"{key}_{measured}" in case
        assert set(case["medians"]) == set(ROUND_METRICS)
        assert set(case["ratios"]) == set(RATIO_METRICS)
        assert (case["total_input_tokens"], case["total_output_tokens"]) == (5 * 5, 5 * 11)
        assert case["nfe"] == 10 * 3 and case["tpf"] == pytest.approx(5 * 11 / 30)
        assert case["median_ttft_ms"] == 500 and case["mean_tpot_ms"] == 250
        assert case["bytes_by_tier"] == [{"src": "disk", "dst": "ram", "bytes": 30_000}]
        assert not [name for name in case if "itl" in name]
    for name in (
        "model device is_emulated seed warmup repetitions meets_rule order config decoding "
        "hardware load_average_before load_average_after is_idle environment versions "
        "git_revision peak_process_bytes notes tokens plan"
    ).split():
        assert name in values
    assert any("no ITL" in remark for remark in values["notes"])


def test_rows_say_where_they_come_from(world: World) -> None:
    rows = [json.loads(json.dumps(row)) for row in run(world).rows()]
    assert len(rows) == 5 * len(POLICIES)
    assert {(row["policy"], row["repetition"]) for row in rows} == set(
        itertools.product(POLICIES, range(5))
    )
    assert {"versions", "seed", "hardware", "config", "git_revision", *ROUND_METRICS} <= set(
        rows[0]
    )


def page_of(world: World, **options: Any) -> tuple[str, ElementTree.Element]:
    page = render_report({**run(world, **options).to_dict(), "prompts": "two prompts"})
    return page, ElementTree.fromstring(page)


def test_page_needs_nothing_else(world: World) -> None:
    page, root = page_of(world)
    assert not re.findall(r"<(script|link|img|iframe|object)|@import|url\(", page)
    addresses = set(re.findall(r"https?://[^\"' ]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in page
    svgs = [e for e in root.iter("{http://www.w3.org/2000/svg}svg") if e.get("role") == "img"]
    assert len(svgs) == 6
    for svg in svgs:
        names = [child.tag.rpartition("}")[2] for child in svg]
        assert names[:2] == ["title", "desc"] and all(child.text for child in svg[:2])


def test_plots_stay_within_their_frames(world: World) -> None:
    def stats(policy: str, turn: int) -> GenerationStats:
        share = {"naive-lru": 0.0, "lfu": 1.0, "oled": 0.5}[policy]
        return stats_of(tpot_s=0.001 * 10**turn, ttft_s=0.0, hit_rate=share)

    world.stats_of = stats
    _, root = page_of(world)
    for svg in root.iter("{http://www.w3.org/2000/svg}svg"):
        left, top, width, height = map(float, svg.get("viewBox", "").split())
        for each in svg.iter():
            for name, start, size in (("x", left, width), ("y", top, height)):
                for end in ("", "1", "2"):
                    if (text := each.get(name + end)) is not None:
                        assert start <= float(text) <= start + size
            for x, y in re.findall(r"M(-?[\d.]+) (-?[\d.]+)", each.get("d", "")):
                assert left <= float(x) <= left + width and top <= float(y) <= top + height
            if each.get("width") is not None:
                assert 0 <= float(each.get("x", 0)) + float(each.get("width", 0)) <= width


def test_page_escapes_what_users_wrote(world: World) -> None:
    evil = '<script>alert("x")</script>&'
    values = run(world).to_dict()
    values["model"] = values["prompts"] = evil
    values["hardware"] = {"name": evil, "source": evil}
    values["notes"] = [evil]
    values["tokens"] = {**values["tokens"], "difference": evil, "is_failed": True}
    for case in values["cases"]:
        case["label"] = case["policy"] = case["baseline"] = evil
    page = render_report(values)
    assert "<script" not in page and "&lt;script&gt;" in page
    ElementTree.fromstring(page)


def test_page_says_emulated_and_what_failed(world: World) -> None:
    world.tokens_of = lambda policy, ids: (len(policy),)
    report = run(world, replace(CPU, device="emulated", cpu_experts=False))
    page = render_report(report.to_dict())
    assert "device emulated (a device simulated on this CPU" in page and "different tokens" in page
    assert "93.75 %" in page


def test_page_can_be_drawn_from_the_stored_json(world: World) -> None:
    values = run(world).to_dict()
    assert render_report(json.loads(json.dumps(values))) == render_report(values)
