"""Policies side by side on the live engine: interleaved, warmed, repeated, with intervals.

Repetition r runs every case, one policy at one capacity, before repetition r + 1 starts; what
drifts on the machine meets all cases alike. Out comes one plain value, ready for JSON.
"""

import hashlib
import json
import math
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oled_moe import __version__
from oled_moe.config import (
    DecodingParams,
    EngineConfig,
    SamplingParams,
    check_int,
    check_real,
    format_size,
)
from oled_moe.costs import CostModel
from oled_moe.engine import Engine
from oled_moe.environment import Load, git_revision
from oled_moe.errors import ConfigError, OledMoeError
from oled_moe.inspection import package_versions, plan_to_dict
from oled_moe.machine import machine_facts, usable_memory_bytes
from oled_moe.memory import MemoryPlan
from oled_moe.metrics import GenerationStats, combine_stats
from oled_moe.policies import build_policy
from oled_moe.sizing import slots_of_layers, staging_beside

FORMAT_VERSION = 1
# Fewer repetitions say nothing about spread.
MIN_REPETITIONS = 5
MAX_REPETITIONS = 1000
INTERVAL_LEVEL = 0.95
# What one turn on a crowded core lasts at least.
_QUANTUM_S = 2e-3
_PERCENTILES = (50, 90, 95, 99)

# What is summed up per repetition, and compared with the first policy.
ROUND_METRICS = (
    "ttft_s",
    "tpot_s",
    "e2el_s",
    "output_throughput",
    "tokens_per_forward",
    "hit_rate",
    "expert_cache_utilization",
    "effective_transfer_ratio",
    "expert_loads",
    "bytes_loaded",
    "cpu_expert_runs",
    "policy_overhead",
    "choices_replaced",
    "replaced_share",
    "replaced_weight_share",
    "low_expert_runs",
    "low_expert_loads",
    "low_bytes_loaded",
)
# What every row repeats of the conditions it was measured under.
_ROW_FACTS = (
    "format_version",
    "model",
    "prompts_sha256",
    "device",
    "lossy",
    "low_precision",
    "git_revision",
    "versions",
    "seed",
    "warmup",
    "repetitions",
    "meets_rule",
    "config",
    "decoding",
    "hardware",
    "load_average_before",
    "load_average_after",
    "is_idle",
)
RATIO_METRICS = ("ttft_s", "tpot_s", "e2el_s", "output_throughput", "bytes_loaded")

Prompt = str | tuple[int, ...]
Prepare = Callable[[Engine, str, SamplingParams], tuple[str, SamplingParams]]
Say = Callable[[str], None]


# Statistics


@dataclass(frozen=True, slots=True)
class Interval:
    """A median between two order statistics, which hold the true median at `level`.

    `level` is the exact coverage for independent repetitions: 0.9375 for the range of five.
    """

    median: float
    low: float
    high: float
    level: float


def median_interval(values: Sequence[float], *, level: float = INTERVAL_LEVEL) -> Interval:
    """The narrowest symmetric pair of order statistics that covers `level`, else the range.

    Source: the sign test; the j-th smallest and j-th largest of n values miss the median with
    probability 2 * P(Binomial(n, 1/2) < j).
    """
    ordered, num = sorted(values), len(values)
    # Of 2**num equally likely patterns of above and below, how many put the median outside.
    rank, num_missing = 1, 2
    while 2 * (rank + 1) <= num:
        num_next = num_missing + 2 * math.comb(num, rank)
        if 1 - num_next / (1 << num) < level:
            break
        rank, num_missing = rank + 1, num_next
    coverage = max(0.0, 1 - num_missing / (1 << num))
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[num - rank], coverage)


def looks_like_waiting(step_s: Mapping[Any, Sequence[float]]) -> bool:
    """Whether median times have the shape of waiting for a turn on a core.

    `step_s`: for each step, which is the same work in every repetition, its times. True where the
    median step takes twice its own least time, and a scheduler's turn more than it.
    Units: seconds.
    """
    leasts = [min(times) for times in step_s.values() for _ in times]
    times = [value for each in step_s.values() for value in each]
    if len(times) < 2:
        return False
    excess = [value - least for value, least in zip(times, leasts, strict=True)]
    is_slow = statistics.median(times) > 2 * statistics.median(leasts)
    return is_slow and statistics.median(excess) > _QUANTUM_S


# What is measured


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One policy at one capacity; None is the capacity of the base configuration."""

    policy: str
    experts_per_layer: float | None = None

    @property
    def label(self) -> str:
        if self.experts_per_layer is None:
            return self.policy
        return f"{self.policy} @ {self.experts_per_layer:g}"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One measured answer; `stats` is None and `error` says why where there is none.

    `first_block_s` counts from the call, `num_first_block_tokens` are the answer's tokens by then.
    `num_canvas_tokens`: positions of all its blocks, whether they became part of the answer or not.
    `block_s` are the times from one finished block to the next, `step_s` those of the steps.
    Units: seconds.
    """

    prompt_id: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...] = ()
    e2e_s: float = 0.0
    first_block_s: float = 0.0
    num_first_block_tokens: int = 0
    num_canvas_tokens: int = 0
    block_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    stats: GenerationStats | None = None
    error: str = ""

    @property
    def tpot_after_first_block_s(self) -> float | None:
        """(t_last - t_first_block) / (tokens - first block); None where one block was all."""
        num_tokens = len(self.token_ids) - self.num_first_block_tokens
        return (self.e2e_s - self.first_block_s) / num_tokens if num_tokens > 0 else None


@dataclass(frozen=True, slots=True)
class BenchRound:
    """What one case did in one repetition."""

    repetition: int
    requests: tuple[BenchRequest, ...]

    @property
    def answers(self) -> list[BenchRequest]:
        return [request for request in self.requests if request.stats is not None]

    def values(self) -> dict[str, float]:
        """ROUND_METRICS over the answers; empty where every request failed."""
        answers = self.answers
        if not answers:
            return {}
        lengths = [len(answer.token_ids) for answer in answers]
        total = asdict(combine_stats([a.stats for a in answers if a.stats is not None], lengths))
        duration_s = sum(answer.e2e_s for answer in answers)
        total["e2el_s"] = duration_s / len(answers)
        total["output_throughput"] = _ratio(sum(lengths), duration_s)
        return {name: float(total[name]) for name in ROUND_METRICS}


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All repetitions of one case, in order, and the memory plan they ran under."""

    case: BenchCase
    plan: MemoryPlan
    rounds: tuple[BenchRound, ...]

    @property
    def requests(self) -> list[BenchRequest]:
        return [request for each in self.rounds for request in each.requests]

    @property
    def answers(self) -> list[BenchRequest]:
        return [answer for each in self.rounds for answer in each.answers]

    def series(self, name: str) -> list[float]:
        """One value for each repetition in which anything was answered."""
        return [values[name] for each in self.rounds if (values := each.values())]

    def paired_ratios(self, baseline: "CaseResult", name: str) -> list[float]:
        """This over the baseline, repetition by repetition, where the baseline is not 0."""
        pairs = zip(self.rounds, baseline.rounds, strict=True)
        both = [(mine.values(), theirs.values()) for mine, theirs in pairs]
        return [a[name] / b[name] for a, b in both if a and b and b[name]]

    def is_waiting(self) -> bool:
        """Whether its steps look like waiting for a turn on a core."""
        steps: dict[tuple[int, int], list[float]] = {}
        for answer in self.answers:
            for step_id, seconds in enumerate(answer.step_s):
                steps.setdefault((answer.prompt_id, step_id), []).append(seconds)
        return looks_like_waiting(steps)


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Whether the cases gave the same tokens as the first, and whether they had to.

    `agreement`: for each case the share of its answers that equal the reference's answer to the
    same prompt. `difference` names the first that does not.
    """

    must_agree: bool
    agreement: Mapping[str, float]
    difference: str | None

    @property
    def is_failed(self) -> bool:
        return self.must_agree and self.difference is not None


def check_tokens(results: Sequence[CaseResult], *, must_agree: bool) -> TokenCheck:
    """Compare every answer with the first one to its prompt."""
    reference: dict[int, tuple[int, ...]] = {}
    agreement, difference = {}, None
    for result in results:
        num_same = 0
        for answer in result.answers:
            expected = reference.setdefault(answer.prompt_id, answer.token_ids)
            if answer.token_ids == expected:
                num_same += 1
            elif difference is None:
                position = _first_difference(expected, answer.token_ids)
                difference = f"{result.case.label}, prompt {answer.prompt_id}, token {position}"
        agreement[result.case.label] = _ratio(num_same, len(result.answers))
    return TokenCheck(must_agree, agreement, difference)


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


# The report


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything that was found; `setup` is plain JSON values that hold for all cases."""

    setup: Mapping[str, Any]
    results: tuple[CaseResult, ...]
    tokens: TokenCheck

    @property
    def is_failed(self) -> bool:
        """Whether tokens differ that must not, or a request failed."""
        has_errors = any(request.error for result in self.results for request in result.requests)
        return self.tokens.is_failed or has_errors

    def baseline_of(self, result: CaseResult) -> CaseResult:
        """The first policy at the same capacity."""
        capacity = result.case.experts_per_layer
        return next(r for r in self.results if r.case.experts_per_layer == capacity)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under the names of server benchmarks (interfaces.md 1)."""
        cases = [
            _case_dict(result, self.baseline_of(result), str(self.setup["device"]))
            for result in self.results
        ]
        notes = [*self.setup["notes"], *_notes_on(self.results, self.tokens, self.setup)]
        tokens = {**asdict(self.tokens), "is_failed": self.tokens.is_failed}
        return {**self.setup, "notes": notes, "tokens": tokens, "cases": cases}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each repetition of each case, with where it comes from."""
        base = {"benchmark": "bench", **{name: self.setup[name] for name in _ROW_FACTS}}
        return [
            {
                **base,
                "policy": result.case.policy,
                "num_slots": result.plan.num_slots,
                "num_staging": result.plan.num_staging,
                "repetition": each.repetition,
                "failed": len(each.requests) - len(each.answers),
                **each.values(),
            }
            for result in self.results
            for each in result.rounds
        ]


def _case_dict(result: CaseResult, baseline: CaseResult, device: str) -> dict[str, Any]:
    answers, requests = result.answers, result.requests
    stats = [answer.stats for answer in answers if answer.stats is not None]
    duration_s = sum(answer.e2e_s for answer in answers)
    num_in = sum(answer.num_prompt_tokens for answer in answers)
    num_out = sum(len(answer.token_ids) for answer in answers)
    nfe = sum(each.num_denoise_forwards + each.num_commit_forwards for each in stats)
    loaded = sum(each.bytes_loaded for each in stats)
    held = max((each.max_resident_experts for each in stats), default=0)
    after_first = [a.tpot_after_first_block_s for a in answers]
    return {
        "label": result.case.label,
        "policy": result.case.policy,
        "experts_per_layer": result.plan.num_slots / result.plan.shape.num_layers,
        "num_slots": result.plan.num_slots,
        "num_staging": result.plan.num_staging,
        "completed": len(answers),
        "failed": len(requests) - len(answers),
        "duration": duration_s,
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": _ratio(len(answers), duration_s),
        "output_throughput": _ratio(num_out, duration_s),
        "total_token_throughput": _ratio(num_in + num_out, duration_s),
        "canvas_throughput": _ratio(sum(a.num_canvas_tokens for a in answers), duration_s),
        **_spread("ttft_ms", [each.ttft_s for each in stats]),
        **_spread("tpot_ms", [each.tpot_s for each in stats]),
        **_spread("e2el_ms", [answer.e2e_s for answer in answers]),
        **_spread("time_to_first_frame_ms", [answer.step_s[0] for answer in answers]),
        **_spread("time_to_first_block_ms", [answer.first_block_s for answer in answers]),
        **_spread("inter_block_latency_ms", [s for answer in answers for s in answer.block_s]),
        **_spread("tpot_after_first_block_ms", [s for s in after_first if s is not None]),
        "ttfts": [each.ttft_s for each in stats],
        "input_lens": [answer.num_prompt_tokens for answer in answers],
        "output_lens": [len(answer.token_ids) for answer in answers],
        "errors": [request.error for request in requests],
        "nfe": nfe,
        "num_prefill_forwards": sum(each.num_prefill_forwards for each in stats),
        "tpf": _ratio(num_out, nfe),
        "fps": _ratio(nfe, duration_s),
        "tps": _ratio(num_out, duration_s),
        "bytes_by_tier": [{**_tiers(device), "bytes": loaded}],
        "peak_expert_bytes": held * result.plan.shape.expert_bytes,
        "peak_resident_experts": held,
        "is_waiting": result.is_waiting(),
        "medians": {name: _interval_dict(result.series(name)) for name in ROUND_METRICS},
        "baseline": baseline.case.label,
        "ratios": {
            name: _interval_dict(result.paired_ratios(baseline, name)) for name in RATIO_METRICS
        },
    }


def _interval_dict(values: Sequence[float]) -> dict[str, Any] | None:
    return {**asdict(median_interval(values)), "values": list(values)} if values else None


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in milliseconds; None where nothing was measured."""
    keys = ("mean", "median", "std", *(f"p{percentile}" for percentile in _PERCENTILES))
    if not seconds:
        return {f"{key}_{name}": None for key in keys}
    ms = 1e3 * np.array(seconds)
    values = (ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, _PERCENTILES))
    return {f"{key}_{name}": float(value) for key, value in zip(keys, values, strict=True)}


def _drift_of(result: CaseResult) -> str | None:
    """A word where a hit rate goes on changing from one repetition to the next."""
    rates = result.series("hit_rate")
    if len(rates) < 2 or abs(rates[-1] - rates[0]) < 0.02:
        return None
    return (
        f"The hit rate of {result.case.label} went from {rates[0]:.1%} in the first repetition to "
        f"{rates[-1]:.1%} in the last: the same prompts come again, and it learns from them or "
        "keeps their experts. Its intervals are a trend, not noise: give more prompts or warm-up."
    )


def _tiers(device: str) -> dict[str, str]:
    if device == "cpu":
        return {"src": "disk", "dst": "ram"}
    return {"src": "ram", "dst": f"{device} device"}


def _notes_on(
    results: Sequence[CaseResult], tokens: TokenCheck, setup: Mapping[str, Any]
) -> list[str]:
    """What the measurement itself says about how far to trust it."""
    notes = []
    waiting = [result.case.label for result in results if result.is_waiting()]
    if waiting:
        notes.append(
            f"The median step of {', '.join(waiting)} took twice its own least time and a "
            "scheduler's turn more: these medians look like waiting for a core, not like work."
        )
    if any(result.plan.holds_all_experts for result in results):
        notes.append(
            "All experts fit into the slots, so policies have nothing to decide; give fewer."
        )
    num_failed = sum(bool(r.error) for result in results for r in result.requests)
    if num_failed:
        notes.append(f"{num_failed} requests failed and are in no time and no ratio.")
    notes += [note for result in results if (note := _drift_of(result)) is not None]
    if tokens.difference is not None and not tokens.must_agree:
        why = "experts ran on the CPU, which rounds otherwise; --no-cpu-experts makes them equal"
        if setup["lossy"]:
            why = f"by {setup['lossy']} they may depend on what is resident, or where experts ran"
        notes.append(
            f"Answers differ between cases: {why}. Times per token compare answers of other "
            "lengths then."
        )
    return notes


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# Running


def run_bench(
    model: str | Path,
    policies: Sequence[str],
    base_config: EngineConfig,
    params: SamplingParams,
    prompts: Sequence[Prompt],
    *,
    warmup: Sequence[Prompt] = (),
    repetitions: int = MIN_REPETITIONS,
    capacities: Sequence[float] | None = None,
    seed: int = 0,
    is_quick: bool = False,
    prepare: Prepare | None = None,
    open_engine: Callable[[EngineConfig], Engine] | None = None,
    progress: Say | None = None,
) -> BenchReport:
    """Run every policy at every capacity, and say how they compare.

    `warmup` are prompts that each engine answers uncounted after it is opened. `capacities` are
    experts per layer; without them the budget of `base_config` holds. `prepare` turns a text into
    what the engine is given, a chat template for example. The first policy is the baseline.

    Raises: ConfigError for fewer than five repetitions unless `is_quick`, for policies given twice
    and as Engine; InputError for a prompt that cannot be run. A request that fails later is
    counted, not raised.
    """
    cases = _cases(policies, capacities)
    _check_counts(prompts, repetitions, is_quick=is_quick)
    bench = _Bench(
        cases=cases,
        config=base_config,
        open_engine=open_engine or (lambda config: Engine(model, config)),
        params=params,
        prompts=prompts,
        warmup=warmup,
        prepare=prepare or (lambda engine, text, given: (text, given)),
        say=progress or (lambda text: None),
    )
    order = interleaved_order(len(cases), repetitions, seed=seed)
    load = Load()
    with bench.opened():
        results = bench.run(order)
    setup = {
        "format_version": FORMAT_VERSION,
        "model": str(model),
        **bench.facts,
        "seed": seed,
        "capacities": None if capacities is None else list(capacities),
        "num_prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest(),
        "warmup": _warmup_dict(warmup, prompts, keeps=bench.keeps_engines),
        "repetitions": repetitions,
        "meets_rule": repetitions >= MIN_REPETITIONS,
        "order": [[cases[i].label for i in row] for row in order],
        "interval": "order statistics of the repetitions (sign test), exact level in each",
        **load.facts(),
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "environment": machine_facts(),
        "versions": {"oled_moe": __version__, **package_versions()},
        "git_revision": git_revision(),
        "request_rate": "one request at a time, the next when the last is answered",
    }
    setup["notes"] = _notes_before(setup)
    must_agree = not (bench.has_cpu_experts or bench.depends_on_cache)
    return BenchReport(setup, results, check_tokens(results, must_agree=must_agree))


def interleaved_order(num_cases: int, repetitions: int, *, seed: int) -> list[list[int]]:
    """Case ids in the order in which each repetition runs them.

    A shuffled order and its mirror image take turns, moved on by one after each pair: over two
    repetitions every case has the same mean position, so a steady drift favours none.
    """
    cases = list(range(num_cases))
    random.Random(seed).shuffle(cases)
    order = []
    for repetition in range(repetitions):
        start = repetition // 2 % num_cases
        row = cases[start:] + cases[:start]
        order.append(row[::-1] if repetition % 2 else row)
    return order


def _cases(policies: Sequence[str], capacities: Sequence[float] | None) -> list[BenchCase]:
    for what, values in (("policy", policies), ("capacity", capacities or ())):
        if len(set(values)) < len(values):
            raise ConfigError(f"one {what} is given twice in {list(values)}; give each once")
    if not policies:
        raise ConfigError("policies is empty; give one or more")
    for capacity in capacities or ():
        check_real("capacities", capacity, minimum=0)
    return [BenchCase(p, c) for c in (capacities or (None,)) for p in policies]


def _check_counts(prompts: Sequence[Prompt], repetitions: int, *, is_quick: bool) -> None:
    if not prompts:
        raise ConfigError("prompts is empty; give one or more")
    check_int("repetitions", repetitions, minimum=1, maximum=MAX_REPETITIONS)
    if repetitions < MIN_REPETITIONS and not is_quick:
        raise ConfigError(
            f"repetitions is {repetitions}; allowed: {MIN_REPETITIONS} or more, fewer only with "
            "--quick, which marks the report"
        )


class _Bench:
    """The engines of all cases, and what is asked of them."""

    def __init__(
        self,
        *,
        cases: Sequence[BenchCase],
        config: EngineConfig,
        open_engine: Callable[[EngineConfig], Engine],
        params: SamplingParams,
        prompts: Sequence[Prompt],
        warmup: Sequence[Prompt],
        prepare: Prepare,
        say: Say,
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.keeps_engines = False
        self.has_cpu_experts = config.device != "cpu" and config.cpu_experts
        # A lossy rule may look at what is resident, which policies differ in.
        self.depends_on_cache = False
        self._cases = cases
        self._config = config
        self._open = open_engine
        self._params = params
        self._prompts = prompts
        self._warmup = warmup
        self._prepare = prepare
        self._say = say
        self._kept: dict[BenchCase, Engine] = {}
        self._plans: dict[BenchCase, MemoryPlan] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open and warm all engines where they fit together; else look at the first alone."""
        usable_bytes = usable_memory_bytes()
        with ExitStack() as stack:
            first = self._open_case(self._cases[0])
            stack.callback(first.close)
            self._look_at(first, usable_bytes)
            if self.keeps_engines:
                self._kept[self._cases[0]] = first
                for case in self._cases[1:]:
                    self._kept[case] = self._open_case(case)
                    stack.callback(self._kept[case].close)
                for case, engine in self._kept.items():
                    self._warm(case, engine)
            else:
                stack.close()
            yield

    def run(self, order: Sequence[Sequence[int]]) -> tuple[CaseResult, ...]:
        """Every repetition of every case; results in the order of the cases."""
        rounds: dict[BenchCase, list[BenchRound]] = {case: [] for case in self._cases}
        for repetition, row in enumerate(order):
            for case in (self._cases[i] for i in row):
                with self._engine_of(case) as engine:
                    what = f"repetition {repetition + 1} of {len(order)}, {case.label}"
                    requests = tuple(
                        self._ask(engine, i, what=what) for i in range(len(self._prompts))
                    )
                rounds[case].append(BenchRound(repetition, requests))
        return tuple(CaseResult(c, self._plans[c], tuple(rounds[c])) for c in self._cases)

    @contextmanager
    def _engine_of(self, case: BenchCase) -> Iterator[Engine]:
        if self.keeps_engines:
            yield self._kept[case]
            return
        engine = self._open_case(case)
        try:
            self._warm(case, engine)
            yield engine
        finally:
            engine.close()

    def _open_case(self, case: BenchCase) -> Engine:
        config = replace(self._config, policy=case.policy)
        if case.experts_per_layer is not None:
            config = replace(
                config,
                experts_per_layer=case.experts_per_layer,
                expert_memory=None,
                memory=None,
            )
        self._say(f"opening {case.label}")
        engine = self._open(config)
        try:
            self._check_plan(case, engine.memory_plan)
        except BaseException:
            engine.close()
            raise
        return engine

    def _check_plan(self, case: BenchCase, plan: MemoryPlan) -> None:
        """All policies of one capacity must have the same slots and staging."""
        self._plans.setdefault(case, plan)
        for other, theirs in self._plans.items():
            is_peer = other.experts_per_layer == case.experts_per_layer
            if is_peer and (plan.num_slots, plan.num_staging) != (
                theirs.num_slots,
                theirs.num_staging,
            ):
                raise OledMoeError(
                    f"{case.label} got {plan.num_slots} slots and {plan.num_staging} staging, "
                    f"{other.label} {theirs.num_slots} and {theirs.num_staging}: not comparable; "
                    "give experts_per_layer"
                )

    def _look_at(self, engine: Engine, usable_bytes: int) -> None:
        """Check all that can be checked before the long part; note what holds for all cases."""
        plan, config = engine.memory_plan, self._config
        if engine.lossy is not None:
            self.depends_on_cache = engine.lossy.depends_on_cache
        costs = CostModel.from_profile(engine.hardware, plan.shape.expert_bytes)
        for case in self._cases:
            build_policy(case.policy, plan.shape, costs)
        for i in range(len(self._prompts)):
            self._request(engine, self._prompts[i])
        if config.experts_per_layer is None and config.expert_memory is None:
            # A budget for everything depends on what else is loaded; what it came to does not.
            self._config = replace(config, memory=None, expert_memory=plan.expert_memory_bytes)
        needed_bytes = sum(self._extra_bytes(case, plan) for case in self._cases)
        self.keeps_engines = len(self._cases) == 1 or needed_bytes <= usable_bytes
        needs = f"need {format_size(needed_bytes)} and {format_size(usable_bytes)} were free"
        self.facts = {
            "device": config.device,
            "lossy": config.lossy,
            "low_precision": engine.low_form,
            "lossy_words": None if engine.lossy is None else engine.lossy.words,
            "is_emulated": config.device == "emulated",
            "has_cpu_experts": self.has_cpu_experts,
            "dtype": engine.dtype_words,
            "plan": plan_to_dict(plan),
            "hardware": {**asdict(engine.hardware), "source": engine.hardware_source},
            "config": _plain_config(config),
            "decoding": _decoding_of(engine, self._params, self._prompts[0], self._prepare),
            "keeps_engines": self.keeps_engines,
            "engines": (
                f"all {len(self._cases)} kept open side by side, so caches carry over from one "
                f"repetition to the next: their plans {needs}"
                if self.keeps_engines
                else "opened anew, with empty caches, for each repetition of each policy: together "
                f"they {needs}"
            ),
        }

    def _extra_bytes(self, case: BenchCase, plan: MemoryPlan) -> int:
        """What the engine of a case takes beside the process, by the plan of the first one."""
        expert_bytes = plan.expert_memory_bytes
        if case.experts_per_layer is not None:
            num_slots = slots_of_layers(case.experts_per_layer, plan.shape)
            num_slots += staging_beside(num_slots, plan.shape)
            expert_bytes = num_slots * plan.shape.expert_bytes + plan.low_bytes
        return plan.model.total_bytes - plan.model.process_bytes + expert_bytes

    def _warm(self, case: BenchCase, engine: Engine) -> None:
        for i, prompt in enumerate(self._warmup, start=1):
            self._say(f"warming up {case.label}: {i} of {len(self._warmup)}")
            request, params = self._request(engine, prompt)
            engine.generate(request, params)

    def _request(self, engine: Engine, prompt: Prompt) -> tuple[Prompt, SamplingParams]:
        """What the engine is given. Raises: InputError, ConfigError where it would refuse it."""
        request: Prompt = prompt
        params = self._params
        if isinstance(prompt, str):
            request, params = self._prepare(engine, prompt, params)
        # Checks the request at once and starts nothing.
        engine.stream(request, params)
        return request, params

    def _ask(self, engine: Engine, prompt_id: int, *, what: str) -> BenchRequest:
        self._say(f"{what}: prompt {prompt_id + 1} of {len(self._prompts)}")
        request, params = self._request(engine, self._prompts[prompt_id])
        num_prompt_tokens = _num_tokens(engine, request)
        try:
            return _measure(engine, request, params, prompt_id, num_prompt_tokens)
        except OledMoeError as error:
            return BenchRequest(prompt_id, num_prompt_tokens, error=str(error))


def _measure(
    engine: Engine,
    request: Prompt,
    params: SamplingParams,
    prompt_id: int,
    num_prompt_tokens: int,
) -> BenchRequest:
    """Answer one prompt, watching the clock at every step."""
    step_ends: list[float] = []
    block_ends: list[float] = []
    num_first = num_canvas = 0
    result = None
    start = time.perf_counter()
    for event in engine.stream(request, params):
        now = time.perf_counter() - start
        step_ends.append(now)
        if event.is_block_done or event.result is not None:
            if not block_ends:
                num_first = event.block_start + len(event.token_ids) - num_prompt_tokens
            block_ends.append(now)
            num_canvas += len(event.token_ids)
        result = event.result
    assert result is not None
    return BenchRequest(
        prompt_id,
        num_prompt_tokens,
        tuple(result.token_ids),
        e2e_s=step_ends[-1],
        first_block_s=block_ends[0],
        num_first_block_tokens=min(num_first, len(result.token_ids)),
        num_canvas_tokens=num_canvas,
        block_s=tuple(np.diff(block_ends).tolist()),
        step_s=tuple(np.diff([0.0, *step_ends]).tolist()),
        stats=result.stats,
    )


def _num_tokens(engine: Engine, request: Prompt) -> int:
    if isinstance(request, str):
        assert engine.tokenizer is not None
        return len(engine.tokenizer.encode(request))
    return len(request)


# Where it comes from


def _plain_config(config: EngineConfig) -> dict[str, Any]:
    """Without the policy, which is each case's own, and the profile, which stands beside."""
    values = asdict(replace(config, policy="", hardware=None))
    del values["policy"], values["hardware"]
    return values


def _decoding_of(
    engine: Engine, params: SamplingParams, prompt: Prompt, prepare: Prepare
) -> dict[str, Any]:
    if isinstance(prompt, str):
        _, params = prepare(engine, prompt, params)
    return asdict(DecodingParams.resolve(params.with_defaults(engine.sampling_defaults)))


def _warmup_dict(
    warmup: Sequence[Prompt], prompts: Sequence[Prompt], *, keeps: bool
) -> dict[str, Any]:
    is_disjoint = not set(warmup) & set(prompts)
    when = "once per policy, before the first repetition" if keeps else "each time one is opened"
    words = f"{len(warmup)} requests, {when}" if warmup else "none"
    if warmup and not is_disjoint:
        words += "; they share prompts with what is measured"
    return {"num_requests": len(warmup), "is_disjoint": is_disjoint, "words": words}


def _notes_before(setup: Mapping[str, Any]) -> list[str]:
    """What a reader must know of how it was measured."""
    notes = []
    if not setup["meets_rule"]:
        notes.append(
            f"Quick run: {setup['repetitions']} repetitions, fewer than the {MIN_REPETITIONS} that "
            "a claim needs. Do not quote these times."
        )
    if not setup["is_idle"]:
        notes.append(
            f"The machine was not idle: other processes kept {setup['other_busy_cores']:.1f} cores "
            "busy, which shows in times."
        )
    if setup["is_emulated"]:
        notes.append(
            "Emulated device: the link's speed is set, not measured, and the device computes on "
            "this CPU. Times say how policies would differ on such a link, not how fast a GPU is."
        )
    if setup["lossy"]:
        notes.append(
            f"Lossy rule {setup['lossy']}: {setup['lossy_words']}, answers are not the model's own."
        )
    if setup["has_cpu_experts"]:
        notes.append(
            "Missing experts may run on the CPU: a hit rate counts residents only, and an expert "
            "that ran there is neither a hit nor a load."
        )
    if not setup["warmup"]["num_requests"] or not setup["warmup"]["is_disjoint"]:
        notes.append(f"Warm-up: {setup['warmup']['words']}.")
    notes.append(
        "A block's tokens settle together, so the time between tokens is 0 inside a block and no "
        "ITL is given; see the time to the first block and between blocks in the JSON."
    )
    return notes
