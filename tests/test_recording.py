"""Recording from a live engine: what is in the trace is what observers saw."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.engine import Engine
from oled_moe.errors import ConfigError
from oled_moe.recording import OPTIONAL, PromptToRecord, record_trace
from oled_moe.traces import RoutingTrace
from oled_moe.types import ForwardOutcome, LayerDemand, LayerPlan, Phase, TokenState

PARAMS = SamplingParams(max_tokens=20, threshold=0.99, ignore_eos=True)
PROMPTS = [
    PromptToRecord("What is 17 plus 25?", "first", "math"),
    PromptToRecord(list(range(20, 40)), "second", "ids"),
]


class Seen:
    """Everything observers are shown, copied."""

    def __init__(self, engine: Engine) -> None:
        self.demands: list[LayerDemand] = []
        self.outcomes: list[ForwardOutcome] = []
        engine.experts.observers.append(self.demand)
        engine.outcome_observers.append(self.outcomes.append)

    def demand(self, demand: LayerDemand, plan: LayerPlan) -> None:
        self.demands.append(demand)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("demo", EngineConfig(experts_per_layer=30, policy="lfu", threads=1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def recorded(engine: Engine) -> tuple[RoutingTrace, Seen]:
    seen = Seen(engine)
    trace = record_trace(engine, PROMPTS, PARAMS, include=OPTIONAL)
    engine.experts.observers.remove(seen.demand)
    engine.outcome_observers.clear()
    return trace, seen


def test_the_trace_is_what_observers_saw(recorded: tuple[RoutingTrace, Seen]) -> None:
    trace, seen = recorded
    forwards = list(trace.forwards(["gate_scores", "input_embedding", "token_ids"]))
    assert len(forwards) == len(seen.outcomes)
    first_id = seen.outcomes[0].context.forward_id
    first_request = seen.outcomes[0].context.rows[0].request_id
    demands = iter(seen.demands)
    for forward, outcome in zip(forwards, seen.outcomes, strict=True):
        context, live = forward.context, outcome.context
        assert context.forward_id == live.forward_id - first_id
        assert context.block_length == live.block_length
        for row, live_row in zip(context.rows, live.rows, strict=True):
            assert row == replace(live_row, request_id=live_row.request_id - first_request)
        for name in ("token_confidence", "token_state", "token_position", "token_ids"):
            np.testing.assert_array_equal(getattr(context, name), getattr(live, name))
        for name in ("token_confidence", "token_accepted"):
            np.testing.assert_array_equal(getattr(forward.outcome, name), getattr(outcome, name))
        for demand in forward.demands:
            shown = next(demands)
            assert demand.layer == shown.layer
            for name in ("topk_ids", "gate_weights", "expert_ids", "num_tokens"):
                np.testing.assert_array_equal(getattr(demand, name), getattr(shown, name))
            assert shown.gate_scores is not None and demand.gate_scores is not None
            np.testing.assert_allclose(demand.gate_scores, shown.gate_scores, atol=1e-3)
            # The last layer sees the rows that denoise.
            assert demand.context.rows == tuple(
                row
                for row in context.rows
                if demand.layer < trace.num_moe_layers - 1 or row.phase == Phase.DENOISE
            )
            embeddings = demand.context.input_embedding, shown.context.input_embedding
            assert embeddings[0] is not None and embeddings[1] is not None
            np.testing.assert_allclose(*embeddings, atol=1e-2)
    assert next(demands, None) is None


def test_the_header_says_what_was_run(recorded: tuple[RoutingTrace, Seen]) -> None:
    trace, _ = recorded
    assert (trace.source, trace.model_type, trace.model_name) == ("recorded", "llada2_moe", "demo")
    assert (trace.num_moe_layers, trace.num_experts, trace.top_k) == (6, 96, 6)
    assert trace.expert_bytes == 3 * 128 * 32 * 2
    assert (trace.block_length, trace.threshold) == (16, 0.99)
    first, second = trace.requests
    assert (first.id, first.workload, second.id, second.workload) == (
        "first",
        "math",
        "second",
        "ids",
    )
    assert second.num_prompt_tokens == 20 and second.num_generated_tokens == 20
    assert trace.extra["recording"]["policy"] == "lfu"
    one = trace.select_requests([0])
    num_prompt = (one.token_state == 0).any() and one.token_position[one.token_state == 0].max() + 1
    assert first.num_prompt_tokens == num_prompt


def test_last_layers_of_prefills_and_commits_are_skipped(
    recorded: tuple[RoutingTrace, Seen],
) -> None:
    trace, _ = recorded
    skipped = trace.is_skipped
    assert {Phase.PREFILL, Phase.DENOISE, Phase.COMMIT} == set(trace.row_phase.tolist())
    np.testing.assert_array_equal(skipped[:, -1], trace.row_phase != Phase.DENOISE)
    assert not skipped[:, :-1].any()


def test_a_folded_commit_is_two_rows_of_one_forward(recorded: tuple[RoutingTrace, Seen]) -> None:
    trace, _ = recorded
    commits = (trace.row_phase == Phase.COMMIT).nonzero()[0]
    assert len(commits) > 0
    for name, step in (("row_forward", 0), ("row_request", 0), ("row_block", 1)):
        rows = getattr(trace, name)
        np.testing.assert_array_equal(rows[commits + 1], rows[commits] + step)
    assert (trace.row_phase[commits + 1] == Phase.DENOISE).all()
    assert (trace.row_step[commits + 1] == 0).all()
    # Nobody else shares a forward.
    assert trace.num_rows - trace.num_forwards == len(commits)


def test_every_denoised_position_has_a_confidence(recorded: tuple[RoutingTrace, Seen]) -> None:
    trace, _ = recorded
    is_denoise = trace.row_phase[trace.token_row()] == Phase.DENOISE
    np.testing.assert_array_equal(np.isnan(trace.token_confidence), ~is_denoise)
    assert (trace.token_state[is_denoise] != TokenState.MASKED).any()


def test_nothing_of_it_depends_on_policy_or_capacity(recorded: tuple[RoutingTrace, Seen]) -> None:
    trace, _ = recorded
    config = EngineConfig(experts_per_layer=96, policy="oled", threads=1)
    with Engine("demo", config) as engine:
        other = record_trace(engine, PROMPTS, PARAMS)
    for name in ("row_forward", "expert_ids", "gate_weights", "token_accepted", "token_ids"):
        np.testing.assert_array_equal(getattr(other, name), getattr(trace, name))
    assert other.hidden_cosine is None and other.gate_scores is None


def test_hidden_cosine_compares_layer_inputs(engine: Engine) -> None:
    """Against inputs gathered by hand; the probe that was there sees everything too."""
    inputs: list[torch.Tensor] = []

    def probe(name: str, value: torch.Tensor) -> None:
        if name == "layers.0.layer_out":
            inputs.append(value.float().clone())

    engine.model.probe = probe
    try:
        trace = record_trace(engine, PROMPTS[:1], PARAMS, include=("hidden_cosine",))
        assert engine.model.probe is probe
    finally:
        engine.model.probe = None
    states = torch.cat(inputs).numpy()
    before = trace.previous_token()
    assert trace.hidden_cosine is not None and len(states) == trace.num_tokens
    assert np.isnan(trace.hidden_cosine[before < 0]).all()
    now, then = states[before >= 0], states[before[before >= 0]]
    norms = np.linalg.norm(now, axis=1) * np.linalg.norm(then, axis=1)
    np.testing.assert_allclose(
        trace.hidden_cosine[before >= 0, 0], (now * then).sum(axis=1) / norms, atol=1e-4
    )


def test_an_interrupted_recording_leaves_the_engine_as_it_was(engine: Engine) -> None:
    before = len(engine.experts.observers), len(engine.outcome_observers)

    def interrupt(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_trace(engine, PROMPTS, PARAMS, include=OPTIONAL, progress=interrupt)
    assert (len(engine.experts.observers), len(engine.outcome_observers)) == before
    assert not engine.experts.wants_gate_scores and not engine.wants_input_embedding
    assert not engine.wants_all_logits
    assert engine.model.probe is None
    assert record_trace(engine, PROMPTS[:1], PARAMS).num_forwards > 0


def test_wrong_arguments_are_named(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        record_trace(engine, [], PARAMS)
    with pytest.raises(ConfigError, match="thoughts"):
        record_trace(engine, PROMPTS, PARAMS, include=["thoughts"])
