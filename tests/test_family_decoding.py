"""Decoding of SDAR-MoE, LLaDA-MoE and RND1 against golden runs, and what canvases have to keep."""

import json
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FAST_LINK
from safetensors.torch import load_file

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.canvas import CanvasSequence
from oled_moe.config import (
    ALGORITHMS,
    TRAINED_ALGORITHMS,
    UNTRAINED_ALGORITHMS,
    DecodingParams,
    Grammar,
)
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.engine import GenerationResult, StepEvent
from oled_moe.errors import ConfigError, InputError
from oled_moe.kernels.linear import head_logits
from oled_moe.layers import LOGIT_ROWS, ForwardBatch, RowLogits, Segment
from oled_moe.recording import PromptToRecord, record_trace
from oled_moe.sampling import guess
from oled_moe.scheduler import Scheduler
from oled_moe.traces import load_trace, save_trace
from oled_moe.types import (
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    LayerDemand,
    LayerPlan,
    Phase,
    TokenState,
)
from oled_moe.unmasking import UNMASKING, BlockState, BlockUpdate

GOLDEN = Path(__file__).parent / "golden"
MODELS = ("sdar_moe", "llada_moe", "rnd1")
MASK, PAD, EOS = 297, 295, 296
Run = dict[str, Any]


def runs_of(model: str) -> list[Run]:
    runs: list[Run] = json.loads((GOLDEN / model / "generate.json").read_text())
    return runs


RUNS = [(model, run) for model in MODELS for run in runs_of(model)]


def open_engine(model: str, **settings: Any) -> Engine:
    is_emulated = settings.get("device") == "emulated"
    profile = DEFAULT_EMULATED_PROFILE if is_emulated else DEFAULT_PROFILE
    return Engine(GOLDEN / model, EngineConfig(**{"device": "cpu", "hardware": profile} | settings))


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    found = {model: open_engine(model, experts_per_layer=8, max_num_seqs=4) for model in MODELS}
    yield found
    for engine in found.values():
        engine.close()


def params_of(model: str, run: Run) -> SamplingParams:
    return SamplingParams.from_reference(model, run["args"])


def answer_of(model: str, run: Run) -> list[int]:
    """The answer in the reference's canvas: behind the prompt, cut at its end."""
    args, answer = run["args"], run["output_ids"][len(run["prompt_ids"]) :]
    if model == "rnd1":
        answer = answer if args.get("add_eos_at_end") else answer[:-1]
        ends = [args["eos_token_id"]]
    else:
        answer = answer[: args["gen_length"]]
        ends = args.get("stopping_criteria_idx", []) if model == "sdar_moe" else [args["eos_id"]]
    places = [place for place, token in enumerate(answer) if token in ends]
    return answer[: places[0] + 1] if places else answer


def check(engine: Engine, model: str, run: Run) -> GenerationResult:
    result = engine.generate(run["prompt_ids"], params_of(model, run))
    assert result.token_ids == answer_of(model, run), run["name"]
    num_forwards = run.get("num_denoise_forwards", run.get("num_forwards"))
    assert result.stats.num_denoise_forwards == num_forwards, run["name"]
    return result


# --- golden runs


@pytest.mark.parametrize("capacity", [16, 8, 1.6])
@pytest.mark.parametrize("model", MODELS)
def test_golden_runs(model: str, capacity: float) -> None:
    with open_engine(model, experts_per_layer=capacity) as engine:
        for run in runs_of(model):
            result = check(engine, model, run)
            ends = ("dynamic_b8_stop", "b8_t60_eos", "add_eos")
            assert result.finish_reason == ("stop" if run["name"] in ends else "length")
            assert len(result.probabilities) == len(result.token_ids)


@pytest.mark.parametrize("policy", ["naive-lru", "oled+", "oled+prefetch"])
def test_golden_runs_with_every_kind_of_policy(policy: str) -> None:
    for model in MODELS:
        settings = {"policy": policy, "experts_per_layer": 3, "hardware": FAST_LINK}
        with open_engine(model, device="emulated", cpu_experts=False, **settings) as engine:
            for run in runs_of(model)[::3]:
                check(engine, model, run)


@pytest.mark.parametrize("model", MODELS)
def test_every_step_of_the_golden_runs(model: str, engines: dict[str, Engine]) -> None:
    """Tokens, acceptances and confidences of each forward, and routing where it is there."""
    expected, engine = load_file(GOLDEN / model / "generate.safetensors"), engines[model]
    demands: list[LayerDemand] = []

    def watch(demand: LayerDemand, plan: LayerPlan) -> None:
        if demand.context.is_denoise:
            demands.append(demand)

    engine.experts.observers.append(watch)
    num_compared = 0
    for run in runs_of(model):
        name, num_prompt = run["name"], len(run["prompt_ids"])
        if f"{name}.accepted" not in expected:
            continue
        demands.clear()
        events = list(engine.stream(run["prompt_ids"], params_of(model, run)))
        after = expected.get(f"{name}.block_ids_after", expected.get(f"{name}.ids_after"))
        assert after is not None and len(after) == len(events)
        for step, event in enumerate(events):
            start = 0 if model == "sdar_moe" else event.block_start
            stop = start + len(event.token_ids)
            assert list(event.token_ids) == after[step, start:stop].tolist()
            accepted = expected[f"{name}.accepted"][step, start:stop].bool().tolist()
            changed = [False] * len(accepted)
            for change in event.changes:
                changed[change.position - event.block_start] = True
            assert changed == accepted
            for change in event.changes:
                place = change.position - (event.block_start if model == "sdar_moe" else 0)
                if model == "rnd1":
                    wanted = float(expected[f"{name}.log_confidence_shifted"][step, place].exp())
                elif "eos" in name and change.to_id == run["args"]["eos_id"]:
                    continue
                else:
                    wanted = float(expected[f"{name}.confidence"][step, place])
                assert change.confidence == pytest.approx(wanted, abs=1e-5)
                num_compared += 1
            if event.result is None:
                first_mask = event.is_masked.index(True) if any(event.is_masked) else stop - start
                num_final = max(0, event.block_start + first_mask - num_prompt)
                if event.is_block_done:
                    num_final = event.block_start + len(event.token_ids) - num_prompt
                assert len(event.answer_ids) == num_final
        for layer in range(3):
            key = f"{name}.trace.layers.{layer}.topk_idx"
            if key in expected:
                size = expected[key].shape[1]
                seen = [d.topk_ids[-size:] for d in demands if d.layer == layer]
                assert np.array_equal(np.stack(seen), expected[key].numpy())
    engine.experts.observers.remove(watch)
    assert num_compared > 50


def test_entropies_are_the_references(engines: dict[str, Engine]) -> None:
    """RND1's order comes from them: each step's largest and smallest agree with the golden ones."""
    expected, engine = load_file(GOLDEN / "rnd1" / "generate.safetensors"), engines["rnd1"]
    seen: list[torch.Tensor] = []
    forward = engine.model.forward

    def watch(batch: Any) -> Any:
        logits = forward(batch)
        assert logits is not None
        seen.append(logits.whole())
        return logits

    for run in runs_of("rnd1"):
        chosen = DecodingParams.resolve(params_of("rnd1", run))
        seen.clear()
        engine.model.forward = watch  # type: ignore[method-assign]
        engine.generate(run["prompt_ids"], params_of("rnd1", run))
        engine.model.forward = forward  # type: ignore[method-assign]
        for step, logits in enumerate(seen):
            masked = expected[f"{run['name']}.ids_before"][step] == MASK
            found = guess(logits, chosen, None, entropy_of="filtered")
            wanted = expected[f"{run['name']}.entropy_shifted"][step][masked].numpy()
            assert found.entropy == pytest.approx(wanted, abs=1e-4)
            ids = expected[f"{run['name']}.pred_ids_shifted"][step][masked].tolist()
            assert found.token_ids.tolist() == ids


# --- SDAR's bound on entropies, which no reference runs


def bounded(logits: torch.Tensor, masked: list[int], bound: float, temperature: float) -> list[int]:
    """Positions that models.md 6 accepts, in plain numbers."""
    entropies = {}
    for place in masked:
        scaled = [value / temperature for value in logits[place].double().tolist()]
        weights = [math.exp(value - max(scaled)) for value in scaled]
        shares = [weight / sum(weights) for weight in weights]
        entropies[place] = -sum(share * math.log(share) for share in shares if share)
    taken, total = [], 0.0
    for place in sorted(masked, key=entropies.__getitem__):
        total += entropies[place]
        if taken and total >= bound:
            break
        taken.append(place)
    return sorted(taken)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("bound", [0.0, 0.35, 1.5, 6.0, 1000.0])
def test_entropy_bounded_on_random_logits(bound: float, temperature: float) -> None:
    random = torch.Generator().manual_seed(int(10 * bound + 100 * temperature))
    params = DecodingParams.resolve(
        SamplingParams(
            algorithm="entropy_bounded",
            block_length=8,
            eb_threshold=bound,
            temperature=temperature,
            greedy=True,
            mask_token_id=29,
        )
    )
    sizes = set()
    for _ in range(20):
        state = BlockState.start([1], block_length=8, mask_id=29)
        state.is_masked[torch.randint(1, 8, (3,), generator=random).numpy()] = False
        logits = torch.randn(8, 30, generator=random) * 4
        masked = state.is_masked.nonzero()[0].tolist()
        policy = UNMASKING["entropy_bounded"](params)
        is_seen = policy.looked_at(state)
        found = guess(logits[is_seen].clone(), params, None, entropy_of=policy.entropy_of)
        update = policy.update(state, found.spread(is_seen))
        wanted = bounded(logits, masked, bound, temperature)
        assert update.accepted.nonzero()[0].tolist() == wanted
        sizes.add(len(wanted))
    assert sizes == {1} if not bound else bound not in (1.5, 6.0) or len(sizes) > 1


def test_entropy_bounded_of_a_model(engines: dict[str, Engine]) -> None:
    """Against whole canvases through the same model, without cache."""
    engine, prompt, length = engines["sdar_moe"], [5, 4, 3, 2, 1], 4
    params = SamplingParams(
        algorithm="entropy_bounded",
        block_length=length,
        max_tokens=11,
        eb_threshold=3.0,
        temperature=0.8,
        greedy=True,
        ignore_eos=True,
    )
    events = list(engine.stream(prompt, params))
    canvas, hole = [*prompt, *[MASK] * 11], [False] * 5 + [True] * 11
    for event in events:
        end = event.block_start + length
        kv = engine.model.new_kv(end)
        logits = forward_of(engine, kv, torch.tensor(canvas[:end]), 0, block_length=length)
        masked = [place for place in range(event.block_start, end) if hole[place]]
        taken = bounded(logits, masked, 3.0, 0.8)
        assert [change.position for change in event.changes] == taken
        logits[:, MASK] = -torch.inf
        for place in taken:
            canvas[place], hole[place] = int(logits[place].argmax()), False
        assert list(event.token_ids) == canvas[event.block_start : end]
    assert not any(hole) and len({len(event.changes) for event in events}) > 1


# --- what a canvas is


def watched(
    engine: Engine, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[StepEvent], list[ForwardOutcome]]:
    outcomes: list[ForwardOutcome] = []
    engine.outcome_observers.append(outcomes.append)
    events = list(engine.stream(prompt, params))
    engine.outcome_observers.remove(outcomes.append)
    return events, outcomes


@pytest.mark.parametrize("wants_all", [False, True])
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llada_moe", {"algorithm": "threshold", "threshold": 0.5, "block_length": 4}),
        ("llada_moe", {"algorithm": "hierarchy_remasking", "block_length": 4}),
        ("rnd1", {"steps": 7}),
    ],
)
def test_contexts_of_a_canvas(
    model: str, settings: dict[str, Any], wants_all: bool, engines: dict[str, Engine]
) -> None:
    """What policies see: the canvas as it stands, never more than earlier forwards told."""
    engine, prompt = engines[model], [5, 7, MASK, 11, 13]
    engine.wants_all_logits = wants_all
    events, outcomes = watched(engine, prompt, SamplingParams(max_tokens=10, **settings))
    engine.wants_all_logits = False
    assert len(events) == len(outcomes)
    length = 5 + (12 if model == "llada_moe" else 11)
    tokens, is_masked = [*prompt, *[MASK] * (length - 5)], [False] * 5 + [True] * (length - 5)
    if model == "rnd1":
        tokens[-1], is_masked[-1] = PAD, False
    latest: dict[int, float] = {}
    for event, outcome in zip(events, outcomes, strict=True):
        context = outcome.context
        assert context.block_length == length == context.num_tokens and len(context.rows) == 1
        assert context.rows[0].phase is Phase.DENOISE and context.is_denoise
        assert context.rows[0].block_id == event.block_id >= 5 // len(event.token_ids)
        assert context.token_position is not None and context.token_ids is not None
        assert context.token_position.tolist() == list(range(length))
        masked = context.token_state == TokenState.MASKED
        assert masked.tolist() == is_masked
        assert (context.token_state[:5] == TokenState.PROMPT).all()
        assert context.token_ids[~masked].tolist() == [
            t for t, hole in zip(tokens, is_masked, strict=True) if not hole
        ]
        assert (context.token_confidence[~masked] == 1).all()
        for place in masked.nonzero()[0].tolist():
            assert context.token_confidence[place] == pytest.approx(latest.get(place, 0.5))
        block = slice(event.block_start, event.block_start + len(event.token_ids))
        is_known = ~np.isnan(outcome.token_confidence)
        assert is_known[block][masked[block]].all() and not is_known[: block.start].any()
        assert not wants_all or is_known[block].all()
        assert not is_known[block.stop :].any()
        accepted = [c.position for c in event.changes if is_masked[c.position]]
        assert outcome.token_accepted.nonzero()[0].tolist() == accepted
        latest = {place: float(outcome.token_confidence[place]) for place in is_known.nonzero()[0]}
        tokens[block], is_masked[block] = list(event.token_ids), list(event.is_masked)


def test_masks_in_prompts_are_prompt(engines: dict[str, Engine]) -> None:
    for model in MODELS:
        result = engines[model].generate([MASK, 3, MASK], SamplingParams(max_tokens=9))
        assert len(result.token_ids) <= 9 and MASK not in result.token_ids


@pytest.mark.parametrize("algorithm", UNTRAINED_ALGORITHMS)
@pytest.mark.parametrize("model", ["sdar_moe", "llada_moe"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_algorithm_fills_every_block(
    model: str, algorithm: str, temperature: float, engines: dict[str, Engine]
) -> None:
    """Without company and with it, at any place in the schedule; text that was final stays."""
    params = SamplingParams(
        algorithm=algorithm,
        max_tokens=13,
        block_length=6,
        threshold=0.4,
        temperature=temperature,
        top_k=40,
        seed=3,
        ignore_eos=True,
    ).looked_at_by(algorithm)
    events = list(engines[model].stream([1, 2, 3, 4, 5, 6, 7], params))
    result = events[-1].result
    assert result is not None and len(result.token_ids) == 13 and MASK not in result.token_ids
    assert all(0 <= share <= 1.001 for share in result.probabilities)
    for earlier, later in zip(events, events[1:], strict=False):
        assert later.answer_ids[: len(earlier.answer_ids)] == earlier.answer_ids
    again = engines[model].generate([1, 2, 3, 4, 5, 6, 7], params)
    assert again.token_ids == result.token_ids


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("gamma", [None, 0.4])
def test_rnd1_with_filters(greedy: bool, gamma: float | None, engines: dict[str, Engine]) -> None:
    """Where the published code's entropies are no numbers any more."""
    params = SamplingParams(
        max_tokens=15, steps=9, temperature=0.7, top_k=4, top_p=0.9, eb_gamma=gamma, greedy=greedy
    )
    result = engines["rnd1"].generate([9, 8, 7], replace(params, ignore_eos=True))
    assert len(result.token_ids) == 15 and MASK not in result.token_ids
    assert result.stats.num_denoise_forwards <= 9


def test_an_early_stop_ends_rnd1_where_all_before_eos_is_there(
    engines: dict[str, Engine],
) -> None:
    run = runs_of("rnd1")[0]
    whole = engines["rnd1"].generate(run["prompt_ids"], params_of("rnd1", run))
    eos = whole.token_ids[4]
    params = replace(params_of("rnd1", run), eos_token_id=eos)
    num_kept = whole.token_ids.index(eos) + 1
    late = engines["rnd1"].generate(run["prompt_ids"], params)
    assert late.stats.num_denoise_forwards == whole.stats.num_denoise_forwards
    early = engines["rnd1"].generate(run["prompt_ids"], replace(params, eos_early_stop=True))
    for result in (late, early):
        assert result.token_ids == whole.token_ids[:num_kept] and result.finish_reason == "stop"
    assert early.stats.num_denoise_forwards <= late.stats.num_denoise_forwards


def test_llada_decodes_on_without_an_early_stop(engines: dict[str, Engine]) -> None:
    """As the reference does; the answer is the same but for how long it took."""
    (run,) = (run for run in runs_of("llada_moe") if run["name"] == "b8_t60_eos")
    params = replace(params_of("llada_moe", run), eos_early_stop=False)
    late = engines["llada_moe"].generate(run["prompt_ids"], params)
    assert late.finish_reason == "stop" and late.token_ids[-1] == run["args"]["eos_id"]
    assert late.stats.num_denoise_forwards > run["num_forwards"]
    stopped = replace(params, stop_token_ids=[late.token_ids[-1]], eos_token_id=1)
    early = engines["llada_moe"].generate(run["prompt_ids"], stopped)
    assert early.token_ids == late.token_ids
    assert early.stats.num_denoise_forwards < late.stats.num_denoise_forwards


class _Even:
    """A constraint: tokens are even and in order; of 9 tokens the first block is given, all 8."""

    error, num_tokens, is_complete = None, None, False

    def start_block(self, state: BlockState, num_left: int) -> None:
        self.num_open = 0
        if num_left == 9:
            state.token_ids[:], state.is_masked[:] = 8, False
            self.num_open = len(state.token_ids)

    def wants_forward(self, state: BlockState) -> bool:
        return bool(state.is_masked.any())

    def num_final(self, state: BlockState) -> int:
        return self.num_open

    def update(
        self,
        state: BlockState,
        logits_NV: torch.Tensor,
        is_looked_at: Any,
        unmasking: Any,
        draws_N: Any,
    ) -> Any:
        token = 2 * int(logits_NV[0][::2].argmax())
        accepted = np.zeros_like(state.is_masked)
        accepted[self.num_open] = True
        state.token_ids[accepted], state.is_masked[accepted] = token, False
        state.num_steps += 1
        self.num_open += 1
        known = np.where(is_looked_at, np.float32(0.5), np.float32(np.nan))
        return np.where(accepted, token, -1), known, BlockUpdate(accepted, ~accepted & accepted)


@pytest.mark.parametrize(
    ("model", "settings", "num_tokens", "num_forwards"),
    [("llada_moe", {"block_length": 3}, 9, 6), ("rnd1", {}, 8, 8)],
)
def test_constraints_hold_on_a_canvas(
    model: str,
    settings: dict[str, Any],
    num_tokens: int,
    num_forwards: int,
    engines: dict[str, Engine],
) -> None:
    """A block that the constraint fills needs no forward; the others are seen with it in place."""
    engine = engines[model]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **settings)
    prepared = replace(engine.check([3, 4], params), constraint=_Even())
    request = engine.begin(prepared)
    events = []
    while not events or events[-1].result is None:
        events += engine.denoise([request])
    engine.end(request)
    assert len(events) == num_forwards
    answer = events[-1].answer_ids
    assert len(answer) == num_tokens and all(token % 2 == 0 for token in answer)
    assert model == "rnd1" or answer[:3] == (8, 8, 8)
    assert [len(event.answer_ids) for event in events] == list(
        range(num_tokens - len(events) + 1, num_tokens + 1)
    )


# --- caches that are out of date


@pytest.mark.parametrize("kind", ["prefix", "dual"])
def test_cached_forwards_are_whole_ones_while_nothing_changes(
    kind: str, engines: dict[str, Engine]
) -> None:
    """With the tokens of a block's first forward its logits come out again."""
    model, ids = engines["llada_moe"].model, torch.arange(20) * 7 % 290
    kv, start, end = model.new_kv(20), 6, 14
    whole = forward_of(engines["llada_moe"], kv, ids, 0)
    if kind == "prefix":
        kv.advance(start)
        part = forward_of(engines["llada_moe"], kv, ids[start:], start)
        torch.testing.assert_close(part, whole[start:], atol=1e-4, rtol=0)
    else:
        kv.move_behind(start, end - start)
        kv.advance(20 - (end - start))
        part = forward_of(engines["llada_moe"], kv, ids[start:end], start)
        torch.testing.assert_close(part, whole[start:end], atol=1e-4, rtol=0)


def forward_of(
    engine: Engine, kv: Any, ids: torch.Tensor, start: int, *, block_length: int = 20
) -> torch.Tensor:
    size = len(ids)
    rows = (ForwardRow(0, 0, 0, Phase.DENOISE, size),)
    context = ForwardContext(
        0, block_length, rows, np.ones(size, np.float32), np.ones(size, np.uint8)
    )
    positions = torch.arange(start, start + size)
    logits = engine.model.forward(ForwardBatch(ids, positions, (Segment(kv, size, True),), context))
    assert logits is not None
    return logits


@pytest.mark.parametrize("kind", ["none", "prefix", "dual"])
def test_what_a_cache_leaves_to_compute(kind: str, engines: dict[str, Engine]) -> None:
    """The whole canvas once a block, and then what is not kept; the first steps are exact."""
    base = SamplingParams(
        algorithm="low_confidence_static", max_tokens=12, block_length=4, ignore_eos=True
    )
    prompt = [3, 1, 4, 1, 5]
    exact, _ = watched(engines["llada_moe"], prompt, base)
    events, outcomes = watched(engines["llada_moe"], prompt, replace(base, canvas_cache=kind))
    later = {"none": [17, 17, 17], "prefix": [12, 8, 4], "dual": [4, 4, 4]}[kind]
    sizes = [outcome.context.num_tokens for outcome in outcomes]
    assert sizes == [size for rest in later for size in (17, rest, rest, rest)]
    firsts = [outcome.context.token_position for outcome in outcomes]
    wanted = [0 if size == 17 else 5 + i // 4 * 4 for i, size in enumerate(sizes)]
    assert [int(first[0]) for first in firsts if first is not None] == wanted
    for event, outcome in zip(events, outcomes, strict=True):
        start = event.block_start - int(outcome.context.token_position[0])  # type: ignore[index]
        places = [change.position - event.block_start + start for change in event.changes]
        assert outcome.token_accepted.nonzero()[0].tolist() == places
    assert events[0].changes == exact[0].changes
    result = events[-1].result
    assert result is not None and len(result.token_ids) == 12 and MASK not in result.token_ids
    # With nothing before the block and nothing behind it, nothing is out of date.
    for length in (6, 7):
        params = replace(base, max_tokens=length, block_length=length, canvas_cache=kind)
        alone = engines["llada_moe"].generate([], params)
        plain = engines["llada_moe"].generate([], replace(params, canvas_cache="none"))
        assert alone.token_ids == plain.token_ids


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("none", {}),
        ("prefix", {}),
        ("prefix", {"cache_update_freq": 3}),
        ("dual", {"cache_update_freq": 2}),
        ("dual", {"warmup_steps": 2}),
        ("vicinity", {"prefix_look": 2, "after_look": 3, "warmup_steps": 0}),
        ("vicinity", {"prefix_look": 99, "after_look": 1, "warmup_steps": 3}),
        ("vicinity", {"prefix_look": 1, "after_look": 0, "cache_update_freq": 4}),
    ],
)
def test_caches_and_smoothing_by_hand(
    kind: str, settings: dict[str, Any], smooth: bool, engines: dict[str, Engine]
) -> None:
    """Each forward's window and tokens, from windows laid out by hand through the same model."""
    engine, prompt = engines["llada_moe"], [3, 1, 4, 1, 5]
    params = SamplingParams(
        algorithm="threshold",
        threshold=0.55,
        max_tokens=12,
        block_length=4,
        ignore_eos=True,
        canvas_cache=kind,
        **settings,
        **({"cont_weight": 0.2, "cont_weight_growth": 0.01} if smooth else {}),
    )
    events, outcomes = watched(engine, prompt, params)
    steps = by_hand(engine, prompt, engine.check(prompt, params).params)
    assert len(steps) == len(events)
    for (window, tokens), event, outcome in zip(steps, events, outcomes, strict=True):
        positions = outcome.context.token_position
        assert positions is not None and positions.tolist() == list(window)
        assert list(event.token_ids) == tokens


def by_hand(
    engine: Engine, prompt: list[int], params: DecodingParams
) -> list[tuple[range, list[int]]]:
    """Positions of each forward, and the block after it, of an answer by the threshold rule."""
    length, start = len(prompt) + 12, len(prompt)
    canvas, steps, kept = [*prompt, *[MASK] * 12], [], None
    embeddings = engine.model.embed(torch.arange(300))
    inputs = embeddings[canvas].clone()
    while start < length:
        end, is_new = start + 4, True
        while MASK in canvas[start:end]:
            number = len(steps)
            is_due = params.cache_update_freq and number % params.cache_update_freq == 0
            if params.canvas_cache == "none" or is_new or is_due or number <= params.warmup_steps:
                kept = None
            window = range(length)
            if kept is not None:
                window = {
                    "prefix": range(start, length),
                    "dual": range(start, end),
                    "vicinity": range(
                        max(0, start - params.prefix_look), min(length, end + params.after_look)
                    ),
                }[params.canvas_cache]
            kv = engine.model.new_kv(length)
            others = [i for i in range(length) if i not in window]
            if kept is not None:
                for layer, (keys, values) in enumerate(kept):
                    kv.layer(layer)[0][:, : len(others)] = keys[:, others]
                    kv.layer(layer)[1][:, : len(others)] = values[:, others]
                kv.advance(len(others))
            ids = torch.tensor([canvas[i] for i in window])
            inputs[window] = torch.where((ids == MASK)[:, None], inputs[window], embeddings[ids])
            size = len(window)
            rows = (ForwardRow(0, 0, 0, Phase.DENOISE, size),)
            context = ForwardContext(
                0, length, rows, np.ones(size, np.float32), np.ones(size, np.uint8)
            )
            segments = (Segment(kv, size, True),)
            batch = ForwardBatch(ids, torch.tensor(window), segments, context, inputs[window])
            logits = engine.model.forward(batch)
            assert isinstance(logits, torch.Tensor)
            if kept is None:
                kept = [
                    (keys.clone(), values.clone())
                    for keys, values in map(kv.layer, range(engine.model_config.num_layers))
                ]
            shares = logits.softmax(-1)
            guesses = {i: (shares[row], row) for row, i in enumerate(window)}
            threshold = params.threshold
            if params.cont_weight:
                threshold = max(threshold, 1 - params.threshold_decay * number)
            sure = {}
            for i in range(start, end):
                if canvas[i] == MASK:
                    row = guesses[i][0].clone()
                    row[MASK] = -1
                    sure[i] = (float(row.max()), int(row.argmax()))
            least = min(threshold, max(sure.values())[0] - 1e-5)
            for i, (share, token) in sure.items():
                if share >= least:
                    canvas[i] = token
            if params.cont_weight:
                weight = min(
                    params.cont_weight_init + params.cont_weight_growth * number,
                    params.cont_weight,
                )
                for i in window:
                    inputs[i] = embeddings[canvas[i]]
                    if canvas[i] == MASK:
                        inputs[i] += weight * (guesses[i][0] @ embeddings)
            steps.append((window, canvas[start:end]))
            is_new = False
        start = end
    return steps


@pytest.mark.parametrize("kind", ["prefix", "dual", "vicinity"])
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_a_cache_that_is_renewed_for_every_forward_is_none(
    kind: str, weight: float, engines: dict[str, Engine]
) -> None:
    base = SamplingParams(max_tokens=12, block_length=4, threshold=0.5, cont_weight=weight)
    plain, _ = watched(engines["llada_moe"], [3, 1, 4], base)
    params = replace(base, canvas_cache=kind, cache_update_freq=1, warmup_steps=0)
    events, outcomes = watched(engines["llada_moe"], [3, 1, 4], params)
    assert [event.token_ids for event in events] == [event.token_ids for event in plain]
    assert {outcome.context.num_tokens for outcome in outcomes} == {15}


# --- together


@dataclass
class _Kept:
    """What a request came to."""

    done: threading.Event
    events: list[StepEvent]
    errors: list[BaseException]


@pytest.mark.parametrize("model", MODELS)
def test_requests_that_share_forwards_get_the_same_tokens(
    model: str, engines: dict[str, Engine]
) -> None:
    """Canvases of different lengths in one forward, and everything of them gone afterwards."""
    engine, runs = engines[model], runs_of(model)[1:5]
    kept = [_Kept(threading.Event(), [], []) for _ in runs]
    shared: list[int] = []

    def hear(place: _Kept, event: StepEvent) -> None:
        place.events.append(event)
        if event.result is not None:
            place.done.set()

    with Scheduler(engine) as scheduler:
        scheduler.observers.append(lambda report: shared.append(report.num_requests))
        # No forward before all are there.
        with engine._turn:
            for run, place in zip(runs, kept, strict=True):
                scheduler.submit(
                    run["prompt_ids"],
                    params_of(model, run),
                    on_event=lambda event, place=place: hear(place, event),
                    on_error=lambda error, place=place: (
                        place.errors.append(error),
                        place.done.set(),
                    ),
                )
        for run, place in zip(runs, kept, strict=True):
            assert place.done.wait(60) and not place.errors
            result = place.events[-1].result
            assert result is not None and result.token_ids == answer_of(model, run)
            num_forwards = run.get("num_denoise_forwards", run.get("num_forwards"))
            assert len(place.events) == num_forwards
        assert scheduler.num_running == 0 == scheduler.kv_tokens
    assert max(shared) > 1


def test_traces_of_a_canvas_can_be_read_back(tmp_path: Path, engines: dict[str, Engine]) -> None:
    for model in ("llada_moe", "rnd1"):
        params = SamplingParams(max_tokens=8, **({"steps": 4} if model == "rnd1" else {}))
        trace = record_trace(engines[model], [PromptToRecord([4, 5, 6], "a")], params)
        path = tmp_path / f"{model}.trace.safetensors"
        save_trace(trace, path)
        assert load_trace(path).num_rows == trace.num_rows > 2


# --- parameters


def test_reference_arguments_and_defaults() -> None:
    sdar = SamplingParams.from_reference("sdar_moe", {})
    assert (sdar.algorithm, sdar.block_length, sdar.steps) == ("low_confidence_dynamic", 8, 8)
    assert (sdar.threshold, sdar.temperature, sdar.ignore_eos) == (0.85, 1.0, True)
    bounded = {"remasking_strategy": "entropy_bounded", "eb_threshold": 0.2, "top_k": 0}
    bounded["stopping_criteria_idx"] = [3, 4]
    found = SamplingParams.from_reference("sdar_moe", bounded)
    assert (found.algorithm, found.eb_threshold, found.top_k) == ("entropy_bounded", 0.2, None)
    assert found.eos_token_id == 3 and found.stop_token_ids == (4,) and not found.ignore_eos
    llada = SamplingParams.from_reference(
        "llada", {"gen_length": 64, "block_length": 16, "steps": 32, "factor": 2.0}
    )
    # Its loop takes steps and does not look at them, and so it is not asked about them here.
    assert (llada.algorithm, llada.steps, llada.factor) == ("factor", None, 2.0)
    both = SamplingParams.from_reference("llada", {"factor": 2.0, "threshold": 0.5})
    assert (both.algorithm, both.threshold, both.factor) == ("factor", None, 2.0)
    assert (llada.canvas_cache, llada.cont_weight) == ("none", None)
    dual = {"cache_type": "dual", "cache_update_freq": 4, "cont_weight": 0.3}
    cached = SamplingParams.from_reference("llada", dual)
    assert (cached.canvas_cache, cached.cache_update_freq) == ("dual", 4)
    assert (cached.cont_weight, cached.prefix_look) == (0.3, None)
    near = SamplingParams.from_reference("llada", {"cache_type": "dual", "prefix_look": 16})
    assert (near.canvas_cache, near.prefix_look, near.after_look, near.warmup_steps) == (
        *("vicinity", 16, 0, 0),
    )
    rnd1 = SamplingParams.from_reference("rnd1", {"max_new_tokens": 9, "temperature": 0.0})
    assert (rnd1.max_tokens, rnd1.canvas_length, rnd1.temperature) == (8, None, 1e-8)
    assert SamplingParams.from_reference("rnd1", {}).canvas_length == 256
    first = SamplingParams.from_reference("llada2_moe", {"gen_length": 9, "eos_id": 4})
    assert (first.algorithm, first.max_tokens, first.eos_token_id) == ("low_confidence", 9, 4)
    # The schedule is the reference's, also where an answer is shorter than a block.
    for args, steps in (({"minimal_topk": 4}, 5), ({"steps": 3}, 3), ({"minimal_topk": 20}, 1)):
        short = SamplingParams.from_reference("llada2_moe", {"gen_length": 20} | args)
        resolved = DecodingParams.resolve(replace(short, mask_token_id=1))
        assert (resolved.block_length, resolved.steps) == (32, steps)
    second = SamplingParams.from_reference("llada2_moe", {"editing_threshold": 0.5})
    assert (second.algorithm, second.edit_threshold) == ("joint_threshold", 0.5)


@pytest.mark.parametrize("family", ["llada", "llada2_moe"])
def test_decoders_of_dinfer_have_its_names(family: str) -> None:
    args = {"decoder": "credit", "threshold": 0.4, "credit_alpha": 1.0, "boost_gamma": 0.5}
    params = SamplingParams.from_reference(family, {**args, "decay_beta": 0.6, "block_length": 32})
    assert (params.algorithm, params.threshold, params.confidence) == ("credit", 0.4, "raw")
    assert (params.credit_alpha, params.credit_gamma, params.credit_beta) == (1.0, 0.5, 0.6)
    args = {"decoder": "hierarchy", "threshold": 0.6, "low_threshold": 0.2}
    params = SamplingParams.from_reference(family, args)
    assert (params.algorithm, params.threshold, params.low_threshold) == ("hierarchy", 0.6, 0.2)
    with pytest.raises(ConfigError, match="decoder is 'best'; allowed: threshold, hierarchy"):
        SamplingParams.from_reference(family, {"decoder": "best"})


@pytest.mark.parametrize(
    ("family", "args", "message"),
    [
        ("gpt2", {}, "family is 'gpt2'; allowed: diffusion_gemma, llada"),
        ("sdar_moe", {"blok_length": 4}, "'blok_length' is no argument .* block_length"),
        ("rnd1", {"gen_length": 4}, "'gen_length' is no argument"),
        ("llada", {"cfg_scale": 1.0, "x": 1}, "'cfg_scale', 'x' is no argument"),
        ("llada", {"gen_length": 20, "block_length": 8}, "gen_length is 20; allowed: a multiple"),
        ("llada", {"steps": 3, "gen_length": 16, "block_length": 8}, "steps is 3; .* 2 blocks"),
        ("llada", {"block_length": 0}, "block_length is 0; allowed"),
        ("llada", {"remasking": "random"}, "remasking is 'random'; allowed: low_confidence"),
        ("sdar_moe", {"remasking_strategy": "best"}, "remasking_strategy is 'best'; allowed: seq"),
        ("llada", {"cache_type": "full"}, "cache_type is 'full'; allowed: prefix, dual"),
        ("sdar_moe", {"stopping_criteria_idx": 4}, "stopping_criteria_idx is 4; allowed: a list"),
        ("sdar_moe", {"confidence_threshold": 7}, "threshold is 7; allowed"),
        ("rnd1", {"bos_token_id": 4}, "bos_token_id is 4; allowed: None"),
        ("rnd1", {"max_new_tokens": True}, "max_new_tokens is True"),
        ("llada2_moe", {"minimal_topk": 9, "gen_length": 8}, "minimal_topk is 9; allowed: 1 to 8"),
        (
            "llada",
            {"decoder": "hierarchy", "credit_alpha": 1.0},
            "credit_alpha is 1.0; decoder hierarchy has no such argument; known: threshold, low",
        ),
        ("llada2_moe", {"decoder": "threshold", "factor": 2.0}, "factor is 2.0; decoder threshold"),
    ],
)
def test_reference_arguments_that_are_refused(
    family: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams.from_reference(family, args)


# What would change nothing, and what it goes with.
IGNORED: list[tuple[str, dict[str, Any], str]] = [
    (
        "llada_moe",
        {"algorithm": "factor", "factor": 2.0, "threshold": 0.5},
        "threshold is 0.5; it goes with algorithms low_confidence, .* and algorithm is factor: lea",
    ),
    (
        "llada_moe",
        {"factor": 2.0},
        "factor is 2.0; it goes with algorithm factor, and algorithm is threshold: leave it out",
    ),
    ("llada_moe", {"steps": 8}, "steps is 8; it goes with algorithms low_confidence, sequential, "),
    ("llada_moe", {"credit_alpha": 1.0}, "it goes with algorithm credit, and algorithm is thresh"),
    (
        "llada_moe",
        {"algorithm": "hierarchy", "remask_threshold": 0.1},
        "remask_threshold is 0.1; it goes with algorithm hierarchy_remasking, and",
    ),
    ("sdar_moe", {"num_to_transfer": 2}, "joint_threshold, which this model is not decoded by: le"),
    ("sdar_moe", {"confidence_threshold": 0.9}, "renoising, which this model is not decoded by"),
    ("sdar_moe", {"pad_token_id": 3}, "pad_token_id is 3; it goes with algorithm lowest_entropy"),
    ("rnd1", {"threshold": 0.5}, "which this model is not decoded by: leave it out"),
    ("rnd1", {"eb_threshold": 0.5}, "entropy_bounded, renoising, which this model is not decoded"),
    ("llada_moe", {"prefix_look": 4}, "prefix_look is 4; it goes with canvas_cache vicinity: lea"),
    (
        "llada_moe",
        {"canvas_cache": "dual", "after_look": 4},
        "after_look is 4; it goes with canvas_cache vicinity: leave it out, or give that too",
    ),
    ("llada_moe", {"warmup_steps": 4}, "it goes with canvas_cache prefix, dual, vicinity: leave"),
    ("llada_moe", {"cache_update_freq": 4}, "cache_update_freq is 4; it goes with canvas_cache p"),
    ("llada_moe", {"cont_weight_init": 0.1}, "it goes with a cont_weight above 0: leave it out"),
    (
        "llada_moe",
        {"algorithm": "sequential", "cont_weight": 0.3, "threshold_decay": 0.1},
        "threshold_decay is 0.1; it goes with algorithms low_confidence, ",
    ),
]


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("sdar_moe", {"algorithm": "lowest_entropy"}, "algorithm is 'lowest_entropy'; allowed for"),
        ("sdar_moe", {"algorithm": "joint_threshold"}, "allowed for this model: low_confidence, s"),
        ("llada_moe", {"algorithm": "joint_threshold"}, "allowed for this model"),
        ("rnd1", {"algorithm": "threshold"}, "allowed for this model: lowest_entropy"),
        ("rnd1", {"block_length": 4}, "block_length is 4; .* leave block_length out"),
        ("sdar_moe", {"canvas_length": 90}, "canvas_length is 90; .* give max_tokens"),
        ("rnd1", {"canvas_length": 90, "max_tokens": 3}, "are both given; give one"),
        ("llada_moe", {"eos_at_end": True}, "eos_at_end is True; allowed: with models"),
        ("rnd1", {"pad_token_id": 999}, "pad_token_id is 999; allowed"),
        ("rnd1", {"confidence": "high"}, "confidence is 'high'; allowed: raw, tempered, filtered"),
        ("rnd1", {"eb_gamma": -1}, "eb_gamma is -1; allowed"),
        ("llada_moe", {"factor": float("nan")}, "factor is nan; allowed"),
        ("llada_moe", {"canvas_cache": "full"}, "canvas_cache is 'full'; allowed: none, prefix, d"),
        ("llada_moe", {"cache_update_freq": 0}, "cache_update_freq is 0; allowed"),
        ("llada_moe", {"cont_weight": 1.5}, "cont_weight is 1.5; allowed"),
        ("rnd1", {"cont_weight": 0.3}, "cont_weight is 0.3; allowed for this model: 0"),
        ("sdar_moe", {"cont_weight": 0.3}, "cont_weight is 0.3; allowed for this model: 0"),
        ("rnd1", {"canvas_cache": "dual"}, "canvas_cache is 'dual'; allowed for this model: none"),
        ("sdar_moe", {"canvas_cache": "prefix"}, "allowed for this model: none"),
        *IGNORED,
    ],
)
def test_parameters_that_a_family_refuses(
    model: str, values: dict[str, Any], message: str, engines: dict[str, Engine]
) -> None:
    with pytest.raises(ConfigError, match=message):
        engines[model].check([1, 2, 3], SamplingParams(**values))


def test_grammars_go_by_threshold_and_steps_whatever_the_algorithm() -> None:
    grammar = Grammar("json_object")
    for algorithm in ("factor", "lowest_entropy", "sequential"):
        assert not SamplingParams(threshold=0.5, grammar=grammar).not_looked_at_by(algorithm)
        assert not SamplingParams(steps=4, grammar=grammar).not_looked_at_by(algorithm)
    assert SamplingParams(steps=4, grammar=grammar).not_looked_at_by("joint_threshold") == ["steps"]


def test_what_a_checkpoint_says_is_for_its_own_algorithm(tmp_path: Path) -> None:
    """Only what a request says is refused."""
    for file in (GOLDEN / "llada_moe").iterdir():
        (tmp_path / file.name).symlink_to(file)
    values = {"threshold": 0.7, "low_threshold": 0.1, "algorithm": "hierarchy", "steps": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with open_engine(str(tmp_path)) as engine:
        assert engine.check([1]).params.low_threshold == 0.1
        found = engine.check([1], SamplingParams(algorithm="factor", factor=2.0)).params
        assert (found.algorithm, found.factor) == ("factor", 2.0)


def test_prompts_that_a_canvas_refuses(engines: dict[str, Engine]) -> None:
    with pytest.raises(InputError, match="the prompt is empty; .* give one at least"):
        engines["rnd1"].check([])
    with pytest.raises(InputError, match="canvas_length is 4; allowed: more than 4, the prompt's"):
        engines["rnd1"].check([1, 2, 3], SamplingParams(canvas_length=4))
    for length, prompt in ((5, [1, 2, 3]), (500, [1])):
        result = engines["rnd1"].check(prompt, SamplingParams(canvas_length=length))
        assert result.params.max_tokens == length - len(prompt) - 1
    assert len(engines["llada_moe"].generate([], SamplingParams(max_tokens=3)).token_ids) <= 3
    # One block of it all, but the block is not what was asked for.
    with pytest.raises(InputError, match="max_tokens is 600, which with 1 prompt tokens makes 601"):
        engines["rnd1"].check([1], SamplingParams(max_tokens=600))


def test_defaults_of_families(engines: dict[str, Engine]) -> None:
    chosen = {model: engines[model].check([1]).params for model in MODELS}
    assert chosen["sdar_moe"].algorithm == "low_confidence_dynamic"
    assert (chosen["sdar_moe"].block_length, chosen["sdar_moe"].steps) == (4, 4)
    assert chosen["sdar_moe"].confidence == "tempered"
    assert (chosen["llada_moe"].algorithm, chosen["llada_moe"].confidence) == ("threshold", "raw")
    assert chosen["rnd1"].algorithm == "lowest_entropy"
    assert chosen["rnd1"].block_length == chosen["rnd1"].steps == chosen["rnd1"].max_tokens == 256
    assert set(ALGORITHMS) == {
        *UNTRAINED_ALGORITHMS,
        *TRAINED_ALGORITHMS,
        "lowest_entropy",
        "renoising",
    }


def test_memory_of_a_canvas_is_planned() -> None:
    """A canvas is one forward: its rows, and the logits of a few of them at a time."""
    needed = {}
    for model in MODELS:
        for length in (64, 512):
            with open_engine(model, experts_per_layer=4, max_model_len=length) as engine:
                needed[model, length] = engine.memory_plan.model.activation_bytes
    grown = {model: needed[model, 512] - needed[model, 64] for model in MODELS}
    assert grown["rnd1"] > grown["sdar_moe"]
    # A row is some hidden vectors and a mask over the context, and no vocabulary.
    assert grown["rnd1"] == grown["llada_moe"] > 448 * 512


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "seed": 2, "greedy": False}])
@pytest.mark.parametrize("model", ["rnd1", "llada_moe"])
def test_logits_of_a_canvas_are_read_a_few_rows_at_a_time(
    model: str,
    settings: dict[str, Any],
    engines: dict[str, Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never more of them than planned, and the same answers as from all at once."""
    engine, sizes = engines[model], []

    def watch(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return head_logits(hidden, head)

    params = SamplingParams(max_tokens=24, ignore_eos=True, **settings)
    shape = {"block_length": 24} if model == "llada_moe" else {"steps": 6}
    params = replace(params, **shape)
    with monkeypatch.context() as patch:
        patch.setattr(CanvasSequence, "reads_rows", False)
        wanted = list(engine.stream([7, 8, 9], params))
    monkeypatch.setattr("oled_moe.layers.head_logits", watch)
    monkeypatch.setattr("oled_moe.layers.LOGIT_ROWS", 7)
    found = list(engine.stream([7, 8, 9], params))
    assert max(sizes) == 7 and sum(sizes) >= 24
    assert [event.token_ids for event in found] == [event.token_ids for event in wanted]


def test_planned_rows_are_those_that_are_read() -> None:
    logits = RowLogits(torch.ones(150, 4), torch.ones(9, 4), torch.ones(9, 4))
    assert [len(part) for part in logits.slices()] == [64, 64, 22] and LOGIT_ROWS == 64
