"""DiffusionGemma: forwards and answers against Transformers, canvases, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_gemmas import EASY, PROMPT, RUNS, TEXT, generate, logits_of, tiny_model
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.cli import main
from oled_moe.config import (
    NO_MASK_ID,
    DecodingParams,
    Grammar,
    sampling_from_generation_config,
)
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.engine import GenerationResult, StepEvent
from oled_moe.errors import CheckpointError, ConfigError, OledMoeError
from oled_moe.layers import ForwardBatch, Segment
from oled_moe.models import diffusion_gemma
from oled_moe.random_canvas import RandomCanvas, _accepted
from oled_moe.recording import PromptToRecord, record_trace
from oled_moe.scheduler import Scheduler, StepReport
from oled_moe.server_prompts import sampling_params
from oled_moe.server_schema import CompletionRequest
from oled_moe.simulator import simulate
from oled_moe.store import ExpertPart
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

GOLDEN = Path(__file__).parent / "golden" / "diffusion_gemma"
GOLDEN_RUNS: list[dict[str, Any]] = json.loads((GOLDEN / "generate.json").read_text())
CANVAS = 8
# Of 16 experts a layer: all, half, a tenth.
CAPACITIES = (16, 8, 1.6)


def open_engine(path: Path = GOLDEN, **settings: Any) -> Engine:
    is_emulated = settings.get("device") == "emulated"
    profile = DEFAULT_EMULATED_PROFILE if is_emulated else DEFAULT_PROFILE
    defaults = {"device": "cpu", "hardware": profile, "max_model_len": 64}
    return Engine(path, EngineConfig(**defaults | settings))


def params_of(run: dict[str, Any]) -> SamplingParams:
    """What a run of the reference is called with; without an eos it goes on past any."""
    args = {name: value for name, value in run.items() if name not in ("seed", "entropy_bound")}
    if "entropy_bound" in run:
        args["sampler_config"] = {"entropy_bound": run["entropy_bound"]}
    params = SamplingParams.from_reference("diffusion_gemma", args)
    return replace(params, seed=run["seed"], ignore_eos="eos_token_id" not in run)


def answer_of(run: dict[str, Any], output_ids: list[int]) -> list[int]:
    """The reference's tokens, cut where an answer of ours ends: it pads, and fills canvases."""
    answer = output_ids[: run["max_new_tokens"]]
    ends = [place for place, token in enumerate(answer) if token in run.get("eos_token_id", [])]
    return answer[: ends[0] + 1] if ends else answer


def canvas_logits(
    engine: Engine,
    prompt_ids: list[int],
    canvas_ids: list[int],
    told: Tensor | None,
    *,
    parts: int = 1,
    rides: bool = False,
) -> Tensor:
    """Logits of a canvas behind a prompt that is read in so many parts, the last with the canvas
    where it `rides`."""
    model = engine.model
    assert isinstance(model, diffusion_gemma.DiffusionGemma)
    kv = model.new_kv(len(prompt_ids) + CANVAS)
    condition = None if told is None else model.condition(told.clone())
    bounds = np.linspace(0, len(prompt_ids), parts + 1).astype(int).tolist()
    pieces = list(zip(bounds[:-1], bounds[1:], strict=True))
    steps = [[piece] for piece in pieces]
    steps = [*steps[:-1], [*steps[-1], None]] if rides else [*steps, [None]]
    logits = None
    for step in steps:
        segments, ids, rows, positions, offset = [], [], [], [], 0
        for piece in step:
            if piece is None:
                start, part = len(prompt_ids), canvas_ids
            else:
                start, part = piece[0], prompt_ids[slice(*piece)]
            phase = Phase.DENOISE if piece is None else Phase.PREFILL
            own = condition if piece is None else None
            segments.append(Segment(kv, len(part), piece is None, offset, None, own))
            rows.append(ForwardRow(0, 0, 0, phase, len(part)))
            ids += part
            positions += range(start, start + len(part))
            offset += len(part)
        size = len(ids)
        context = ForwardContext(
            0,
            CANVAS,
            tuple(rows),
            np.ones(size, dtype=np.float32),
            np.ones(size, dtype=np.uint8),
            np.array(positions),
            np.array(ids),
        )
        engine.experts.start_forward(context)
        batch = ForwardBatch(torch.tensor(ids), torch.tensor(positions), tuple(segments), context)
        logits = model.forward(batch)
        engine.experts.end_forward(ForwardOutcome.without_logits(context))
        kv.advance(sum(piece[1] - piece[0] for piece in step if piece is not None))
    assert logits is not None
    return logits


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5, of the largest logit where that is above 1: they reach 10 here."""
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


# --- forwards


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_golden_logits(capacity: float, device: str) -> None:
    expected = load_file(GOLDEN / "forward.safetensors")
    canvas_ids = expected["canvas_ids"].tolist()
    settings = {"device": device, "cpu_experts": False, "experts_per_layer": capacity}
    with open_engine(**settings) as engine:
        first = canvas_logits(engine, PROMPT, canvas_ids, None)
        assert_close(first, expected["first"])
        told = expected["first"] / 0.7
        assert_close(canvas_logits(engine, PROMPT, canvas_ids, told), expected["second"])
        assert_close(canvas_logits(engine, PROMPT[:2], canvas_ids, None), expected["short"])
        # However the prompt is cut up, and whether the canvas comes with its end.
        for parts in (1, 2, 5):
            for rides in (False, True):
                found = canvas_logits(engine, PROMPT, canvas_ids, None, parts=parts, rides=rides)
                assert_close(found, expected["first"])
    # What the reference is told makes a difference here, and so does the prompt.
    assert (expected["first"] - expected["second"]).abs().max() > 0.1
    assert (expected["first"] - expected["short"]).abs().max() > 0.1


MODELS: dict[str, dict[str, Any]] = {
    "as the golden one": {},
    "all layers see everything": {"layer_types": ["full_attention"] * 4},
    "a window of two": {"sliding_window": 2},
    "a window longer than the prompt": {"sliding_window": 40},
    "one kind of head": {"global_head_dim": 8, "num_global_key_value_heads": 2},
    "all heads turn": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 2000.0,
                "partial_rotary_factor": 1.0,
                "factor": 2.0,
            },
        }
    },
    "vision attention, other layers by default": {
        "layer_types": None,
        "use_bidirectional_attention": "vision",
    },
}


# What Transformers imports for its first `generate`.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_like_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the oracle is not installed")
    model = tiny_model(CANVAS, **MODELS[name])
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    canvas_ids = torch.arange(3, 3 + CANVAS).tolist()
    told = torch.randn(CANVAS, TEXT["vocab_size"], generator=torch.Generator().manual_seed(2))
    with open_engine(tmp_path, experts_per_layer=5) as engine:
        for conditioning in (None, told):
            expected = logits_of(model, PROMPT, canvas_ids, conditioning)
            assert_close(canvas_logits(engine, PROMPT, canvas_ids, conditioning), expected)
        for run in (RUNS["part_of_a_canvas"],):
            output_ids, num_forwards = generate(model, PROMPT, run)
            result = engine.generate(PROMPT, params_of(run))
            assert result.token_ids == answer_of(run, output_ids)
            assert result.stats.num_denoise_forwards == num_forwards


def test_bfloat16(tmp_path: Path) -> None:
    """As near the float32 numbers as the reference's own bfloat16, the same at every capacity."""
    expected = load_file(GOLDEN / "forward.safetensors")
    canvas_ids = expected["canvas_ids"].tolist()
    answers = []
    for capacity in CAPACITIES:
        with open_engine(experts_per_layer=capacity, dtype="bfloat16") as engine:
            found = canvas_logits(engine, PROMPT, canvas_ids, expected["first"] / 0.7)
            own, theirs = (
                (each - expected["second"]).abs().mean()
                for each in (found, expected["second_bf16"])
            )
            assert 0 < own < 1.5 * theirs
            answers.append(engine.generate(PROMPT, params_of(RUNS["three_canvases"])).token_ids)
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 24


# --- answers


def check_run(engine: Engine, run: dict[str, Any]) -> GenerationResult:
    """Tokens and forwards of a golden run."""
    result = engine.generate(PROMPT, params_of(run["args"]))
    assert result.token_ids == answer_of(run["args"], run["output_ids"]), run["name"]
    assert result.stats.num_denoise_forwards == run["forwards"], run["name"]
    return result


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_golden_runs(capacity: float) -> None:
    with open_engine(experts_per_layer=capacity) as engine:
        assert engine.policy.name == "stream"
        for run in GOLDEN_RUNS:
            result = check_run(engine, run)
            assert result.stats.num_commit_forwards == 0
            assert result.finish_reason == ("stop" if run["name"].endswith("_eos") else "length")
            assert len(result.probabilities) == len(result.token_ids)


@pytest.mark.parametrize("policy", ["naive-lru", "oled+prefetch", "tide"])
def test_golden_runs_with_other_policies(policy: str) -> None:
    for device in ("cpu", "emulated"):
        settings = {"policy": policy, "device": device, "cpu_experts": False}
        with open_engine(experts_per_layer=3, **settings) as engine:
            for run in GOLDEN_RUNS[:2]:
                result = engine.generate(PROMPT, params_of(run["args"]))
                assert result.token_ids == answer_of(run["args"], run["output_ids"])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine(experts_per_layer=6, max_num_seqs=4) as found:
        yield found


def test_nothing_of_a_canvas_is_final_before_its_end(engine: Engine) -> None:
    run = RUNS["three_canvases"]
    events = list(engine.stream(PROMPT, params_of(run)))
    seen: tuple[int, ...] = ()
    for event in events:
        assert event.answer_ids[: len(seen)] == seen
        seen = event.answer_ids
        start = event.block_start - len(PROMPT)
        assert len(seen) == start + (CANVAS if event.is_block_done else 0)
        assert start % CANVAS == 0 and len(event.token_ids) == CANVAS
        if event.is_block_done:
            assert not any(event.is_masked) and event.token_ids == seen[start:]
        else:
            # What is accepted is there, all else is a hole.
            ids, holes = np.array(event.token_ids), np.array(event.is_masked)
            assert (ids[holes] == NO_MASK_ID).all() and (ids[~holes] >= 0).all()
            assert holes.sum() < CANVAS
    assert len(seen) == 24 and events[-1].result is not None


def test_changes_tell_of_every_token_that_came_or_went(engine: Engine) -> None:
    before: dict[int, int] = {}
    block = -1
    for event in engine.stream(PROMPT, params_of(RUNS["three_canvases"])):
        if event.block_id != block:
            block, before = event.block_id, {}
        for change in event.changes:
            assert before.get(change.position, NO_MASK_ID) == change.from_id != change.to_id
            before[change.position] = change.to_id
        shown = {event.block_start + i: token for i, token in enumerate(event.token_ids)}
        assert {p: t for p, t in shown.items() if t != NO_MASK_ID} == {
            p: t for p, t in before.items() if t != NO_MASK_ID
        }


def test_company_changes_no_token(engine: Engine) -> None:
    """Requests share forwards, each with its own canvas, seed and prompt."""
    runs = [RUNS["three_canvases"], RUNS["settles"], RUNS["part_of_a_canvas"], RUNS["accepts_all"]]
    prompts = [PROMPT, PROMPT[:3], PROMPT[2:] * 2, [8]]
    alone = [engine.generate(*pair) for pair in zip(prompts, map(params_of, runs), strict=True)]
    reports: list[StepReport] = []
    found: dict[int, list[int]] = {}
    failures: list[BaseException] = []

    def receive(index: int) -> Any:
        def on_event(event: StepEvent) -> None:
            if event.result is not None:
                found[index] = event.result.token_ids

        return on_event

    with Scheduler(engine) as scheduler:
        scheduler.observers.append(reports.append)
        for index, (prompt, run) in enumerate(zip(prompts, runs, strict=True)):
            scheduler.submit(
                prompt, params_of(run), on_event=receive(index), on_error=failures.append
            )
        scheduler.close(drain_s=60)
    assert not failures
    assert [found[index] for index in range(4)] == [result.token_ids for result in alone]
    assert max(report.num_requests for report in reports) > 1


def test_a_seed_tells_the_answer_and_temperature_0_draws_only_noise(engine: Engine) -> None:
    params = params_of(RUNS["part_of_a_canvas"])
    assert engine.generate(PROMPT, params).token_ids == engine.generate(PROMPT, params).token_ids
    others = {tuple(engine.generate(PROMPT, replace(params, seed=s)).token_ids) for s in range(2)}
    assert len(others) == 2
    # Accepted are the likeliest tokens then.
    sure = replace(params, temperature=0.0, eb_threshold=1000.0)
    for event in engine.stream(PROMPT, sure):
        assert not any(event.is_masked)


def test_max_tokens_stop_ids_and_the_end_of_a_canvas(engine: Engine) -> None:
    run = RUNS["three_canvases"]
    whole = engine.generate(PROMPT, params_of(run)).token_ids
    cut = engine.generate(PROMPT, replace(params_of(run), max_tokens=19))
    assert cut.token_ids == whole[:19] and cut.finish_reason == "length"
    stop_id = whole[10]
    params = replace(params_of(run), ignore_eos=False, eos_token_id=94, stop_token_ids=[stop_id])
    stopped = engine.generate(PROMPT, params)
    assert stopped.token_ids == whole[: whole.index(stop_id) + 1]
    assert stopped.finish_reason == "stop"
    # Two canvases at most were denoised.
    assert stopped.stats.num_denoise_forwards <= 12


def test_an_empty_prompt_has_a_canvas_too(engine: Engine) -> None:
    assert len(engine.generate([], params_of(RUNS["one_canvas"])).token_ids) == CANVAS


# --- traces


@pytest.mark.parametrize("policy", ["stream", "stream:bound=0.5,depth=3", "naive-lru"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_recorded_run_replays(policy: str, device: str, tmp_path: Path) -> None:
    """The trace holds every forward, and the simulator decides what the engine decided."""
    counts: list[tuple[int, int, int, int]] = []

    def see(demand: LayerDemand, plan: LayerPlan) -> None:
        parts = (plan.hit_ids, plan.staged_ids, plan.load_ids)
        counts.append((demand.layer, *map(len, parts)))

    profile = DEFAULT_EMULATED_PROFILE if device == "emulated" else DEFAULT_PROFILE
    settings = {"policy": policy, "device": device, "experts_per_layer": 6, "cpu_experts": False}
    with open_engine(**settings) as engine:
        engine.experts.observers.append(see)
        params = params_of(RUNS["three_canvases"])
        trace = record_trace(engine, [PromptToRecord(PROMPT, id="a", workload="math")], params)
        num_slots, num_staging = engine.memory_plan.num_slots, engine.memory_plan.num_staging
    path = tmp_path / "gemma.trace.safetensors"
    save_trace(trace, path)
    live, counts = list(counts), []
    trace = load_trace(path)
    simulate(
        trace,
        policy,
        hardware=profile,
        num_slots=num_slots,
        num_staging=num_staging,
        has_cpu_experts=False,
        observers=(see,),
    )
    assert counts == live and len(live) > 18 * 4
    states = np.concatenate([forward.context.token_state for forward in trace.forwards()])
    assert {TokenState.PROMPT, TokenState.COMMITTED, TokenState.MASKED} == set(states.tolist())
    phases = {row.phase for forward in trace.forwards() for row in forward.context.rows}
    assert phases == {Phase.PREFILL, Phase.DENOISE, Phase.COMMIT}


# --- canvases


class FakeModel:
    """What a canvas asks of a model."""

    vocab_size = 50

    def condition(self, logits_TV: Tensor) -> Tensor:
        return logits_TV.softmax(-1)[:, :3]


def canvas_of(**settings: Any) -> RandomCanvas:
    params = SamplingParams(algorithm="renoising", block_length=CANVAS, **settings)
    generator = torch.Generator().manual_seed(3)
    return RandomCanvas(DecodingParams.resolve(params), FakeModel(), generator)  # type: ignore[arg-type]


@bounded(60)
@given(
    entropies=st.lists(st.floats(0, 12, width=32), min_size=1, max_size=40),
    bound=st.floats(0, 30, width=32),
)
def test_accepted_are_the_surest_whose_sum_without_the_last_is_within_the_bound(
    entropies: list[float], bound: float
) -> None:
    values = torch.tensor(entropies)
    accepted = _accepted(values, bound)
    assert accepted.any()
    if not accepted.all():
        assert values[accepted].max() <= values[~accepted].min()
    chosen = values[accepted].double()
    assert chosen.sum() - chosen.max() <= bound + 1e-3


def test_a_canvas_ends_when_settled_or_after_its_steps() -> None:
    logits = 40.0 * torch.nn.functional.one_hot(torch.arange(CANVAS), 50).float()
    for settings, num_steps in (
        ({}, 2),
        ({"stability_threshold": 0}, 1),
        ({"stability_threshold": 3}, 4),
        ({"stability_threshold": 3, "steps": 2}, 2),
        # Nothing is sure enough.
        ({"confidence_threshold": 0.0, "steps": 7}, 7),
    ):
        canvas = canvas_of(**settings)
        taken = 0
        while not canvas.is_over:
            step = canvas.step(logits.clone())
            taken += 1
        assert taken == num_steps, settings
        assert step.best_ids.tolist() == list(range(CANVAS))
    # What changes in between is not settled.
    canvas, found = canvas_of(steps=9), []
    for turn in range(9):
        canvas.step(logits.roll(turn % 2, dims=1))
        found.append(canvas.is_over)
    assert found == [False] * 8 + [True]


def test_a_canvas_draws_new_noise_where_nothing_was_accepted() -> None:
    logits = torch.zeros(CANVAS, 50)
    logits[:2, 7] = 90.0
    canvas = canvas_of(eb_threshold=1e-3, confidence_threshold=0.0)
    seen = [canvas.token_ids.tolist()]
    for _ in range(5):
        step = canvas.step(logits.clone())
        assert step.is_accepted.tolist()[:2] == [True, True] and step.is_accepted.sum() == 3
        assert canvas.token_ids.tolist()[:2] == [7, 7]
        assert canvas.condition is not None and canvas.condition.shape == (CANVAS, 3)
        seen.append(canvas.token_ids.tolist())
    assert len({tuple(ids) for ids in seen}) == 6
    assert all(0 <= token < 50 for ids in seen for token in ids)


def test_numbers_that_are_not_finite_are_an_error() -> None:
    logits = torch.zeros(CANVAS, 50)
    logits[3, 4] = torch.nan
    for settings in ({}, {"temperature": 0.0}):
        with pytest.raises(OledMoeError, match="not finite"):
            canvas_of(**settings).step(logits.clone())


@pytest.mark.parametrize("settings", [{"t_min": 0.0, "t_max": 1e-40}, {"temperature": 1e-60}])
def test_next_to_no_temperature_draws_the_likeliest_tokens(settings: dict[str, float]) -> None:
    logits = torch.randn(CANVAS, 50, generator=torch.Generator().manual_seed(1))
    step = canvas_of(**settings).step(30 * logits)
    assert step.token_ids.tolist() == step.best_ids.tolist() == logits.argmax(-1).tolist()
    assert step.confidence.tolist() == [1.0] * CANVAS


@pytest.mark.parametrize("length", [1, 3, 13])
@pytest.mark.parametrize("num_prompt", [0, 1, 3, 100])
def test_canvases_of_any_length_fit_behind_any_prompt(
    length: int, num_prompt: int, tmp_path: Path
) -> None:
    shutil.copy(GOLDEN / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values_of(canvas_length=length)))
    prompt = [(7 * i) % 96 for i in range(num_prompt)]
    found = []
    for budget in (None, 0.5):
        config = EngineConfig(hardware=DEFAULT_PROFILE, experts_per_layer=budget)
        with Engine(tmp_path, config) as engine:
            found += [
                engine.generate(prompt, SamplingParams(max_tokens=n, steps=3, ignore_eos=True))
                for n in (1, length, 2 * length + 1)
            ]
    sizes = [len(result.token_ids) for result in found]
    assert sizes == 2 * [1, length, 2 * length + 1]
    assert [r.token_ids for r in found[:3]] == [r.token_ids for r in found[3:]]


# --- what is asked for


def test_arguments_of_the_reference() -> None:
    params = SamplingParams.from_reference("diffusion_gemma", {})
    assert (params.max_tokens, params.steps, params.eb_threshold) == (256, 48, 0.1)
    assert (params.t_min, params.t_max, params.stability_threshold) == (0.4, 0.8, 1)
    assert params.confidence_threshold == 0.005 and params.eos_token_id is None
    given_ids = SamplingParams.from_reference("diffusion_gemma", {"eos_token_id": [1, 106]})
    assert (given_ids.eos_token_id, given_ids.stop_token_ids) == (1, (106,))
    for args, match in (
        ({"num_beams": 2}, "num_beams"),
        ({"sampler_config": {}}, "entropy_bound"),
        ({"t_min": -1.0}, "t_min"),
    ):
        with pytest.raises(ConfigError, match=match):
            SamplingParams.from_reference("diffusion_gemma", args)


def test_generation_config_of_a_checkpoint() -> None:
    values = {
        "max_denoising_steps": 32,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.2},
        "t_min": 0.3,
        "eos_token_id": [1, 106, 50],
        "stability_threshold": None,
    }
    params = sampling_from_generation_config(values)
    assert (params.steps, params.eb_threshold, params.t_min) == (32, 0.2, 0.3)
    assert (params.eos_token_id, params.stop_token_ids) == (1, (106, 50))
    assert params.stability_threshold is None


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"block_length": 4}, "block_length is 4; allowed: 8"),
        ({"top_k": 5}, "top_k"),
        ({"top_p": 0.5}, "top_p"),
        ({"grammar": Grammar("json_object")}, "grammar"),
        ({"algorithm": "low_confidence"}, "renoising"),
        ({"canvas_length": 64}, "block after block"),
        ({"canvas_cache": "dual"}, "canvas_cache"),
        ({"confidence": "raw"}, "confidence"),
        ({"t_min": 0.5, "t_max": 0.4}, "t_max is 0.4"),
        ({"eos_token_id": 96}, "95"),
        ({"threshold": 0.5}, "threshold is 0.5; .* which this model is not decoded by: leave it"),
        ({"factor": 2.0}, "factor is 2.0; it goes with algorithm factor, which this model is not"),
        ({"mask_token_id": 3}, "mask_token_id is 3; .* which this model is not decoded by"),
    ],
)
def test_what_means_nothing_here_is_refused(
    engine: Engine, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        engine.generate(PROMPT, SamplingParams(**settings))


def test_a_server_draws_anew_each_time_unless_told_a_seed(engine: Engine) -> None:
    def seed_of(**values: Any) -> int | None:
        body = CompletionRequest(prompt=[1], **values)
        return sampling_params(engine, body, SamplingParams(), None).seed

    assert seed_of() != seed_of() and seed_of(seed=3) == 3
    assert seed_of(temperature=0.0) is None


def test_other_models_do_not_take_random_canvases() -> None:
    with (
        Engine(GOLDEN.parent / "llada2_a", EngineConfig(hardware=DEFAULT_PROFILE)) as engine,
        pytest.raises(ConfigError, match="renoising"),
    ):
        engine.generate([1], SamplingParams(algorithm="renoising"))


RANDOM_CANVAS_FIELDS = ("t_min", "t_max", "stability_threshold", "confidence_threshold")


@pytest.mark.parametrize("name", RANDOM_CANVAS_FIELDS)
def test_what_only_random_canvases_have_is_refused_by_name(name: str) -> None:
    with (
        Engine(GOLDEN.parent / "llada2_a", EngineConfig(hardware=DEFAULT_PROFILE)) as engine,
        pytest.raises(ConfigError, match=f"{name} is 1; it goes with algorithm renoising, which "),
    ):
        engine.generate([1], SamplingParams(**{name: 1}))


# --- configs and names


def values_of(text: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDEN / "config.json").read_text())
    values["text_config"] |= text or {}
    return values | changes


@pytest.mark.parametrize(
    ("text", "changes", "name"),
    [
        ({}, {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({}, {"text_config": None}, "text_config"),
        ({}, {"canvas_length": 0}, "canvas_length"),
        ({"hidden_activation": "silu"}, {}, "hidden_activation"),
        ({"attention_bias": True}, {}, "attention_bias"),
        ({"use_bidirectional_attention": "all"}, {}, "use_bidirectional_attention"),
        ({"num_experts": None}, {}, "num_experts"),
        ({"top_k_experts": 17}, {}, "top_k_experts"),
        ({"layer_types": ["full_attention"]}, {}, "layer_types"),
        ({"layer_types": ["chunked"] * 4}, {}, "layer_types"),
        ({"sliding_window": 1}, {}, "sliding_window"),
        ({"num_attention_heads": 3}, {}, "num_attention_heads"),
        ({"head_dim": 7}, {}, "head_dim"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, {}, "per_layer_config"),
        ({"per_layer_config": {"1": {"head_dim": 8}, "3": {}}}, {}, "per_layer_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, {}, "rope_type"),
        ({"rope_parameters": {"sliding_attention": 3}}, {}, "sliding_attention"),
        ({"final_logit_softcapping": 0}, {}, "final_logit_softcapping"),
        ({"quantization_config": {"bits": 4}}, {}, "quantization_config"),
    ],
)
def test_a_bad_config_is_one_sentence(
    text: dict[str, Any], changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        diffusion_gemma.Config.from_hf(values_of(text, **changes))
    message = str(refused.value)
    assert message.startswith("config.json: ") and name in message and "allowed" in message
    assert "\n" not in message


def test_a_config_without_per_layer_fields_says_it_by_its_global_ones() -> None:
    text = values_of()["text_config"]
    del text["per_layer_config"]
    config = diffusion_gemma.Config.from_hf({"text_config": text, "canvas_length": 4})
    assert (config.whole.head_size, config.whole.num_kv_heads) == (512, 2)
    text |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    config = diffusion_gemma.Config.from_hf({"text_config": text})
    assert config.whole == diffusion_gemma.Config.from_hf(values_of()).whole
    assert config.canvas_length == 256
    # Two sliding layers of 2 heads of 8, two of one head of 16; keys and values.
    assert config.kv_size == 2 * (2 * 2 * 8 + 2 * 16)


def test_names_of_a_checkpoint() -> None:
    config = diffusion_gemma.Config.from_hf(values_of())
    name_of = diffusion_gemma.build_weight_map(config)
    for prefix in ("model.", ""):
        experts = f"{prefix}decoder.layers.2.experts"
        assert name_of(f"{experts}.gate_up_proj") == ExpertPart(2, None, "gate_up")
        assert name_of(f"{experts}.down_proj") == ExpertPart(2, None, "down")
        assert name_of(f"{prefix}decoder.norm.weight") == "decoder.norm.weight"
        # Copies of what the decoder has, and what belongs to images.
        twin = f"{prefix}encoder.language_model"
        for rest in ("layers.1.mlp.up_proj.weight", "layers.0.experts.down_proj", "norm.weight"):
            assert name_of(f"{twin}.{rest}") is None
        assert name_of(f"{prefix}encoder.vision_tower.patch_embedder.x") is None
        scalar = "encoder.language_model.layers.3.layer_scalar"
        assert name_of(f"{prefix}{scalar}") == scalar
    assert name_of("lm_head.weight") is None
    with pytest.raises(KeyError):
        name_of("model.audio_tower.weight")
    for stranger in ("layers.4.mlp.up_proj.weight", "layers.1.self_attn.v_proj.weight"):
        with pytest.raises(CheckpointError, match="does not provide for"):
            name_of(f"model.decoder.{stranger}")


def test_shapes_are_those_of_the_checkpoint() -> None:
    config = diffusion_gemma.Config.from_hf(values_of())
    stored = load_file(GOLDEN / "model.safetensors")
    name_of, shapes = diffusion_gemma.build_weight_map(config), {}
    for name, tensor in stored.items():
        target = name_of(name)
        if isinstance(target, str):
            shapes[target] = tuple(tensor.shape)
    assert shapes == diffusion_gemma.parameter_shapes(config)


def test_memory_is_planned_for_whole_canvases(tmp_path: Path) -> None:
    """Logits of all of a canvas and what is drawn from; keys and values of every kind of layer."""
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    with open_engine(tmp_path) as engine:
        small = engine.memory_plan.model
        assert small.kv_bytes == engine.model_config.kv_size * 4 * (64 + CANVAS)
    values = values_of()
    (tmp_path / "config.json").write_text(json.dumps(values | {"canvas_length": 64}))
    with open_engine(tmp_path) as engine:
        large = engine.memory_plan.model
    assert large.activation_bytes - small.activation_bytes >= 3 * 4 * 96 * (64 - CANVAS)


# --- the command line


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden model with a word for each of its 96 tokens."""
    path = tmp_path_factory.mktemp("worded")
    shutil.copytree(GOLDEN, path, dirs_exist_ok=True)
    vocabulary = {chr(0x4E00 + token): token for token in range(96)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0x4E00)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def run_cli(*args: str) -> int:
    return main(list(args))


def test_generate_and_inspect(worded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "".join(chr(0x4E00 + token) for token in PROMPT)
    flags = (
        "--max-tokens",
        "16",
        "--seed",
        "3",
        "--expert-memory",
        "50%",
        "--max-model-len",
        "64",
        "--steps",
        "5",
    )
    assert run_cli("generate", str(worded), "--raw", "-p", prompt, *flags) == 0
    said = capsys.readouterr()
    assert "stream" in said.err
    with open_engine(worded) as engine:
        result = engine.generate(PROMPT, SamplingParams(max_tokens=16, seed=3, steps=5))
    assert result.text and said.out.strip() == result.text
    assert run_cli("inspect", str(worded)) == 0
    assert "diffusion_gemma" in capsys.readouterr().out


def test_easy_is_what_the_golden_runs_have() -> None:
    assert [run["name"] for run in GOLDEN_RUNS if not run["name"].endswith("_eos")] == list(RUNS)
    assert all(
        {"seed", *EASY} <= set(run["args"]) for run in GOLDEN_RUNS if run["name"] != "defaults"
    )
