"""Lossy expert sharing: the rules alone, in engines of all families, and wherever it is named."""

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import synthetic_llada2, write_checkpoint
from fakes import bounded, context_of
from hypothesis import given
from hypothesis import strategies as st

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.bench import run_bench
from oled_moe.cli import main
from oled_moe.errors import ConfigError
from oled_moe.kernels.rows import choose_within, route
from oled_moe.lossy import LOSSY, LossyRule, build_lossy
from oled_moe.models import FAMILIES
from oled_moe.recording import PromptToRecord, record_trace
from oled_moe.replay import Replayer
from oled_moe.sharing import RoutedTokens, SharingPolicy
from oled_moe.types import LayerDemand, LayerPlan, Phase, TokenState

E, K, T = 12, 3, 8
# Every rule, by every parameter.
SPECS = (
    "des-vote:experts=5",
    "des-vote:coverage=0.6",
    "des-seq:top=1",
    "dmoe:coverage=0.6,minimum=4",
    "dmoe",
    "resident:threshold=0.7",
)
BLOCK_SPECS = tuple(spec for spec in SPECS if not spec.startswith("resident"))
# What keeps every token's own choice.
WHOLE_SPECS = (
    *("des-vote:coverage=1", f"des-vote:experts={E}", f"des-seq:top={K}", "dmoe:coverage=1"),
    *("resident:threshold=0", f"dmoe:minimum={E}"),
)


def build(spec: str) -> LossyRule:
    return build_lossy(spec, num_experts=E, top_k=K)


def policy_of(spec: str) -> SharingPolicy:
    policy = build(spec).sharing
    assert policy is not None
    return policy


def routed_of(seed: int, num_blocks: int = 2) -> RoutedTokens:
    random = np.random.default_rng(seed)
    scores = random.random((T, E), dtype=np.float32)
    ids = np.argsort(-scores, axis=1)[:, :K]
    chosen = np.take_along_axis(scores, ids, axis=1)
    return RoutedTokens(
        scores,
        ids,
        chosen / chosen.sum(1, keepdims=True),
        random.choice(np.array(list(TokenState), dtype=np.uint8), T),
        random.random(T, dtype=np.float32),
        np.sort(np.append(random.integers(0, num_blocks, T - num_blocks), np.arange(num_blocks))),
        random.random(E) < 0.5,
    )


def test_every_rule_is_tested_and_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    # What is taken in another precision has tests of its own: test_mixed_precision.py.
    assert {spec.partition(":")[0] for spec in SPECS} | {"mixed"} == set(LOSSY)
    assert main(["generate", "--help"]) == 0
    # Lines may break anywhere, within a frame or without.
    words = "".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(f"{name}:" in words for name in LOSSY)


# --- the contract of every rule


@pytest.mark.parametrize("spec", SPECS)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
@bounded(25)
def test_rules_repeat_and_change_nothing(spec: str, seed: int, num_blocks: int) -> None:
    routed, untouched = routed_of(seed, num_blocks), routed_of(seed, num_blocks)
    policy = policy_of(spec)
    allowed = policy.allowed(routed)
    assert allowed.shape == (T, E) and allowed.dtype == np.bool_
    assert np.array_equal(allowed, policy.allowed(routed))
    for name in RoutedTokens.__dataclass_fields__:
        assert np.array_equal(getattr(routed, name), getattr(untouched, name))


@pytest.mark.parametrize("spec", BLOCK_SPECS)
@given(st.integers(0, 2**32 - 1))
@bounded(25)
def test_a_block_has_one_set_which_is_its_own(spec: str, seed: int) -> None:
    routed, policy = routed_of(seed, 3), policy_of(spec)
    assert not policy.depends_on_cache
    allowed = policy.allowed(routed)
    elsewhere = replace(routed, is_resident=~routed.is_resident)
    assert np.array_equal(policy.allowed(elsewhere), allowed)
    for block in range(3):
        tokens = routed.block_of == block
        assert (allowed[tokens] == allowed[tokens][0]).all()
        alone = RoutedTokens(
            *(
                getattr(routed, name)[tokens]
                for name in RoutedTokens.__dataclass_fields__
                if name not in ("block_of", "is_resident")
            ),
            np.zeros(tokens.sum(), dtype=np.int64),
            routed.is_resident,
        )
        assert np.array_equal(policy.allowed(alone), allowed[tokens])


@pytest.mark.parametrize("spec", WHOLE_SPECS)
@given(st.integers(0, 2**32 - 1))
@bounded(25)
def test_whole_parameters_allow_every_own_choice(spec: str, seed: int) -> None:
    routed = routed_of(seed)
    allowed = policy_of(spec).allowed(routed)
    assert np.take_along_axis(allowed, routed.topk_ids, axis=1).all()


# --- what each rule says, by hand


def by_hand() -> RoutedTokens:
    """Two tokens of one block, weights in quarters; scores are the weights, 0 elsewhere."""
    ids = np.array([[0, 1, 2], [1, 3, 4]])
    weights = np.array([[0.5, 0.25, 0.25], [0.75, 0.125, 0.125]], dtype=np.float32)
    scores = np.zeros((2, E), dtype=np.float32)
    np.put_along_axis(scores, ids, weights, axis=1)
    states = np.array([TokenState.MASKED, TokenState.MASKED], dtype=np.uint8)
    confidence = np.array([0.5, 0.7], dtype=np.float32)
    return RoutedTokens(
        scores, ids, weights, states, confidence, np.zeros(2, dtype=np.int64), np.arange(E) > 8
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # Votes: 1 has 1.0, 0 has 0.5, 2 has 0.25, 3 and 4 have 0.125 each, of 2.
        ("des-vote:experts=3", [0, 1, 2]),
        ("des-vote:experts=4", [0, 1, 2, 3]),
        ("des-vote:coverage=0.5", [1]),
        ("des-vote:coverage=0.51", [0, 1]),
        ("des-vote:coverage=0.9", [0, 1, 2, 3]),
        ("des-vote:coverage=0", []),
        ("des-seq:top=1", [0, 1]),
        ("des-seq:top=2", [0, 1, 3]),
        ("dmoe:coverage=0.6,minimum=1", [0, 1]),
        ("dmoe:coverage=0.6,minimum=3", [0, 1, 2]),
    ],
)
def test_block_rules_by_hand(spec: str, expected: list[int]) -> None:
    expected = expected or [1]  # a vote of coverage 0 keeps the first
    for row in policy_of(spec).allowed(by_hand()):
        assert row.nonzero()[0].tolist() == expected


@pytest.mark.parametrize(("threshold", "is_free"), [(0.5, [True, True]), (0.6, [False, True])])
def test_resident_by_hand(threshold: float, is_free: list[bool]) -> None:
    allowed = policy_of(f"resident:threshold={threshold}").allowed(by_hand())
    for row, free in zip(allowed, is_free, strict=True):
        assert row.nonzero()[0].tolist() == (list(range(E)) if free else [9, 10, 11])
    decided = replace(by_hand(), token_state=np.array([0, 1], dtype=np.uint8))
    assert policy_of("resident:threshold=1").allowed(decided).all()


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("nope", "des-seq, des-vote, dmoe, mixed, resident"),
        ("des-vote", "give one of experts and coverage"),
        ("des-vote:experts=5,coverage=0.5", "give one of experts and coverage"),
        ("des-vote:experts=2", f"experts is '2'; allowed: a whole number, {K} to {E}"),
        ("des-vote:experts=13", f"{K} to {E}"),
        ("des-vote:coverage=1.5", "coverage is '1.5'"),
        ("des-seq", "give top, 1 to 3"),
        ("des-seq:top=4", "1 to 3"),
        ("dmoe:minimum=0", "minimum is '0'"),
        ("dmoe:top=3", "known: coverage, minimum"),
        ("resident:threshold=nan", "threshold is 'nan'"),
        ("resident:threshold", "key=value"),
    ],
)
def test_bad_specs_say_what_is_allowed(spec: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(spec)


# --- which tokens a rule is asked about


def test_prompts_and_commits_keep_their_own_experts() -> None:
    phases = (Phase.PREFILL, Phase.DENOISE, Phase.COMMIT, Phase.DENOISE)
    context = context_of(0, [0.4] * T, phases=phases, block_length=2)
    routed = replace(routed_of(3), block_of=np.arange(T) // 2)
    allowed = build("des-vote:experts=3").allowed(context, routed)
    assert allowed is not None
    assert allowed[[0, 1, 4, 5]].all()
    assert (allowed[[2, 3, 6, 7]].sum(1) == 3).all()
    alone = replace(
        routed_of(3),
        block_of=np.array([0, 0]),
        scores=routed.scores[2:4],
        topk_ids=routed.topk_ids[2:4],
        weights=routed.weights[2:4],
    )
    assert np.array_equal(policy_of("des-vote:experts=3").allowed(alone), allowed[2:4])
    quiet = context_of(0, [1.0] * T, phases=(Phase.PREFILL, Phase.COMMIT))
    assert build("des-vote:experts=3").allowed(quiet, routed) is None


def test_choices_are_counted_by_request() -> None:
    phases = (Phase.DENOISE, Phase.COMMIT, Phase.DENOISE)
    context = context_of(0, [0.4] * 6, phases=phases)
    own = np.tile(np.arange(K), (6, 1))
    weights = np.tile(np.array([0.5, 0.25, 0.25], dtype=np.float32), (6, 1))
    taken = own.copy()
    # The same experts in another order are no replacement; commits are nobody's.
    taken[0], taken[1], taken[2], taken[4] = [2, 0, 1], [5, 1, 2], [7, 8, 9], [0, 8, 9]
    taken[5] = [8, 1, 9]
    rule = build("dmoe")
    for _ in range(2):
        rule.count_taken(context, own, weights, taken)
    assert [rule.counts_of(i).num_replaced for i in range(4)] == [2, 0, 8, 0]
    assert [rule.counts_of(i).num_choices for i in range(4)] == [12, 0, 12, 0]
    assert [rule.counts_of(i).replaced_weight for i in range(4)] == [1, 0, 2.5, 0]
    assert [rule.counts_of(i).weight for i in range(4)] == [4, 0, 4, 0]
    rule.end_request(2)
    assert rule.counts_of(2).num_choices == 0 and rule.counts_of(0).num_choices == 12


# --- choosing within what is allowed


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 1), (4, 2), (3, 3)]))
@bounded(40)
def test_a_choice_that_is_allowed_stays(seed: int, groups: tuple[int, int]) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(T, E)).astype(np.float32))
    bias = torch.from_numpy(random.normal(size=E).astype(np.float32))
    settings = {"num_groups": groups[0], "num_kept_groups": groups[1], "top_k": K}
    own, _, scores = route(logits, bias, torch.float32, **settings)
    choice = scores + bias
    allowed = torch.from_numpy(random.random((T, E)) < 0.4)
    kept = allowed.clone().scatter_(1, own, True)
    assert torch.equal(choose_within(choice, kept, **settings), own)
    nothing = torch.zeros_like(allowed)
    assert torch.equal(choose_within(choice, nothing, **settings), own)
    taken = choose_within(choice, allowed, **settings)
    is_allowed = allowed.gather(1, taken)
    # As many allowed ones as there are; nobody takes an expert twice.
    assert torch.equal(is_allowed.sum(1), allowed.sum(1).clamp(max=K))
    assert all(len(set(row)) == K for row in taken.tolist())


# --- engines


GOLDEN = Path(__file__).parent / "golden"
CONFIG: dict[str, Any] = {
    "model_type": "llada2_moe",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": E,
    "num_experts_per_tok": K,
    "n_group": 3,
    "topk_group": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256,
    "mask_token_id": 57,
    "eos_token_id": 56,
}
PARAMS = SamplingParams(max_tokens=24, block_length=8, threshold=0.3, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(20)), [9] * 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = synthetic_llada2(CONFIG, seed=5)
    weights["lm_head.weight"] *= 12
    return write_checkpoint(tmp_path_factory.mktemp("model"), weights, CONFIG)


def open_engine(path: Path, **settings: Any) -> Engine:
    return Engine(path, EngineConfig(**{"experts_per_layer": 4, "cpu_experts": False} | settings))


def answers_of(path: Path, **settings: Any) -> list[list[int]]:
    with open_engine(path, **settings) as engine:
        return [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def exact(model: Path) -> list[list[int]]:
    return answers_of(model)


def test_without_a_rule_nothing_is_replaced(model: Path) -> None:
    with open_engine(model) as engine:
        stats = engine.generate(PROMPTS[0], PARAMS).stats
        assert engine.lossy is None and engine.experts.lossy is None
    assert (stats.choices_replaced, stats.replaced_share) == (0, 0)


@pytest.mark.parametrize("spec", WHOLE_SPECS)
def test_whole_parameters_change_no_token(model: Path, exact: list[list[int]], spec: str) -> None:
    assert answers_of(model, lossy=spec) == exact


@pytest.mark.parametrize("spec", BLOCK_SPECS[:4])
def test_block_rules_do_not_depend_on_the_cache(model: Path, spec: str) -> None:
    found = answers_of(model, lossy=spec, experts_per_layer=E)
    assert found == answers_of(model, lossy=spec, experts_per_layer=1, policy="naive-lru")
    assert found == answers_of(model, lossy=spec, policy="oled+prefetch")
    assert found == answers_of(model, lossy=spec, device="emulated")


@pytest.mark.parametrize("spec", BLOCK_SPECS[:4])
def test_block_rules_do_not_depend_on_company(model: Path, spec: str) -> None:
    with open_engine(model, lossy=spec, max_num_seqs=3) as engine:
        alone = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
        running = {i: engine.begin(engine.check(p, PARAMS)) for i, p in enumerate(PROMPTS)}
        found = {}
        while running:
            for number, event in zip(
                list(running), engine.denoise(list(running.values())), strict=True
            ):
                if event.result is not None:
                    found[number] = event.result
                    engine.end(running.pop(number))
    for number, one in enumerate(alone):
        assert found[number].token_ids == one.token_ids
        assert found[number].stats.choices_replaced == one.stats.choices_replaced
        assert found[number].stats.replaced_share == one.stats.replaced_share
    assert sum(one.stats.choices_replaced for one in alone) > 0


def test_a_block_takes_no_more_experts_than_its_set(model: Path) -> None:
    sizes: dict[Phase, list[int]] = {phase: [] for phase in Phase}

    def observe(demand: LayerDemand, plan: LayerPlan) -> None:
        end = 0
        for row in demand.context.rows:
            start, end = end, end + row.num_tokens
            for first in range(start, end, 8):
                ids = np.unique(demand.topk_ids[first : first + 8])
                sizes[row.phase].append(len(ids))

    with open_engine(model, lossy="des-vote:experts=4") as engine:
        engine.experts.observers.append(observe)
        for prompt in PROMPTS:
            engine.generate(prompt, PARAMS)
    assert max(sizes[Phase.DENOISE]) <= 4 < min(max(sizes[Phase.COMMIT]), max(sizes[Phase.PREFILL]))


def test_resident_costs_no_load_where_enough_is_resident(model: Path, exact: Any) -> None:
    """All of a fresh block is masked and at 0.5: below 0.6 every token takes residents."""
    loads: list[int] = []

    def observe(demand: LayerDemand, plan: LayerPlan) -> None:
        row = demand.context.rows[-1]
        is_fresh = (demand.context.token_confidence == 0.5).all()
        if len(demand.context.rows) == 1 and row.phase == Phase.DENOISE and is_fresh:
            loads.append(len(plan.load_ids))

    prompt = list(range(16))
    with open_engine(model, lossy="resident:threshold=0.6", policy="naive-lru") as engine:
        assert engine.lossy is not None and engine.lossy.depends_on_cache
        first = engine.generate(prompt, PARAMS)
        engine.experts.observers.append(observe)
        again = engine.generate(prompt, PARAMS)
    assert loads and max(loads) == 0
    assert first.stats.choices_replaced > 0 and again.stats.choices_replaced > 0
    # With all of them resident there is nothing to replace, and answers are the model's own.
    with open_engine(model, lossy="resident:threshold=1", experts_per_layer=E) as engine:
        results = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
    assert [each.token_ids for each in results] == exact
    assert not any(each.stats.choices_replaced for each in results)


# One checkpoint of each family, with how many experts a token takes.
FAMILY_TOP_K = {"llada2_a": 4, "sdar_moe": 4, "rnd1": 4, "llada_moe": 4, "diffusion_gemma": 3}


def test_every_family_is_asked_to_share() -> None:
    types = {
        json.loads((GOLDEN / name / "config.json").read_text())["model_type"]
        for name in FAMILY_TOP_K
    }
    assert types == set(FAMILIES) - {"llada2_moe_veomni"}  # the first in other files


@pytest.mark.parametrize("name", FAMILY_TOP_K)
def test_every_family_shares_by_every_rule(name: str) -> None:
    top_k = FAMILY_TOP_K[name]
    is_free = name in ("rnd1", "diffusion_gemma")  # to choose its block's length
    params = SamplingParams(max_tokens=16, **({} if is_free else {"block_length": 8}))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    sizes: list[int] = []

    def observe(demand: LayerDemand, plan: LayerPlan) -> None:
        end = 0
        for row in demand.context.rows:
            start, end = end, end + row.num_tokens
            if row.phase == Phase.DENOISE:
                sizes.append(len(np.unique(demand.topk_ids[start:end])))

    def run(lossy: str | None) -> tuple[list[int], int]:
        with open_engine(GOLDEN / name, lossy=lossy) as engine:
            sizes.clear()
            engine.experts.observers.append(observe)
            result = engine.generate(prompt, params)
            return result.token_ids, result.stats.choices_replaced

    tokens, _ = run(None)
    assert max(sizes) > top_k + 1
    assert run(f"des-seq:top={top_k}") == (tokens, 0)
    for spec in ("des-seq:top=1", "dmoe:coverage=0.1,minimum=1", "resident:threshold=1"):
        assert run(spec)[1] > 0, spec
    assert run(f"des-vote:experts={top_k + 1}")[1] > 0
    # One set for all that is denoised together, wherever in the sequence that begins.
    assert max(sizes) == top_k + 1


def test_block_routing_bounds_what_a_rule_may_allow(tmp_path: Path) -> None:
    values = CONFIG | {"expert_capacity": 5, "block_size": 8}
    write_checkpoint(tmp_path, synthetic_llada2(values, seed=5), values)
    sizes: list[int] = []
    with open_engine(tmp_path, lossy="resident:threshold=1", experts_per_layer=2) as engine:
        engine.experts.observers.append(
            lambda demand, plan: sizes.extend(
                len(np.unique(demand.topk_ids[i : i + 8]))
                for i in range(0, len(demand.topk_ids), 8)
            )
        )
        result = engine.generate(PROMPTS[1], PARAMS)
    assert result.stats.choices_replaced > 0 and max(sizes) <= 5


# --- the experiment


def test_the_experiments_tables_are_those_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(root))
    study = importlib.import_module("experiments.09_lossy_sharing.run")
    lines = (root / "results" / "raw" / "09_lossy_sharing.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(r["threshold"], r["expert_memory"], r["lossy"]) for r in rows] == list(study.cells())
    assert all(row.keys() >= {"experiment", "commit", "versions", "load_average"} for row in rows)
    readme = (root / "experiments" / "09_lossy_sharing" / "README.md").read_text("utf-8")
    assert all(table.markdown() in readme for table in study.tables(rows))
    for record in study.questions(None)[:3]:
        assert study.group_of(record) in study.GROUPS


# --- where it is named, and where it is refused


Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Said]:
    num_threads = torch.get_num_threads()

    def run(*arguments: str, code: int = 0) -> str:
        assert main(arguments) == code
        captured = capsys.readouterr()
        return captured.out if "--json" in arguments else captured.out + captured.err

    yield run
    torch.set_num_threads(num_threads)


RESIDENT = (
    *("--lossy", "resident:threshold=0.6", "--experts-per-layer", "4", "--ignore-eos"),
    *("--block-length", "4", "--max-tokens", "40"),
)


def test_generate_names_the_rule(said: Said, model: Path) -> None:
    common = ["generate", str(model), "--prompt-ids", "1,2", "--max-tokens", "16", "--threads", "1"]
    words = " ".join(said(*common, "--lossy", "des-seq:top=1").split())
    assert "des-seq:top=1: experts are shared, answers are not the model's own" in words
    assert "expert choices replaced" in words and "depend on" not in words
    answer = json.loads(said(*common, *RESIDENT, "--json"))
    assert answer["lossy"] == "resident:threshold=0.6"
    assert 0 < answer["stats"]["replaced_share"] <= 1 and answer["stats"]["choices_replaced"] > 0
    assert json.loads(said(*common, "--json"))["lossy"] is None
    assert "des-seq, des-vote, dmoe, mixed, resident" in said(*common, "--lossy", "nope", code=2)


def test_help_says_what_answers_depend_on(said: Said) -> None:
    for command in ("generate", "chat", "serve", "bench"):
        words = " ".join(said(command, "--help").split())
        assert "--lossy" in words and "of resident and mixed depend on what is in memory" in words


def test_a_recorded_trace_says_so(model: Path) -> None:
    for lossy in (None, "dmoe:minimum=4"):
        with open_engine(model, lossy=lossy) as engine:
            trace = record_trace(engine, [PromptToRecord([1, 2], "a")], PARAMS)
        assert trace.extra["recording"]["lossy"] == lossy


def bench_of(path: Path, lossy: str) -> Any:
    config = EngineConfig(experts_per_layer=4, lossy=lossy, threads=1)
    prompts = [tuple(prompt) for prompt in PROMPTS]
    return run_bench(
        path, ["naive-lru", "oled"], config, PARAMS, prompts, repetitions=1, is_quick=True
    )


def test_bench_names_the_rule_and_does_not_ask_for_the_impossible(model: Path) -> None:
    report = bench_of(model, "resident:threshold=1")
    rows = report.rows()
    assert {row["lossy"] for row in rows} == {"resident:threshold=1"}
    assert all(row["replaced_share"] > 0 and row["choices_replaced"] > 0 for row in rows)
    assert any("resident:threshold=1" in note for note in report.to_dict()["notes"])
    assert not report.tokens.must_agree
    assert bench_of(model, "des-seq:top=1").tokens.must_agree


def test_refused_where_it_cannot_work(said: Said, model: Path) -> None:
    with pytest.raises(ConfigError, match="lossy and cuda_graphs"):
        EngineConfig(device="cuda", cuda_graphs=True, lossy="dmoe")
    with pytest.raises(ConfigError, match="lossy is 7"):
        EngineConfig(lossy=7)  # type: ignore[arg-type]
    refused = said("bench", "--shape", "llada2-mini", "--lossy", "dmoe", code=2)
    assert "--lossy does not go with --shape" in refused
    with open_engine(model) as engine:
        trace = record_trace(engine, [PromptToRecord([1, 2], "a")], PARAMS)
    with open_engine(model, lossy="dmoe") as engine, pytest.raises(ConfigError, match="replay"):
        Replayer(engine, trace)
