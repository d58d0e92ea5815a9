"""Block routing (`expert_capacity`) against a plain reading of the rule, alone and in company.

The rule: an expert's score for a block is the best that any token of the block gives it (sigmoid
plus bias); the best `expert_capacity` are admitted; each token takes its best K of these.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from checkpoints import synthetic_llada2, write_checkpoint
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st

from oled_moe.cli import main
from oled_moe.config import DecodingParams, EngineConfig, SamplingParams
from oled_moe.decoding import BlockDiffusionDecoder, DecodingCounters
from oled_moe.engine import Engine
from oled_moe.errors import CheckpointError, ConfigError
from oled_moe.kernels.rows import admit, choose_within
from oled_moe.layers import ForwardBatch, Segment
from oled_moe.models.llada2_moe import Config
from oled_moe.types import ForwardContext, ForwardRow, IntArray, LayerDemand, LayerPlan, Phase

B, K, E, C = 8, 3, 24, 7
VALUES: dict[str, Any] = {
    "model_type": "llada2_moe",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": E,
    "num_experts_per_tok": K,
    "n_group": 4,
    "topk_group": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256,
    "mask_token_id": 57,
    "eos_token_id": 56,
}
ROUTED = VALUES | {"expert_capacity": C, "block_size": B}
PARAMS = SamplingParams(max_tokens=30, threshold=0.3, ignore_eos=True)
# Lengths that divide and that do not, none, one, and several blocks.
PROMPTS = [[], [5], list(range(8)), list(range(3, 24)), list(range(40)), [7] * 27]


def weights_of(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    weights = synthetic_llada2(values, seed=11)
    # Sharper logits: confidences then spread over the whole range.
    weights["lm_head.weight"] *= 12
    return weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("routed"), weights_of(ROUTED), ROUTED)


def open_engine(path: Path, **settings: Any) -> Engine:
    return Engine(path, EngineConfig(**{"experts_per_layer": E} | settings))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with open_engine(model, max_num_seqs=6) as engine:
        yield engine


class Seen:
    """Demands of everything that an engine runs meanwhile, with all router scores."""

    def __init__(self, engine: Engine) -> None:
        self.demands: list[LayerDemand] = []
        self._engine = engine

    def __call__(self, demand: LayerDemand, plan: LayerPlan) -> None:
        self.demands.append(demand)

    def __enter__(self) -> "Seen":
        self._engine.experts.wants_gate_scores = True
        self._engine.experts.observers.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.experts.wants_gate_scores = False
        self._engine.experts.observers.remove(self)


def blocks_of(demand: LayerDemand) -> Iterator[npt.NDArray[np.int64]]:
    """Which tokens each block has, found token by token."""
    context = demand.context
    assert context.token_position is not None
    token = 0
    for row in context.rows:
        by_block: dict[int, list[int]] = {}
        for _ in range(row.num_tokens):
            by_block.setdefault(int(context.token_position[token]) // B, []).append(token)
            token += 1
        yield from map(np.array, by_block.values())


def expected_routing(
    choice: npt.NDArray[np.float32], scores: npt.NDArray[np.float32]
) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """The rule for the tokens of one block: ids best first, and shares."""
    best = [max(float(row[e]) for row in choice) for e in range(E)]
    admitted = sorted(range(E), key=lambda e: (-best[e], e))[:C]
    ids = [sorted(admitted, key=lambda e, row=row: (-row[e], e))[:K] for row in choice]
    chosen = np.take_along_axis(scores.astype(np.float64), np.array(ids), axis=1)
    return np.array(ids), chosen / chosen.sum(1, keepdims=True)


def check_demands(seen: Seen, weights: dict[str, torch.Tensor]) -> None:
    for demand in seen.demands:
        bias = weights[f"model.layers.{demand.layer + 1}.mlp.gate.expert_bias"].numpy()
        assert demand.gate_scores is not None
        for tokens in blocks_of(demand):
            scores = demand.gate_scores[tokens]
            ids, shares = expected_routing(scores + bias, scores)
            assert np.array_equal(demand.topk_ids[tokens], ids)
            np.testing.assert_allclose(demand.gate_weights[tokens], shares, rtol=1e-5)
            assert len(np.unique(demand.topk_ids[tokens])) <= C


def test_every_block_of_whole_answers_follows_the_rule(engine: Engine) -> None:
    with Seen(engine) as seen:
        for prompt in PROMPTS:
            engine.generate(prompt, PARAMS)
    check_demands(seen, weights_of(ROUTED))
    phases = {tuple(row.phase for row in demand.context.rows) for demand in seen.demands}
    assert {(Phase.PREFILL,), (Phase.DENOISE,), (Phase.COMMIT, Phase.DENOISE)} <= phases
    # Forwards of several blocks take more than one block may.
    assert any(len(demand.expert_ids) > C for demand in seen.demands)


def test_native_kernels_follow_the_rule_too(tmp_path: Path) -> None:
    weights = synthetic_llada2(ROUTED, seed=11, dtype=torch.bfloat16)
    write_checkpoint(tmp_path, weights, ROUTED)
    with open_engine(tmp_path) as engine, Seen(engine) as seen:
        engine.generate(PROMPTS[3], PARAMS)
    check_demands(seen, weights)


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[list[int]]:
    return [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("slots", [E, E // 2, E // 10])
@pytest.mark.parametrize("policy", ["oled", "oled+prefetch"])
def test_tokens_are_the_same_at_every_capacity(
    model: Path, answers: list[list[int]], slots: int, policy: str
) -> None:
    with open_engine(model, experts_per_layer=slots, policy=policy) as engine:
        assert [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS] == answers


def test_tokens_are_the_same_on_an_emulated_device(model: Path, answers: list[list[int]]) -> None:
    with open_engine(model, device="emulated", cpu_experts=False, experts_per_layer=5) as engine:
        assert [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS] == answers


def test_tokens_are_the_same_alone_and_in_company(engine: Engine, answers: list[list[int]]) -> None:
    with Seen(engine) as seen:
        running = {i: engine.begin(engine.check(p, PARAMS)) for i, p in enumerate(PROMPTS)}
        found: dict[int, list[int]] = {}
        while running:
            events = engine.denoise(list(running.values()))
            for number, event in zip(list(running), events, strict=True):
                if event.result is not None:
                    found[number] = event.result.token_ids
                    engine.end(running.pop(number))
    assert [found[number] for number in range(len(PROMPTS))] == answers
    phases = {tuple(row.phase for row in demand.context.rows) for demand in seen.demands}
    assert any({*Phase} == set(each) for each in phases) or any(
        {Phase.PREFILL, Phase.DENOISE} == set(each) and len(each) > 3 for each in phases
    )
    check_demands(seen, weights_of(ROUTED))


@pytest.mark.parametrize("folds", [True, False])
def test_tokens_are_the_same_folded_and_not(
    engine: Engine, answers: list[list[int]], folds: bool
) -> None:
    decoder = BlockDiffusionDecoder(
        engine.model,
        start_forward=engine.start_forward,
        end_forward=engine.experts.end_forward,
        folds_commit=folds,
    )
    params = DecodingParams.resolve(PARAMS.with_defaults(engine.sampling_defaults))
    for number, prompt in enumerate(PROMPTS):
        counters = DecodingCounters()
        *_, last = decoder.decode(prompt, params, counters=counters, request_id=900 + number)
        assert list(last.answer_ids) == answers[number]
        assert (counters.num_commit_forwards > 0) != folds


def run_blocks(engine: Engine, ids: list[int], sizes: list[int]) -> tuple[torch.Tensor, Seen]:
    """Logits of one sequence given in parts of whole blocks, each behind what was given before."""
    kv, logits, start = engine.model.new_kv(len(ids)), [], 0
    with Seen(engine) as seen:
        for size in sizes:
            end = start + size
            context = ForwardContext(
                0,
                B,
                (ForwardRow(800, 0, 0, Phase.DENOISE, size),),
                np.ones(size, np.float32),
                np.zeros(size, np.uint8),
                np.arange(start, end),
            )
            batch = ForwardBatch(
                torch.tensor(ids[start:end]),
                torch.arange(start, end),
                (Segment(kv, size, True),),
                context,
            )
            engine.start_forward(context)
            found = engine.model.forward(batch)
            assert found is not None
            logits.append(found)
            kv.advance(size)
            start = end
    return torch.cat(logits), seen


def test_blocks_route_the_same_at_once_and_behind_a_prefix(engine: Engine) -> None:
    ids = np.random.default_rng(4).integers(0, 56, 4 * B).tolist()
    whole, at_once = run_blocks(engine, ids, [4 * B])
    for sizes in ([B] * 4, [2 * B, B, B]):
        parts, one_by_one = run_blocks(engine, ids, sizes)
        torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)
        for layer in range(3):
            joined = [d.topk_ids for d in one_by_one.demands if d.layer == layer]
            (expected,) = [d.topk_ids for d in at_once.demands if d.layer == layer]
            assert np.array_equal(np.concatenate(joined), expected)


# --- the two functions by themselves, with real ties


blocks = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(blocks, st.integers(1, 12), st.data())
@bounded(60)
def test_admission_and_choice_with_ties(sizes: list[int], capacity: int, data: Any) -> None:
    numbers = st.lists(st.integers(-2, 2), min_size=12, max_size=12)
    rows = data.draw(st.lists(numbers, min_size=sum(sizes), max_size=sum(sizes)))
    choice = torch.tensor(rows, dtype=torch.float32)
    is_admitted = admit(choice, sizes, capacity)
    top_k = min(3, capacity)
    ids = choose_within(choice, is_admitted, top_k=top_k)
    start = 0
    for size in sizes:
        block = rows[start : start + size]
        best = [max(row[e] for row in block) for e in range(12)]
        admitted = sorted(range(12), key=lambda e: (-best[e], e))[:capacity]
        for token in range(start, start + size):
            assert is_admitted[token].nonzero().flatten().tolist() == sorted(admitted)
            order = sorted(admitted, key=lambda e: (-rows[token][e], e))
            assert ids[token].tolist() == order[:top_k]
        start += size


# --- configs


def config_of(**changes: Any) -> Config:
    return Config.from_hf(ROUTED | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"expert_capacity": K - 1}, f"expert_capacity is 2; .*{K} to {E}"),
        ({"expert_capacity": E + 1}, f"expert_capacity is 25; .*{K} to {E}"),
        ({"expert_capacity": True}, "expert_capacity is True"),
        ({"expert_capacity": 7.0}, "expert_capacity is 7.0"),
        ({"expert_capacity": "48"}, "expert_capacity is '48'"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": "32"}, "block_size is '32'"),
    ],
)
def test_bad_configs_name_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        config_of(**changes)


def test_without_the_key_there_is_no_block_routing() -> None:
    for values in (VALUES, VALUES | {"block_size": 32}, ROUTED | {"expert_capacity": None}):
        config = Config.from_hf(values)
        assert config.expert_capacity is None and config.block_size is None
        assert config.decoding.block_length is None
    assert config_of(block_size=None).decoding.block_length is None


def test_the_same_weights_without_the_key_route_by_groups(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, weights_of(ROUTED), VALUES)
    with open_engine(tmp_path) as engine, Seen(engine) as seen:
        engine.generate(PROMPTS[2], SamplingParams(max_tokens=16, block_length=B))
    sizes = [len(np.unique(d.topk_ids[tokens])) for d in seen.demands for tokens in blocks_of(d)]
    assert max(sizes) > C


def test_blocks_of_another_length_are_refused(engine: Engine) -> None:
    assert engine.sampling_defaults.block_length == B
    with pytest.raises(ConfigError, match=f"is 16; allowed for this model: {B}.*routes by blocks"):
        engine.generate([1], SamplingParams(max_tokens=16, block_length=16))
    assert engine.generate([1], SamplingParams(max_tokens=8, block_length=B)).token_ids


def test_without_block_size_blocks_are_those_of_the_request(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, weights_of(ROUTED), ROUTED | {"block_size": None})
    with open_engine(tmp_path) as engine, Seen(engine) as seen:
        engine.generate([1, 2, 3], SamplingParams(max_tokens=20, block_length=4))
    assert {row.num_tokens for d in seen.demands for row in d.context.rows} == {4}
    assert all(len(np.unique(d.topk_ids[:4])) <= C for d in seen.demands)


# --- what is said of it


WORDS = "admits 7 of 24 experts of a layer"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_commands_say_what_bounds_the_active_set(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert WORDS in said(capsys, "inspect", str(model))
    assert WORDS in said(capsys, "plan", str(model), "--prompt-tokens", "32")
    short = ["--max-tokens", "8", "--prompt-ids", "1,2"]
    assert WORDS in said(capsys, "generate", str(model), "--threads", "1", *short)
    assert json.loads(said(capsys, "inspect", str(model), "--json"))["expert_capacity"] == C
