"""A live run, recorded and replayed: the simulator decides what the engine decided."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import synthetic_llada2, write_checkpoint
from fakes import LIVE_SPECS
from products import product

from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE, CostModel
from oled_moe.engine import Engine
from oled_moe.policies import build_policy
from oled_moe.recording import PromptToRecord, record_trace
from oled_moe.simulator import SimulationReport, simulate
from oled_moe.traces import RoutingTrace, TraceForward
from oled_moe.types import CopyPlan, ForwardOutcome, LayerDemand, LayerPlan

CONFIG: dict[str, Any] = {
    "model_type": "llada2_moe",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "mask_token_id": 257,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
PARAMS = SamplingParams(max_tokens=24, block_length=8, threshold=0.3, ignore_eos=True)
# Both lanes are worth using for experts of this size.
EMULATED = replace(
    DEFAULT_EMULATED_PROFILE,
    copy_latency_s=0.0,
    copy_bytes_per_s=4.0e9,
    cpu_weight_bytes_per_s=6.0e9,
    cpu_token_weight_bytes_per_s=2.0e10,
)
HARDWARE = {"cpu": DEFAULT_PROFILE, "emulated": EMULATED}
# Prompts with and without whole blocks to prefill, and a remainder.
PROMPTS = [list(range(19)), [5], list(range(40, 72))]

Plans = list[tuple[int, int, LayerPlan]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    weights = synthetic_llada2(CONFIG, dtype=torch.float32, seed=3)
    # Sharper logits: confidences then spread over the whole range.
    weights["lm_head.weight"] *= 12
    write_checkpoint(directory, weights, CONFIG, convention="single")
    return directory


class LiveTrace:
    """A recorded trace whose forwards are the live objects themselves.

    Files hold router scores and embeddings as float16; policies that look at them decide by every
    bit.
    """

    def __init__(self, trace: RoutingTrace, forwards: list[TraceForward]) -> None:
        self._trace = trace
        self._forwards = forwards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trace, name)

    def forwards(self, needs: Sequence[str] = ()) -> Iterator[TraceForward]:
        recorded = self._trace.forwards(needs)
        for live, same in zip(self._forwards, recorded, strict=True):
            yield replace(live, ended_requests=same.ended_requests)


def run_live(
    path: Path, device: str, policy: str, capacity: float
) -> tuple[RoutingTrace, list[TraceForward], Plans, int, Engine]:
    """Answer the prompts; the trace, the forwards as they were, every plan and copies ahead."""
    plans: Plans = []
    forwards: list[TraceForward] = []
    demands: list[LayerDemand] = []
    ahead: list[CopyPlan] = []
    config = EngineConfig(
        device=device, policy=policy, experts_per_layer=capacity, hardware=HARDWARE[device]
    )
    with Engine(path, config) as engine:

        def see(demand: LayerDemand, plan: LayerPlan) -> None:
            plans.append((demand.context.forward_id, demand.layer, plan))
            demands.append(demand)
            ahead.append(plan.prefetch)

        def end(outcome: ForwardOutcome) -> None:
            # The first layer's context holds what the model added to it.
            forwards.append(TraceForward(demands[0].context, list(demands), outcome, ()))
            demands.clear()

        engine.experts.observers.append(see)
        engine.experts.copy_observers.append(ahead.append)
        engine.outcome_observers.append(end)
        needed = engine.policy.needs
        include = {"token_ids", *needed} - {"token_position"}
        trace = record_trace(
            engine,
            [PromptToRecord(prompt, str(i)) for i, prompt in enumerate(PROMPTS)],
            PARAMS,
            include=include,
        )
    return trace, forwards, plans, sum(map(len, ahead)), engine


def assert_same(live: LayerPlan, simulated: LayerPlan, place: tuple[int, int]) -> None:
    for field in fields(LayerPlan):
        ours, theirs = getattr(live, field.name), getattr(simulated, field.name)
        if isinstance(ours, CopyPlan):
            assert np.array_equal(ours.expert_ids, theirs.expert_ids), (place, field.name)
            assert np.array_equal(ours.slots, theirs.slots), (place, field.name)
        elif isinstance(ours, np.ndarray):
            assert np.array_equal(ours, theirs), (place, field.name)
        else:
            assert ours == theirs, (place, field.name)


def run_replayed(
    trace: RoutingTrace, forwards: list[TraceForward], policy: str, engine: Engine
) -> tuple[SimulationReport, Plans]:
    """The same through the simulator: its report and every plan."""
    plans: Plans = []

    def see(demand: LayerDemand, plan: LayerPlan) -> None:
        plans.append((demand.context.forward_id, demand.layer, plan))

    source: Any = LiveTrace(trace, forwards) if is_rounded(engine) else trace
    costs = CostModel.from_profile(engine.hardware, trace.expert_bytes)
    report = simulate(
        source,
        build_policy(policy, engine.memory_plan.shape, costs),
        hardware=engine.hardware,
        num_slots=engine.memory_plan.num_slots,
        num_staging=engine.memory_plan.num_staging,
        has_cpu_experts=engine.config.device == "emulated",
        observers=[see],
    )
    return report, plans


def is_rounded(engine: Engine) -> bool:
    return bool(engine.policy.needs & {"gate_scores", "input_embedding"})


@pytest.mark.parametrize("policy, capacity", product(sorted(LIVE_SPECS), (1.34, 5)))
def test_replay_decides_what_the_engine_decided(tiny: Path, policy: str, capacity: float) -> None:
    for device in ("cpu", "emulated"):
        trace, forwards, plans, num_ahead, engine = run_live(tiny, device, policy, capacity)
        report, replayed = run_replayed(trace, forwards, policy, engine)
        assert len(plans) == len(replayed) > 20
        for live, simulated in zip(plans, replayed, strict=True):
            assert live[:2] == simulated[:2]
            assert_same(live[2], simulated[2], live[:2])
        assert report.expert_loads == sum(len(plan.load_ids) for _, _, plan in plans)
        assert report.cpu_expert_runs == sum(len(plan.cpu_ids) for _, _, plan in plans)
        num_staged = sum(len(plan.staged_ids) for _, _, plan in plans)
        used_bytes = report.useful_prefetched_bytes + report.late_prefetched_bytes
        assert used_bytes == num_staged * trace.expert_bytes
        assert used_bytes <= report.prefetched_bytes <= num_ahead * trace.expert_bytes
        if not is_rounded(engine):
            # The name alone, with the engine's own rule for staging, says the same.
            again = simulate(
                trace,
                policy,
                hardware=engine.hardware,
                experts_per_layer=capacity,
                has_cpu_experts=device == "emulated",
            )
            assert again.expert_loads == report.expert_loads
            assert again.num_staging == engine.memory_plan.num_staging


def test_emulated_runs_use_every_lane(tiny: Path) -> None:
    """What is compared above holds hits, loads, streams and CPU runs."""
    _, _, plans, _, _ = run_live(tiny, "emulated", "oled", 1.34)
    for name in ("hit_ids", "load_ids", "cpu_ids", "freed_slots"):
        assert any(len(getattr(plan, name)) for _, _, plan in plans), name
