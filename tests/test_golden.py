"""The model and its loops against numbers from the public reference code (tests/golden)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint
from fakes import FAST_LINK, LIVE_POLICIES
from products import product
from safetensors.torch import load_file
from torch import Tensor

from oled_moe.config import DecodingParams, EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.decoding import BlockDiffusionDecoder, DecodingCounters
from oled_moe.engine import Engine
from oled_moe.layers import ForwardBatch, Segment
from oled_moe.types import ForwardContext, ForwardRow, LayerDemand, LayerPlan, Phase, TokenState

GOLDEN = Path(__file__).parent / "golden"
CAPACITIES = (16, 8, 1.6, 1)
POLICIES = sorted(LIVE_POLICIES)
NAMES = {
    "gen_length": "max_tokens",
    "mask_id": "mask_token_id",
    "eos_id": "eos_token_id",
    "editing_threshold": "edit_threshold",
    "max_post_steps": "max_post_edit_steps",
}
PROFILES = {"cpu": DEFAULT_PROFILE, "emulated": DEFAULT_EMULATED_PROFILE}


def open_engine(model: str | Path, device: str = "cpu", **settings: Any) -> Engine:
    settings.setdefault("hardware", PROFILES[device])
    return Engine(GOLDEN / model, EngineConfig(device=device, **settings))


def golden_runs(model: str, version: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(
        (GOLDEN / model / f"generate_{version}.json").read_text()
    )
    return runs


def params_of(run: dict[str, Any], version: str) -> SamplingParams:
    algorithm = "low_confidence" if version == "v20" else "joint_threshold"
    args = {NAMES.get(name, name): value for name, value in run["args"].items()}
    return SamplingParams(algorithm=algorithm, **args)


def check_runs(engine: Engine, model: str, version: str, *, first: int = 0, every: int = 1) -> None:
    for run in golden_runs(model, version)[first::every]:
        result = engine.generate(run["prompt_ids"], params_of(run, version))
        assert result.token_ids == run["output_ids"], run["name"]
        assert result.stats.num_denoise_forwards == run["num_forwards"], run["name"]
        has_ended = run["args"]["eos_id"] in run["output_ids"]
        assert result.finish_reason == ("stop" if has_ended else "length")


def run_forward(
    engine: Engine, token_ids: Tensor, block_length: int, num_cached: int, **kv: Any
) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Logits of the tokens behind the first `num_cached`, which are put into the prefix first."""
    cache = engine.model.new_kv(len(token_ids))
    shown: dict[str, Tensor] = {}
    logits = None
    for start, end, wants_logits in ((0, num_cached, False), (num_cached, len(token_ids), True)):
        count = end - start
        if not count:
            continue
        phase = Phase.DENOISE if wants_logits else Phase.PREFILL
        context = ForwardContext(
            0,
            block_length,
            (ForwardRow(0, 0, 0, phase, count),),
            np.ones(count, dtype=np.float32),
            np.full(count, TokenState.COMMITTED, dtype=np.uint8),
        )
        batch = ForwardBatch(
            token_ids[start:end],
            torch.arange(start, end),
            (Segment(cache, count, wants_logits),),
            context,
        )
        engine.model.probe = shown.__setitem__
        logits = engine.model.forward(batch)
        cache.advance(count)
    assert logits is not None
    return logits, shown, cache


@pytest.mark.parametrize(
    "model, name", [("llada2_a", "f1"), ("llada2_a", "f3"), ("llada2_b", "f1")]
)
def test_every_stage_of_a_forward(model: str, name: str) -> None:
    expected = load_file(GOLDEN / model / f"forward_{name}.safetensors")
    settings = json.loads((GOLDEN / model / "forward.json").read_text())[name]
    with open_engine(model, experts_per_layer=2) as engine:
        token_ids = expected["input_ids"][0].long()
        logits, shown, cache = run_forward(engine, token_ids, settings["block_length"], 0)
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=0)
    num_compared = 0
    for key, value in shown.items():
        if key in expected:
            wanted = expected[key].reshape(value.shape)
            tolerance = 1e-5 if key.endswith("topk_weight") else 1e-4
            if key.endswith("topk_idx"):
                assert torch.equal(value.int(), wanted)
            else:
                torch.testing.assert_close(value, wanted, atol=tolerance, rtol=0)
            num_compared += 1
    assert num_compared >= 6 * engine.model_config.num_moe_layers
    for layer in range(engine.model_config.num_layers):
        keys, values = cache.written(layer, 0)
        torch.testing.assert_close(keys, expected[f"layers.{layer}.k_rope"], atol=1e-4, rtol=0)
        torch.testing.assert_close(values, expected[f"layers.{layer}.v"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "model, name", [("llada2_a", "f1"), ("llada2_a", "f3"), ("llada2_b", "f1")]
)
def test_last_block_against_the_prefix(model: str, name: str) -> None:
    """Blocks before the last from K/V: the same logits for the last block."""
    expected = load_file(GOLDEN / model / f"forward_{name}.safetensors")
    length = json.loads((GOLDEN / model / "forward.json").read_text())[name]["block_length"]
    with open_engine(model, experts_per_layer=2) as engine:
        token_ids = expected["input_ids"][0].long()
        logits, _, _ = run_forward(engine, token_ids, length, len(token_ids) - length)
    torch.testing.assert_close(logits, expected["logits"][-length:], atol=1e-4, rtol=0)


def test_bfloat16_stages_locally() -> None:
    """Per stage, from the reference's own input to it: routing and dtypes in bf16."""
    from oled_moe.layers import grouped_sigmoid_router

    expected = load_file(GOLDEN / "llada2_a" / "forward_f1_bf16.safetensors")
    weights = load_file(GOLDEN / "llada2_a" / "model.safetensors")
    for layer in range(1, 4):
        hidden = expected[f"layers.{layer}.mlp_input"].reshape(-1, 64)
        assert hidden.dtype == torch.bfloat16
        ids, gates, _ = grouped_sigmoid_router(
            hidden,
            weights[f"model.layers.{layer}.mlp.gate.weight"].bfloat16(),
            weights[f"model.layers.{layer}.mlp.gate.expert_bias"],
            num_groups=4,
            num_kept_groups=2,
            top_k=4,
        )
        assert torch.equal(ids.int(), expected[f"layers.{layer}.topk_idx"])
        torch.testing.assert_close(
            gates * 2.5, expected[f"layers.{layer}.topk_weight"], atol=1e-5, rtol=0
        )
    with open_engine("llada2_a", experts_per_layer=2, dtype="bfloat16") as engine:
        token_ids = expected["input_ids"][0].long()
        logits, shown, _ = run_forward(engine, token_ids, 8, 0)
    assert logits.dtype == torch.float32
    for key in ("layers.1.mlp_input", "layers.1.routed_out", "layers.3.layer_out"):
        assert shown[key].dtype == torch.bfloat16
    # These weights amplify rounding (see the README of the sets): the first MoE layer's input is
    # still close, the logits agree on average only.
    first = expected["layers.1.mlp_input"].reshape(-1, 64).float()
    assert (shown["layers.1.mlp_input"].float() - first).abs().mean() < 0.02
    assert (logits - expected["logits"]).abs().mean() < 0.6


@pytest.mark.parametrize("policy, capacity, first", product(POLICIES, CAPACITIES, range(3)))
def test_every_policy_gives_the_same_tokens(policy: str, capacity: float, first: int) -> None:
    """By default, too, every run at every capacity: policies are more than four times three."""
    with open_engine("llada2_a", policy=policy, experts_per_layer=capacity) as engine:
        check_runs(engine, "llada2_a", "v20", first=first, every=3)
        check_runs(engine, "llada2_a", "v21", first=first, every=3)


@pytest.mark.parametrize("policy, first", product(POLICIES, range(5)))
def test_llada2_runs_on_the_emulated_device(policy: str, first: int) -> None:
    """One run of each version, others with the next policy."""
    settings = {"policy": policy, "experts_per_layer": 3, "cpu_experts": False}
    with open_engine("llada2_a", "emulated", hardware=FAST_LINK, **settings) as engine:
        check_runs(engine, "llada2_a", "v20", first=3 * first, every=15)
        check_runs(engine, "llada2_a", "v21", first=2 * first, every=10)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_run_of_the_other_model_at_every_capacity(capacity: float) -> None:
    with open_engine("llada2_b", experts_per_layer=min(capacity, 12)) as engine:
        check_runs(engine, "llada2_b", "v20")


@pytest.mark.parametrize(
    "model, version, first",
    [
        ("llada2_a", "v20", 0),
        ("llada2_a", "v21", 0),
        ("llada2_b", "v20", 0),
        pytest.param("llada2_a", "v20", 1, marks=pytest.mark.full),
        pytest.param("llada2_a", "v21", 1, marks=pytest.mark.full),
        ("llada2_b", "v20", 1),
    ],
)
def test_runs_with_and_without_folded_commits(model: str, version: str, first: int) -> None:
    """The reference's tokens and forwards both ways; unfolded there are commits on top.

    Every second run from `first` on.
    """
    num_forwards = {}
    with open_engine(model, experts_per_layer=3) as engine:
        for folds in (True, False):
            contexts: list[ForwardContext] = []

            def start(context: ForwardContext, contexts: list[ForwardContext] = contexts) -> None:
                contexts.append(context)
                engine.experts.start_forward(context)

            decoder = BlockDiffusionDecoder(
                engine.model,
                start_forward=start,
                end_forward=engine.experts.end_forward,
                folds_commit=folds,
            )
            for run in golden_runs(model, version)[first::2]:
                counters = DecodingCounters()
                params = params_of(run, version).with_defaults(engine.sampling_defaults)
                resolved = DecodingParams.resolve(params)
                *_, last = decoder.decode(run["prompt_ids"], resolved, counters=counters)
                assert list(last.answer_ids) == run["output_ids"], run["name"]
                assert counters.num_denoise_forwards == run["num_forwards"], run["name"]
                assert folds <= (counters.num_commit_forwards == 0)
            num_forwards[folds] = len(contexts)
            num_folded = sum(len(context.rows) == 2 for context in contexts)
            num_commits = sum(context.rows[0].phase == Phase.COMMIT for context in contexts)
            assert num_folded == (num_commits if folds else 0) and num_commits > 0
    assert num_forwards[True] == num_forwards[False] - num_commits


@pytest.mark.parametrize("convention", ["llada20", "llada21", "merged"])
def test_shard_conventions_give_the_same_tokens(convention: Any, tmp_path: Path) -> None:
    source = GOLDEN / "llada2_b"
    write_checkpoint(
        tmp_path,
        load_file(source / "model.safetensors"),
        json.loads((source / "config.json").read_text()),
        convention=convention,
        num_files=5,
    )
    with open_engine(tmp_path, experts_per_layer=2) as engine:
        check_runs(engine, "llada2_b", "v20")


def test_cpu_experts_agree_within_tolerance() -> None:
    """Cooperative dispatch: logits within 1e-4 of the run that loads everything (float32).

    Both places compute with the same kernel here, so tokens of the golden runs, whose decisions
    are all more than 1e-4 apart, come out the same too.
    """
    settings = {"policy": "oled", "experts_per_layer": 3}
    with open_engine("llada2_a", "emulated", **settings) as engine:
        check_runs(engine, "llada2_a", "v20", every=2)
        run = golden_runs("llada2_a", "v20")[0]
        stats = engine.generate(run["prompt_ids"], params_of(run, "v20")).stats
        assert stats.cpu_expert_runs > 0
        token_ids = torch.tensor(run["prompt_ids"])
        with_cpu, _, _ = run_forward(engine, token_ids, 8, 0)
    with open_engine("llada2_a", "emulated", cpu_experts=False, **settings) as engine:
        without, _, _ = run_forward(engine, token_ids, 8, 0)
    torch.testing.assert_close(with_cpu, without, atol=1e-4, rtol=0)


@pytest.mark.parametrize("version", ["v20", "v21"])
def test_confidences_and_routing_per_step(version: str) -> None:
    """Every step's block, acceptance and confidence, and the routing of every layer."""
    expected = load_file(GOLDEN / "llada2_a" / f"generate_{version}.safetensors")
    num_routed = 0
    with open_engine("llada2_a", experts_per_layer=4) as engine:
        demands: list[LayerDemand] = []

        def watch(demand: LayerDemand, plan: LayerPlan) -> None:
            if demand.context.is_denoise:
                demands.append(demand)

        engine.experts.observers.append(watch)
        for run in golden_runs("llada2_a", version):
            name = run["name"]
            demands.clear()
            events = list(engine.stream(run["prompt_ids"], params_of(run, version)))
            after = torch.tensor([event.token_ids for event in events]).int()
            assert torch.equal(after, expected[f"{name}.block_ids_after"])
            confidence = expected[f"{name}.confidence"]
            changed = expected[f"{name}.accepted"].bool()
            if version == "v21":
                changed |= expected[f"{name}.edited"].bool()
            for step, event in enumerate(events):
                for change in event.changes:
                    place = change.position - event.block_start
                    assert changed[step, place]
                    assert abs(change.confidence - float(confidence[step, place])) < 1e-5
                assert len(event.changes) == int(changed[step].sum())
            for layer in range(1, 4):
                key = f"{name}.trace.layers.{layer}.topk_idx"
                if key in expected:
                    # A folded commit's tokens come first.
                    length = run["args"]["block_length"]
                    seen = [d.topk_ids[-length:] for d in demands if d.layer == layer - 1]
                    assert np.array_equal(np.stack(seen), expected[key].numpy())
                    num_routed += 1
    assert num_routed
