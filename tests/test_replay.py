"""Replays: the engine does what the trace says, and decides what the simulator decides."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import LIVE_SPECS, bounded
from hypothesis import given
from hypothesis import strategies as st
from products import product
from test_parity import EMULATED, assert_same
from test_random_checkpoint import TINY, small_pool
from test_roofline import SMALL
from tiny_shapes import tiny_config

import oled_moe.random_checkpoint as random_checkpoint
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_PROFILE, CostModel, HardwareProfile
from oled_moe.engine import Engine
from oled_moe.errors import ConfigError, TraceError, TraceNotFoundError
from oled_moe.policies import build_policy
from oled_moe.random_checkpoint import make_random_checkpoint
from oled_moe.recording import PromptToRecord, record_trace
from oled_moe.replay import (
    MAX_WARMUP,
    MIN_WARMUP,
    Replayer,
    fit_trace,
    load_replay,
    num_sequences,
    num_warmup_forwards,
    positions_of_requests,
)
from oled_moe.replay_bench import (
    ReplayCase,
    ReplayReport,
    check_cases,
    run_replay_bench,
    shape_of_config,
    warmup_for,
)
from oled_moe.roofline import LinkLimit
from oled_moe.shapes import SHAPES
from oled_moe.simulator import simulate
from oled_moe.synthesis import synthesize
from oled_moe.traces import RoutingTrace, concatenate_traces, save_trace
from oled_moe.types import LayerDemand, LayerPlan, MoeShape, Phase, TokenState

__all__ = ["small_pool"]

SHAPE = shape_of_config(TINY)
HARDWARE: dict[str, HardwareProfile] = {"cpu": DEFAULT_PROFILE, "emulated": EMULATED}
# What a replay does not have, see check_policy, and what no trace here holds.
SPECS = [
    spec
    for spec in LIVE_SPECS
    if not build_policy(spec, SHAPE, CostModel(1.0, 1.0, 1.0, 2.0)).needs
    & {"gate_scores", "input_embedding"}
]
Plans = list[tuple[int, int, LayerPlan]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_checkpoint, "_POOL_VALUES", 2**16)
        return make_random_checkpoint(TINY, tmp_path_factory.mktemp("shapes") / "tiny")


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def synthetic(**changes: Any) -> RoutingTrace:
    sizes = {
        "num_layers": SHAPE.num_layers,
        "num_experts": SHAPE.num_experts,
        "top_k": SHAPE.top_k,
        "expert_bytes": SHAPE.expert_bytes,
        "block_length": 8,
        "prompt_tokens": 24,
        "answer_tokens": 20,
        "num_requests": 3,
    }
    return synthesize("llada2-mini", **{**sizes, **changes})


def open_engine(tiny: Path, trace: RoutingTrace, **options: Any) -> Engine:
    device = options.get("device", "cpu")
    return Engine(
        tiny,
        EngineConfig(
            max_model_len=max(positions_of_requests(trace)),
            max_num_seqs=num_sequences(trace),
            hardware=HARDWARE[device],
            **options,
        ),
    )


def replayed_plans(engine: Engine, trace: RoutingTrace) -> Plans:
    plans: Plans = []

    def see(demand: LayerDemand, plan: LayerPlan) -> None:
        plans.append((demand.context.forward_id, demand.layer, plan))

    engine.experts.observers.append(see)
    Replayer(engine, trace).run(10**6)
    return plans


# Every family


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_shape_replays_its_own_routing(name: str, tmp_path: Path) -> None:
    """Blocks where the family denoises blocks, whole canvases where it denoises those."""
    shape, config = SHAPES[name], tiny_config(name, 2)
    path = make_random_checkpoint(config, tmp_path / "tiny")
    spec = f"synth:{shape.preset}:block={min(shape.block_length, 16)},prompt_tokens=24"
    spec += f",answer_tokens=24,expert_capacity={config.get('expert_capacity', 0)}"
    replay = load_replay(spec, shape_of_config(config), num_forwards=8)
    with open_engine(path, replay.trace, policy="naive-lru", experts_per_layer=5) as engine:
        done = Replayer(engine, replay.trace).run(8)
    denoised = [forward for forward in done if forward.phase == Phase.DENOISE]
    assert len(denoised) == 8 and all(forward.num_loads for forward in done[:1])
    is_canvas = "in canvases" in replay.words
    assert is_canvas == (name in ("rnd1", "llada-moe-7b"))
    num_tokens = {forward.work.num_tokens for forward in denoised}
    if is_canvas:
        # All of it in each forward, of which the block's masks want logits.
        assert len(done) == 8 and min(num_tokens) > 40
        assert all(0 < forward.work.num_logits <= 16 for forward in denoised)
    else:
        assert num_tokens == {replay.trace.block_length}


# What the engine is made to do


@pytest.mark.parametrize("policy, device", product(SPECS, ("cpu", "emulated")))
def test_the_engine_decides_what_the_simulator_decides(
    tiny: Path, policy: str, device: str
) -> None:
    # Two sequences share most forwards, and one device computes on the CPU too.
    trace = synthetic(batch_size=2, num_requests=2)
    capacity = 5.0 if device == "cpu" else 3.34
    with open_engine(
        tiny, trace, policy=policy, experts_per_layer=capacity, device=device
    ) as engine:
        plans = replayed_plans(engine, trace)
        engine.cache.check()
    simulated: Plans = []

    def see(demand: LayerDemand, plan: LayerPlan) -> None:
        simulated.append((demand.context.forward_id, demand.layer, plan))

    simulate(
        trace,
        policy,
        hardware=HARDWARE[device],
        experts_per_layer=capacity,
        has_cpu_experts=device == "emulated",
        observers=[see],
    )
    assert len(plans) == len(simulated) > 20
    for ours, theirs in zip(plans, simulated, strict=True):
        assert ours[:2] == theirs[:2]
        assert_same(ours[2], theirs[2], ours[:2])


def test_a_recorded_run_comes_out_the_same(tiny: Path) -> None:
    """Tokens, positions, keys and values, routes: the replay's hidden states are the live ones."""
    config = EngineConfig(experts_per_layer=6, max_model_len=64)
    params = SamplingParams(max_tokens=24, block_length=8, threshold=0.9, ignore_eos=True)
    prompts = [PromptToRecord(list(range(19)), "a"), PromptToRecord([5], "b")]

    def seen_by(engine: Engine, states: list[torch.Tensor]) -> None:
        def probe(name: str, value: torch.Tensor) -> None:
            if name in ("layers.2.layer_out", "final_norm_out"):
                states.append(value.clone())

        engine.model.probe = probe  # type: ignore[attr-defined]

    live: list[torch.Tensor] = []
    with Engine(tiny, config) as engine:
        seen_by(engine, live)
        trace = record_trace(engine, prompts, params)
    # A finished block is stored by the first forward of the next one.
    phases = [[row.phase for row in forward.context.rows] for forward in trace.forwards()]
    assert [Phase.COMMIT, Phase.DENOISE] in phases and [Phase.PREFILL] in phases
    again: list[torch.Tensor] = []
    with Engine(tiny, replace(config, policy="naive-lru")) as engine:
        seen_by(engine, again)
        forwards = Replayer(engine, trace).run(10**6)
        assert engine.experts.routing is None and not engine.experts.observers
    assert len(forwards) == trace.num_forwards
    assert len(live) == len(again) > 10
    assert all(torch.equal(*pair) for pair in zip(live, again, strict=True))
    accepted = sum(forward.num_accepted for forward in forwards)
    assert accepted == trace.token_accepted.sum() > 0


def test_what_is_measured_is_what_was_asked_for(tiny: Path) -> None:
    trace = synthetic()
    with open_engine(tiny, trace, policy="naive-lru", experts_per_layer=6) as engine:
        done = Replayer(engine, trace).run(7)
    assert sum(forward.phase == Phase.DENOISE for forward in done) == 7
    for forward, recorded in zip(done, trace.forwards(), strict=False):
        context, work = recorded.context, forward.work
        is_masked = context.token_state == TokenState.MASKED
        assert work.num_tokens == context.num_tokens
        assert work.num_logits == (is_masked.sum() if context.is_denoise else 0)
        assert work.num_last_tokens == (context.num_tokens if context.is_denoise else 0)
        rows = [demand.num_tokens.tolist() for demand in recorded.demands]
        assert [layer.tolist() for layer in work.expert_rows] == rows
        assert forward.seconds > forward.planning_s > 0
        assert forward.num_loads == work.num_misses


def test_tokens_of_a_trace_without_ids_are_random_but_the_masks(tiny: Path) -> None:
    trace = replace(synthetic(), token_ids=None)
    with open_engine(tiny, trace, experts_per_layer=6) as engine:
        replayer = Replayer(engine, trace)
        first = next(f for f in trace.forwards() if f.context.is_denoise)
        ids = replayer._inputs(first).numpy()
        assert (ids[first.context.token_state == TokenState.MASKED] == TINY["mask_token_id"]).all()
        assert ((ids >= 0) & (ids < TINY["vocab_size"])).all()
        assert len(replayer.run(3)) >= 3


def test_rows_that_do_not_follow_one_another_are_refused(tiny: Path) -> None:
    trace = synthetic(num_requests=1)
    shifted = trace.token_position.copy()
    shifted[trace.row_token_offset[1] :] += 4
    broken = replace(trace, token_position=shifted)
    with open_engine(tiny, broken, experts_per_layer=6) as engine:
        with pytest.raises(TraceError, match="forward 1: its rows do not follow"):
            Replayer(engine, broken).run(10)
        assert engine.experts.routing is None


def test_a_layer_that_the_trace_skipped_and_the_model_runs(tiny: Path) -> None:
    trace = synthetic(num_requests=1)
    ids, weights = trace.expert_ids.copy(), trace.gate_weights.copy()
    ids[:, 0], weights[:, 0] = -1, 0
    broken = replace(trace, expert_ids=ids, gate_weights=weights)
    with open_engine(tiny, broken, experts_per_layer=6) as engine:
        with pytest.raises(TraceError, match="says nothing of MoE layer 0"):
            Replayer(engine, broken).run(10)


def test_policies_that_need_all_scores_are_refused(tiny: Path) -> None:
    trace = synthetic(num_requests=1)
    with pytest.raises(ConfigError, match="all router scores.*finemoe:maps=topk"):
        check_cases(["finemoe"], [4], SHAPE)
    with open_engine(tiny, trace, experts_per_layer=6, policy="finemoe") as engine:
        with pytest.raises(ConfigError, match="all router scores"):
            Replayer(engine, trace)
    # Embeddings are the model's own.
    with open_engine(tiny, trace, experts_per_layer=6, policy="finemoe:maps=topk") as engine:
        assert Replayer(engine, trace).run(3)


# Which trace


def test_traces_are_cut_to_the_model() -> None:
    trace = synthetic(num_layers=7)
    fitted = fit_trace(trace, SHAPE)
    assert fitted.num_moe_layers == 3 and fitted.expert_bytes == SHAPE.expert_bytes
    assert np.array_equal(fitted.expert_ids, trace.expert_ids[:, [0, 1, 6]])
    # Where there are no logits the last layer is skipped, here too.
    assert fitted.is_skipped[:, -1].any() and not fitted.is_skipped[:, :-1].any()
    with pytest.raises(TraceError, match="2 MoE layers, the model 3; give --moe-layers 2"):
        fit_trace(synthetic(num_layers=2), SHAPE)
    with pytest.raises(TraceError, match="routes to 4 of 32 experts, the model to 4 of 16"):
        fit_trace(synthetic(num_experts=32), SHAPE)


def test_synthetic_replays_are_long_enough_and_begin_alike() -> None:
    spec = "synth:llada2-mini:block=8,answer_tokens=16"
    short = load_replay(spec, SHAPE, num_forwards=5)
    long = load_replay(spec, SHAPE, num_forwards=200)
    assert long.num_denoise_forwards >= 200 > short.num_denoise_forwards >= 5
    assert (
        short.trace.block_length == 8 and "blocks of 8, 3 MoE layers of 16 experts" in short.words
    )
    first = short.trace.num_tokens
    assert np.array_equal(long.trace.expert_ids[:first], short.trace.expert_ids)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("synth:nope", "unknown preset 'nope'; known: llada2-mini"),
        ("synth:", "unknown preset ''"),
        ("synth:llada2-mini:block", "key=value"),
        ("synth:llada2-mini:block=many", "block is 'many'"),
        ("synth:llada2-mini:blocks=8", "unknown parameter 'blocks'; known: block, model_type"),
        ("synth:llada2-mini:num_experts=8", "unknown parameter 'num_experts'"),
        ("synth:llada2-mini:block=0", "block_length is 0"),
    ],
)
def test_bad_specs_are_one_sentence(spec: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_replay(spec, SHAPE, num_forwards=5)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_trace_files(tmp_path: Path) -> None:
    with pytest.raises(TraceNotFoundError):
        load_replay(str(tmp_path / "absent"), SHAPE, num_forwards=5)
    path = tmp_path / "deep.trace.safetensors"
    save_trace(synthetic(num_layers=5), path)
    replay = load_replay(str(path), SHAPE, num_forwards=5)
    assert "deep.trace.safetensors" in replay.words and "3 of its 5 MoE layers" in replay.words


@bounded(8)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_sequences_under_way(batches: list[int]) -> None:
    traces = [synthetic(batch_size=size, num_requests=4, seed=size) for size in batches]
    assert num_sequences(concatenate_traces(traces)) == max(batches)


def test_warm_up_fills_the_largest_cache() -> None:
    trace = synthetic(num_requests=12)
    assert num_warmup_forwards(trace, [0, 0, 0]) == MIN_WARMUP
    assert num_warmup_forwards(trace, [17, 17, 17]) == MAX_WARMUP
    assert warmup_for(trace, [2, 16]) == MIN_WARMUP
    seen: set[tuple[int, int]] = set()
    num_denoise = 0
    for forward in trace.forwards():
        if num_denoise == warmup_for(trace, [15, 2]):
            break
        num_denoise += forward.context.is_denoise
        for demand in forward.demands:
            seen |= {(demand.layer, expert) for expert in demand.expert_ids.tolist()}
    assert all(sum(layer == at for at, _ in seen) >= 15 for layer in range(3))


# Side by side


def run_bench(
    tiny: Path, policies: Sequence[str], capacities: Sequence[float], **options: Any
) -> ReplayReport:
    config = EngineConfig(
        device=options.pop("device", "cpu"), hardware=options.pop("hardware", None)
    )
    replay = load_replay("synth:llada2-mini:block=8", SHAPE, num_forwards=20)
    return run_replay_bench(
        tiny,
        replay,
        check_cases(policies, capacities, SHAPE),
        config,
        num_forwards=options.pop("num_forwards", 6),
        effort=SMALL,
        **options,
    )


def test_runs_have_what_is_judged(tiny: Path) -> None:
    said: list[str] = []
    report = run_bench(tiny, ["naive-lru", "oled+prefetch"], [5, 16], progress=said.append)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [(run["policy"], run["experts_per_layer"]) for run in values["runs"]] == [
        ("naive-lru", 5), ("oled+prefetch", 5), ("naive-lru", 16), ("oled+prefetch", 16),
    ]  # fmt: skip
    for run in values["runs"]:
        low, high = run["forward_s_ci"]
        assert 0 < run["forward_s_min"] <= low <= run["forward_s_median"] <= high
        assert run["replayed"] and run["num_forwards"] == run["completed"] == 6
        assert len(run["forward_s"]) == 6 and run["is_cache_full"]
        assert run["roofline_s"] > 0 and run["bound"] in ("memory", "disk", "cpu")
        low, high = run["roofline_ratio_ci"]
        assert 0 < low <= run["roofline_ratio"] <= high
        # Before the first of the six, again behind the fifth, and at the end.
        assert len(run["read_samples_bytes_per_s"]) == len(run["disk_samples_bytes_per_s"]) == 3
        assert run["weight_bytes_per_forward"] > 0 and run["limits"]["num_rounds"] == 2
        assert run["plan_bytes"] > 0 and run["peak_rss_bytes"] > 0
        assert 0 < run["planning_share"] < 1 and 0 < run["hit_rate"] <= 1
        if run["experts_per_layer"] == 16:
            assert run["miss_bytes_per_forward"] == 0 and run["hit_rate"] == 1
        else:
            assert run["miss_bytes_per_forward"] > 0
    # Every policy met the same demands.
    assert len({run["active_experts_per_forward"] for run in values["runs"]}) == 1
    assert values["hardware"]["name"] == "built-in guess, disk as measured in this run"
    assert any("naive-lru at 5 experts" in text for text in said)
    assert len(report.rows()) == 4 and report.rows()[0]["benchmark"] == "bench-shape"


def test_misses_agree_with_the_simulator(tiny: Path) -> None:
    report = run_bench(tiny, ["priority"], [4], num_warmup=3, num_forwards=6)
    loads: list[tuple[bool, int]] = []

    def see(demand: LayerDemand, plan: LayerPlan) -> None:
        loads.append((demand.context.is_denoise, len(plan.load_ids)))

    trace = load_replay("synth:llada2-mini:block=8", SHAPE, num_forwards=20).trace
    simulate(
        trace, "priority", hardware=DEFAULT_PROFILE, experts_per_layer=4, observers=[see],
        has_cpu_experts=False,
    )  # fmt: skip
    denoised = [count for is_denoise, count in loads if is_denoise]
    # After three of warm-up one follows a pause, five count, one follows a pause, one counts.
    size = SHAPE.num_layers
    counted = [*denoised[4 * size : 9 * size], *denoised[10 * size : 11 * size]]
    run = report.to_dict()["runs"][0]
    expert_bytes = 3 * TINY["hidden_size"] * TINY["moe_intermediate_size"] * 2
    assert run["miss_bytes_per_forward"] == pytest.approx(sum(counted) * expert_bytes / 6)


def test_an_emulated_link_is_as_fast_as_it_is_set(tiny: Path) -> None:
    report = run_bench(
        tiny, ["naive-lru"], [4], device="emulated", hardware=EMULATED, num_forwards=2, num_warmup=1
    )
    run = report.to_dict()["runs"][0]
    assert run["limits"]["link"] == {"bytes_per_s": EMULATED.copy_bytes_per_s, "method": "set"}
    assert run["bytes_by_tier"][0]["dst"] == "emulated device"
    slow = replace(report.limits, link=LinkLimit(1.0, "set"))
    loading = max(report.runs[0].forwards, key=lambda forward: forward.num_loads)
    bound = report.model.bound(loading.work, slow)
    assert bound.name == "link" and bound.seconds >= SHAPE.expert_bytes


def test_every_other_repetition_goes_backwards(tiny: Path) -> None:
    report = run_bench(tiny, ["naive-lru", "lfu"], [4], repetitions=2, num_forwards=2)
    values = report.to_dict()
    names = [[case["policy"] for case in row] for row in values["order"]]
    assert names == [["naive-lru", "lfu"], ["lfu", "naive-lru"]]
    assert all(len(run["forward_s"]) == 4 for run in values["runs"])


def test_too_short_and_too_small(tiny: Path) -> None:
    replay = load_replay("synth:llada2-mini:block=8,num_requests=1", SHAPE, num_forwards=5)
    with pytest.raises(ConfigError, match="forwards is 10000, beside 2005 .*lower --forwards"):
        run_replay_bench(
            tiny, replay, [ReplayCase("lfu", 4)], EngineConfig(), num_forwards=10000, num_warmup=5
        )
    with pytest.raises(ConfigError, match="max-model-len is 8; allowed: .* or more"):
        run_replay_bench(
            tiny, replay, [ReplayCase("lfu", 4)], EngineConfig(max_model_len=8), num_forwards=2
        )


@pytest.mark.parametrize(
    ("policies", "capacities", "words"),
    [
        (["lfu", "lfu"], [4], "one policy is given twice"),
        (["lfu"], [4, 4], "one experts-per-layer is given twice"),
        (["nope"], [4], "unknown policy"),
        (["belady"], [4], "future"),
        (["lfu"], [17], "0 to 16"),
    ],
)
def test_cases_are_checked_first(policies: list[str], capacities: list[float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_cases(policies, capacities, SHAPE)


def test_shape_of_a_config() -> None:
    assert SHAPE == MoeShape(3, 16, 4, SHAPE.expert_bytes)
    assert SHAPE.expert_bytes % 4096 == 0
