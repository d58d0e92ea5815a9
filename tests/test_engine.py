"""The engine as users call it: devices, budgets, prompts, streaming, failures, concurrency."""

import gc
import json
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import synthetic_llada2, write_checkpoint
from fakes import LIVE_POLICIES, LIVE_SPECS
from products import product
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

import oled_moe
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.engine import Engine, GenerationResult
from oled_moe.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    InputError,
    ModelNotFoundError,
    OledMoeError,
)
from oled_moe.kernels.native import native_kernels
from oled_moe.model_paths import find_model
from oled_moe.types import LayerDemand, LayerPlan

CONFIG: dict[str, Any] = {
    "model_type": "llada2_moe",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
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
PARAMS = SamplingParams(max_tokens=20, block_length=8, threshold=0.3, ignore_eos=True)
QUICK = replace(DEFAULT_EMULATED_PROFILE, copy_latency_s=0.0, emulated_jitter_s=2e-4)


def write_tokenizer(directory: Path) -> None:
    """Byte-level: ids 0 to 255 are bytes, then eos, mask, a turn end and one filler."""
    byte_names = pre_tokenizers.ByteLevel.alphabet()
    vocab = {name: i for i, name in enumerate(sorted(byte_names))}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|mask|>", "<|role_end|>", "<|filler|>"])
    raw.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    weights = synthetic_llada2(CONFIG, dtype=torch.float32, seed=3)
    # Sharper logits: confidences then spread over the whole range.
    weights["lm_head.weight"] *= 12
    write_checkpoint(directory, weights, CONFIG, convention="llada20", num_files=3)
    write_tokenizer(directory)
    return directory


def open_engine(path: Path, device: str = "cpu", **settings: Any) -> Engine:
    settings.setdefault("hardware", QUICK if device == "emulated" else DEFAULT_PROFILE)
    settings.setdefault("experts_per_layer", 3)
    return Engine(path, EngineConfig(device=device, **settings))


@pytest.fixture(scope="module")
def plain(tiny: Path) -> dict[tuple[int, ...], list[int]]:
    """Answers of the fully resident model, to compare everything else with."""
    prompts = [(), (5,), tuple(range(7)), tuple(range(8)), tuple(range(9)), tuple(range(40))]
    with open_engine(tiny, experts_per_layer=12) as engine:
        return {prompt: engine.generate(list(prompt), PARAMS).token_ids for prompt in prompts}


def test_public_names_are_the_promise() -> None:
    assert oled_moe.Engine is Engine
    assert oled_moe.EngineConfig is EngineConfig
    assert oled_moe.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="Nothing"):
        oled_moe.Nothing  # noqa: B018 - the access is the test


@pytest.mark.parametrize(
    "policy, capacity", product(sorted(LIVE_POLICIES), (0, 1, 1.2, 6, 11.5, 12))
)
def test_same_tokens_whatever_is_cached(
    tiny: Path, plain: dict[tuple[int, ...], list[int]], policy: str, capacity: float
) -> None:
    with open_engine(tiny, policy=policy, experts_per_layer=capacity) as engine:
        for prompt, expected in plain.items():
            result = engine.generate(list(prompt), PARAMS)
            assert result.token_ids == expected
            allowed = engine.memory_plan.num_slots + engine.memory_plan.num_staging
            assert result.stats.max_resident_experts <= allowed


@pytest.mark.parametrize("policy", [spec for spec in LIVE_SPECS if spec not in LIVE_POLICIES])
def test_same_tokens_whatever_the_parameters(
    tiny: Path, plain: dict[tuple[int, ...], list[int]], policy: str
) -> None:
    for capacity in (0, 3.5, 8):
        with open_engine(tiny, policy=policy, experts_per_layer=capacity) as engine:
            for prompt, expected in plain.items():
                assert engine.generate(list(prompt), PARAMS).token_ids == expected


@pytest.mark.parametrize("policy, cpu_experts, first", product(LIVE_SPECS, (False, True), (0, 1)))
def test_same_tokens_on_the_emulated_device_with_poison_and_delays(
    tiny: Path, plain: dict[tuple[int, ...], list[int]], policy: str, cpu_experts: bool, first: int
) -> None:
    """Free slots are NaN, every lane is delayed at random under a seed."""
    seed = 2 * LIVE_SPECS.index(policy) + cpu_experts
    random = np.random.default_rng(seed)
    capacity = float(random.choice([0, 0.5, 1, 2, 5, 9]))
    settings = {"policy": policy, "cpu_experts": cpu_experts, "seed": seed}
    with open_engine(tiny, "emulated", experts_per_layer=capacity, **settings) as engine:
        for prompt in random.permutation(len(plain))[first::2]:
            prompt, expected = list(plain.items())[prompt]
            found = engine.generate(list(prompt), PARAMS).token_ids
            assert found == expected, capacity


def test_missing_wait_shows_as_nan(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without the copy's event, slots are read before they are full."""
    from oled_moe.lanes import DONE
    from oled_moe.slots import SlotPool

    monkeypatch.setattr(SlotPool, "ready", lambda self, load: DONE)
    slow = replace(QUICK, copy_latency_s=3e-3, emulated_jitter_s=0.0)
    with open_engine(tiny, "emulated", hardware=slow, cpu_experts=False) as engine:
        seen: list[bool] = []
        engine.model.probe = lambda name, value: seen.append(bool(value.isnan().any()))
        with pytest.raises(OledMoeError, match="not finite"):
            engine.generate([1, 2, 3], replace(PARAMS, max_tokens=8))
    assert any(seen)


@pytest.mark.parametrize("budget", ["25%", "50%", 40_000, 100_000, "100%"])
def test_expert_memory_is_obeyed(
    tiny: Path, plain: dict[tuple[int, ...], list[int]], budget: int | str
) -> None:
    with open_engine(tiny, experts_per_layer=None, expert_memory=budget) as engine:
        shape = engine.memory_plan.shape
        if isinstance(budget, str):
            allowed = shape.num_experts_total * int(budget[:-1]) // 100
        else:
            allowed = budget // shape.expert_bytes
        for prompt, expected in plain.items():
            stats = engine.generate(list(prompt), PARAMS).stats
            assert engine.generate(list(prompt), PARAMS).token_ids == expected
        assert stats.max_resident_experts <= allowed
        assert stats.expert_memory_bytes <= allowed * shape.expert_bytes


def test_all_resident_loads_nothing(tiny: Path) -> None:
    with open_engine(tiny, experts_per_layer=12) as engine:
        stats = engine.generate([1, 2, 3], PARAMS).stats
    assert stats.expert_loads == stats.bytes_loaded == stats.cpu_expert_runs == 0
    assert stats.hit_rate == stats.pooled_hit_rate == 1.0
    assert stats.max_resident_experts == 24
    assert 0 < stats.expert_cache_utilization < 1


def test_statistics_fit_together(tiny: Path) -> None:
    with open_engine(tiny, policy="oled") as engine:
        loads: list[int] = []
        engine.experts.observers.append(lambda demand, plan: loads.append(len(plan.load_ids)))
        result = engine.generate(list(range(11)), PARAMS)
    stats = result.stats
    assert stats.num_prefill_forwards == 1
    assert stats.num_commit_forwards == 0  # each is part of the next block's first forward
    assert stats.expert_loads == sum(loads)
    assert stats.bytes_loaded == sum(loads) * 3 * 32 * 32 * 4
    forwards = stats.num_denoise_forwards + stats.num_commit_forwards
    assert stats.tokens_per_forward == pytest.approx(20 / forwards)
    for name in ("hit_rate", "expert_cache_utilization", "effective_transfer_ratio"):
        assert 0 <= getattr(stats, name) <= 1
    assert 0 < stats.ttft_s and 0 < stats.tpot_s and 0 < stats.policy_overhead < 1
    assert json.loads(json.dumps(asdict(stats)))["expert_loads"] == stats.expert_loads


def test_prompts_as_text_or_ids(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode("What?")
        from_text, from_ids = engine.generate("What?", PARAMS), engine.generate(ids, PARAMS)
        assert from_text.token_ids == from_ids.token_ids
        assert from_text.text == from_ids.text == engine.tokenizer.decode(from_ids.token_ids)
        as_array = engine.generate(np.array(ids), PARAMS)
        assert as_array.token_ids == from_ids.token_ids
        assert engine.generate("", PARAMS).token_ids == engine.generate([], PARAMS).token_ids


@pytest.mark.parametrize("prompt", [[-1], [260], [1.5], [None], [[1]], 7])
def test_prompts_that_cannot_be_run(tiny: Path, prompt: Any) -> None:
    with open_engine(tiny) as engine, pytest.raises(InputError):
        engine.stream(prompt, PARAMS)


def test_mask_id_in_the_prompt_is_prompt(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        prompt = [257] * 11
        events = list(engine.stream(prompt, PARAMS))
        first = events[0]
        assert first.token_ids[:3] == (257, 257, 257)
        assert not any(first.is_masked[:3])
        assert all(change.position >= 11 for event in events for change in event.changes)
        result = events[-1].result
        assert result is not None and 257 not in result.token_ids


def test_too_long_for_the_context(tiny: Path) -> None:
    with open_engine(tiny, max_model_len=32) as engine:
        engine.generate(list(range(12)), PARAMS)
        with pytest.raises(InputError, match="max_model_len 32"):
            engine.generate(list(range(13)), PARAMS)
        with pytest.raises(ConfigError, match="block_length"):
            engine.generate([1], replace(PARAMS, block_length=33))
    with pytest.raises(ConfigError, match="max_model_len is 513"):
        open_engine(tiny, max_model_len=513)


def test_long_prompts_in_pieces(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oled_moe import decoding

    prompt = [i % 256 for i in range(75)]
    with open_engine(tiny) as engine:
        whole = engine.generate(prompt, PARAMS)
        monkeypatch.setattr(decoding, "MAX_PREFILL_TOKENS", 20)
        pieces = engine.generate(prompt, PARAMS)
    assert whole.stats.num_prefill_forwards == 1
    assert pieces.stats.num_prefill_forwards == 5
    assert pieces.token_ids == whole.token_ids


@pytest.mark.parametrize("algorithm", ["low_confidence", "joint_threshold"])
def test_streamed_text_only_grows(tiny: Path, algorithm: str) -> None:
    params = replace(PARAMS, algorithm=algorithm, max_tokens=40, ignore_eos=False)
    with open_engine(tiny) as engine:
        for seed in range(6):
            text, result = "", None
            for event in engine.stream(
                [seed, 1, 2], replace(params, temperature=1.0, seed=seed, stop=("\x00", "zq"))
            ):
                assert result is None, "an event after the last"
                assert event.text is not None and event.text.startswith(text)
                text, result = event.text, event.result
            assert result is not None and result.text == text
            assert engine.tokenizer is not None
            assert "\x00" not in text and "zq" not in text


def test_stop_strings_cut_text_and_tokens(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        full = engine.generate([9, 8], PARAMS)
        assert full.text is not None and engine.tokenizer is not None
        middle = engine.tokenizer.decode(full.token_ids[4:6])
        result = engine.generate([9, 8], replace(PARAMS, stop=middle))
        assert result.finish_reason == "stop"
        assert result.text == full.text[: full.text.index(middle)]
        assert result.token_ids == full.token_ids[: len(result.token_ids)]
        assert middle in engine.tokenizer.decode(result.token_ids)
        assert middle not in engine.tokenizer.decode(result.token_ids[:-1])


def test_stop_token_ids_end_the_answer(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        params = replace(PARAMS, ignore_eos=False)
        full = engine.generate([9, 8], params)
        stop_id = full.token_ids[5]
        result = engine.generate([9, 8], replace(params, stop_token_ids=(stop_id,)))
        cut = full.token_ids.index(stop_id) + 1
        assert result.token_ids == full.token_ids[:cut] and result.finish_reason == "stop"


def test_sampling_is_reproducible_by_seed(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        params = replace(PARAMS, temperature=1.5, top_k=50, top_p=0.9)
        first = [engine.generate([1], replace(params, seed=s)).token_ids for s in (1, 2, 1)]
    assert first[0] == first[2] != first[1]


def test_parameters_come_from_the_checkpoint(tiny: Path, tmp_path: Path) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"block_length": 4, "max_new_tokens": 6, "eos_token_id": [256, 258]})
    )
    with open_engine(tmp_path) as engine:
        events = list(engine.stream([1]))
        assert len(events[0].token_ids) == 4
        result = events[-1].result
        assert result is not None and len(result.token_ids) <= 6
        assert engine.sampling_defaults.stop_token_ids == (258,)
    # As SDAR's files have it: one eos there, and the ends of chats in the other.
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 255}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_engine(tmp_path) as engine:
        found = engine.sampling_defaults
        assert found.eos_token_id == 255 and set(found.stop_token_ids or ()) == {256, 258}
    (tmp_path / "generation_config.json").write_text(json.dumps({"threshold": 7}))
    with pytest.raises(CheckpointError, match="threshold"):
        open_engine(tmp_path)


def test_one_answer_at_a_time(tiny: Path, plain: dict[tuple[int, ...], list[int]]) -> None:
    with open_engine(tiny) as engine:
        results: dict[tuple[int, ...], GenerationResult] = {}

        def answer(prompt: tuple[int, ...]) -> None:
            results[prompt] = engine.generate(list(prompt), PARAMS)

        threads = [threading.Thread(target=answer, args=(prompt,)) for prompt in plain]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {prompt: result.token_ids for prompt, result in results.items()} == plain


def test_streams_of_one_thread_do_not_deadlock(tiny: Path) -> None:
    with open_engine(tiny) as engine:
        stream = engine.stream([1], PARAMS)
        next(stream)
        with pytest.raises(OledMoeError, match="still streaming"):
            engine.generate([2], PARAMS)
        stream.close()
        engine.generate([2], PARAMS)


def test_abandoned_stream_leaves_the_engine_whole(
    tiny: Path, plain: dict[tuple[int, ...], list[int]]
) -> None:
    with open_engine(tiny) as engine:
        for prompt, expected in plain.items():
            stream = engine.stream(list(prompt), PARAMS)
            next(stream)
            next(stream)
            stream.close()
            assert engine.generate(list(prompt), PARAMS).token_ids == expected
        assert engine.experts.observers == []


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_failing_read_is_an_error_and_nothing_more(
    tiny: Path, plain: dict[tuple[int, ...], list[int]], device: str
) -> None:
    """A copy that fails in the middle of an answer: that answer fails, the next is right."""
    prompt = tuple(range(9))
    with open_engine(tiny, device, experts_per_layer=2) as engine:
        pool = engine._tiers.pool
        real_copy, num_copies = pool._copy, 0

        def failing_copy(layer: int, expert: int, slot: torch.Tensor) -> None:
            nonlocal num_copies
            num_copies += 1
            if num_copies in (5, 40, 41):
                raise CheckpointError("the disk went away")
            real_copy(layer, expert, slot)

        pool._copy = failing_copy
        num_failed = 0
        for _ in range(6):
            try:
                assert engine.generate(list(prompt), PARAMS).token_ids == plain[prompt]
            except CheckpointError:
                num_failed += 1
            engine.cache.check()
        assert 1 <= num_failed <= 3
        assert engine.generate(list(prompt), PARAMS).token_ids == plain[prompt]


def test_interrupt_in_the_middle_leaves_the_engine_whole(
    tiny: Path, plain: dict[tuple[int, ...], list[int]]
) -> None:
    prompt = tuple(range(9))
    with open_engine(tiny, "emulated") as engine:

        def interrupt(demand: LayerDemand, plan: LayerPlan) -> None:
            raise KeyboardInterrupt

        engine.experts.observers.append(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(list(prompt), PARAMS)
        engine.experts.observers.clear()
        assert engine.generate(list(prompt), PARAMS).token_ids == plain[prompt]


def test_closed_engine(tiny: Path) -> None:
    engine = open_engine(tiny)
    stream = engine.stream([1], PARAMS)
    engine.close()
    engine.close()
    with pytest.raises(OledMoeError, match="closed"):
        next(stream)
    with pytest.raises(OledMoeError, match="closed"):
        engine.generate([1], PARAMS)


def test_nothing_stays_open_after_a_failed_start(tiny: Path, tmp_path: Path) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    threads = set(threading.enumerate())
    num_open = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(CheckpointError, match=shard.name):
        open_engine(tmp_path)
    assert set(threading.enumerate()) <= threads
    if num_open:
        assert len(list(Path("/proc/self/fd").iterdir())) == num_open


def test_budgets_that_do_not_fit(tiny: Path) -> None:
    with pytest.raises(DoesNotFitError, match="raise it to"):
        open_engine(tiny, experts_per_layer=None, expert_memory=100)
    with pytest.raises(DoesNotFitError, match="raise memory to"):
        open_engine(tiny, experts_per_layer=None, memory="1MiB")
    with pytest.raises(ConfigError, match="experts_per_layer is 13"):
        open_engine(tiny, experts_per_layer=13)


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model at ./nowhere"):
        find_model("./nowhere")
    with pytest.raises(ModelNotFoundError, match="oled-moe pull some/model"):
        find_model("some/model", hub_cache=tmp_path)
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert find_model("some/model", hub_cache=tmp_path) == snapshot


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_run_and_do_not_depend_on_the_cache(tiny: Path, dtype: str) -> None:
    with open_engine(tiny, experts_per_layer=12, dtype=dtype) as engine:
        expected = engine.generate([1, 2, 3], PARAMS).token_ids
    for device in ("cpu", "emulated"):
        settings = {"dtype": dtype, "cpu_experts": False}
        with open_engine(tiny, device, experts_per_layer=2, **settings) as engine:
            assert engine.generate([1, 2, 3], PARAMS).token_ids == expected


def test_tiny_experts_run_on_one_thread(tiny: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for threads, expected in ((None, 1), (2, 2)):
            with open_engine(tiny, threads=threads):
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_engines_beside_each_other_have_the_same_threads(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second engine once took the one thread that the first had set for all there are, and the
    first to close decided what was left behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    native = native_kernels()
    seen: list[int] = []
    # As in a process in which no other test has left an engine open, or dropped one.
    gc.collect()
    monkeypatch.setattr("oled_moe.engine._torch_threads", oled_moe.engine._TorchThreads())
    try:
        first = open_engine(tiny, dtype="bfloat16")
        first.generate([1], PARAMS)
        second = open_engine(tiny, dtype="bfloat16")
        for engine in (first, second):
            if native is not None:
                engine.outcome_observers.append(lambda _: seen.append(native.num_threads))
            engine.generate([1] * 120, PARAMS)
            assert native is None or max(seen) == 2
            seen.clear()
        first.close()
        assert torch.get_num_threads() == 1, "the second still lives"
        del second, engine
        gc.collect()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_dropped_engines_leave_no_threads(tiny: Path) -> None:
    threads = set(threading.enumerate())
    for device in ("cpu", "emulated"):
        engine = open_engine(tiny, device)
        engine.generate([1], PARAMS)
        assert not set(threading.enumerate()) <= threads
        del engine
        gc.collect()
        assert set(threading.enumerate()) <= threads


def test_forked_process_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(tiny) as engine:
        monkeypatch.setattr("os.getpid", lambda: -1)
        with pytest.raises(OledMoeError, match="forked"):
            engine.generate([1], PARAMS)


def test_stream_of_a_thread_that_ended_does_not_accuse_another(tiny: Path) -> None:
    """Identifiers of ended threads are given out again; the turn is the thread's own."""
    with open_engine(tiny) as engine:
        streams = []

        def begin() -> None:
            streams.append(engine.stream([1], PARAMS))
            next(streams[0])

        answers: list[list[int]] = []
        first = threading.Thread(target=begin)
        first.start()
        first.join()
        second = threading.Thread(
            target=lambda: answers.append(engine.generate([1], PARAMS).token_ids)
        )
        second.start()
        second.join(0.2)
        assert second.is_alive(), "it waits for its turn"
        streams[0].close()
        second.join()
        assert answers == [engine.generate([1], PARAMS).token_ids]


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate([1], {"max_tokens": 5}),
        lambda engine: Engine(None),
        lambda engine: Engine(b"demo"),
        lambda engine: Engine("demo", {"device": "cpu"}),
    ],
)
def test_arguments_of_a_wrong_kind(tiny: Path, call: Any) -> None:
    with open_engine(tiny) as engine, pytest.raises(ConfigError):
        call(engine)


def test_damaged_weights_are_an_error(tiny: Path, tmp_path: Path) -> None:
    weights = synthetic_llada2(CONFIG, dtype=torch.float32, seed=3)
    weights["model.layers.1.mlp.experts.2.up_proj.weight"][:] = float("nan")
    weights["model.norm.weight"][0] = float("nan")
    write_checkpoint(tmp_path, weights, CONFIG)
    with open_engine(tmp_path) as engine, pytest.raises(OledMoeError, match="not finite"):
        engine.generate([1], PARAMS)


def test_tokenizer_with_ids_beyond_the_vocabulary(tiny: Path, tmp_path: Path) -> None:
    weights = synthetic_llada2(CONFIG | {"vocab_size": 258}, dtype=torch.float32, seed=3)
    write_checkpoint(tmp_path, weights, CONFIG | {"vocab_size": 258})
    write_tokenizer(tmp_path)
    with open_engine(tmp_path) as engine, pytest.raises(InputError, match="allowed: 0 to 257"):
        engine.generate("<|filler|>", PARAMS)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_an_engine_that_cannot_be_made_leaves_no_threads(tiny: Path, device: str) -> None:
    threads = set(threading.enumerate())
    for _ in range(2):
        # The placement does not fit, which shows when all lanes are there.
        with pytest.raises(ConfigError, match="n-cpu-moe"):
            open_engine(tiny, device, policy="n-cpu-moe:n=0", experts_per_layer=1)
    assert set(threading.enumerate()) <= threads
