"""Offloaded experts inside models of Transformers: same outputs, bounded memory, honest counts."""

import copy
import importlib
import json
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from diffusion_gemmas import VISION
from fake_streams import FakeGraphs, FakePinning, FakeStreams
from ggufs import write_gguf
from products import product
from safetensors.torch import load_file

from oled_moe.config import parse_size
from oled_moe.devices import Gpu
from oled_moe.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    MissingDependencyError,
    OledMoeError,
)
from oled_moe.integrations import transformers as integration
from oled_moe.integrations.pretrained import PretrainedExperts
from oled_moe.integrations.transformers import (
    expert_stats,
    offload_experts,
    offloaded_experts,
    record_routing,
    restore_experts,
)
from oled_moe.kernels import GPU_KERNELS
from oled_moe.types import LayerDemand, LayerPlan, Phase

# Of 3 layers, 4 or 8 experts each; ids 0 and 1 are kept for padding and end.
BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EIGHT: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**BASE, **EIGHT, head_dim=8),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**BASE, **EIGHT, shared_expert_intermediate_size=24),
    "olmoe": lambda: hf.OlmoeConfig(**BASE, num_experts=8, num_experts_per_tok=3),
    "mixtral": lambda: hf.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**BASE, **ROUTED, head_dim=8, n_group=1, topk_group=1),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **{**BASE, **ROUTED, **LATENT}, n_group=2, topk_group=1
    ),
    "granitemoe": lambda: hf.GraniteMoeConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "gemma4_text": lambda: hf.Gemma4TextConfig(
        **BASE,
        head_dim=8,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
    ),
}
PROMPTS = torch.randint(2, 64, (2, 11), generator=torch.Generator().manual_seed(5))
# Capacities in experts of a layer, each with a policy.
RUNS = ((1.0, "oled"), (2.5, "naive-lru"), (3.0, "oled+prefetch"), (4.0, "priority"))


def random_model(make: Callable[[], Any] = MODELS["qwen3_moe"]) -> Any:
    torch.manual_seed(0)
    return widened(hf.AutoModelForCausalLM.from_config(make())).eval()


def widened(model: Any) -> Any:
    """The same with larger weights, so that experts and routers matter to the outcome."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(PROMPTS).logits
    return logits


def answer(model: Any, **settings: Any) -> torch.Tensor:
    answer_ids: torch.Tensor = model.generate(
        PROMPTS, max_new_tokens=10, do_sample=False, **settings
    )
    return answer_ids


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, atol=1e-5, rtol=0)


@pytest.fixture(scope="module", params=sorted(MODELS))
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A model and its checkpoint in many files."""
    model = random_model(MODELS[request.param])
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    return model, path


@pytest.fixture(scope="module")
def expected(stored: tuple[Any, Path]) -> tuple[torch.Tensor, torch.Tensor]:
    return logits_of(stored[0]), answer(stored[0])


@pytest.mark.parametrize("source, run", product(("model", "path"), RUNS))
def test_outputs_are_those_of_the_whole_model(
    stored: tuple[Any, Path],
    expected: tuple[torch.Tensor, torch.Tensor],
    source: str,
    run: tuple[float, str],
) -> None:
    (whole, path), (logits, answer_ids), (capacity, policy) = stored, expected, run
    given = path if source == "path" else copy.deepcopy(whole)
    model = offload_experts(given, experts_per_layer=capacity, policy=policy)
    assert type(model) is type(whole) and (model is given) == (source == "model")
    assert_close(logits_of(model), logits)
    assert torch.equal(answer(model), answer_ids)
    stats = expert_stats(model)
    assert stats.loads > 0 or stats.resident_experts == stats.num_experts
    assert stats.hits + stats.prefetched + stats.loads == stats.demanded
    names = [name for name, _ in model.named_parameters()]
    assert names and not any(re.search(r"\.experts\.(gate_up|down)_proj", each) for each in names)


def test_batches_with_padding_and_beams() -> None:
    whole = random_model()
    model = offload_experts(copy.deepcopy(whole), experts_per_layer=2)
    mask = torch.ones_like(PROMPTS)
    mask[0, :4] = 0
    for settings in ({"attention_mask": mask}, {"num_beams": 3}, {"use_cache": False}):
        assert torch.equal(answer(model, **settings), answer(whole, **settings)), settings


def diffusion_gemma() -> Any:
    text = hf.DiffusionGemmaTextConfig(
        **BASE,
        head_dim=8,
        global_head_dim=8,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=16,
    )
    torch.manual_seed(0)
    # By default eyes of 167 million weights, which nobody opens here.
    vision = hf.Gemma4VisionConfig(**VISION)
    config = hf.DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=8)
    return widened(hf.DiffusionGemmaForBlockDiffusion(config)).eval()


@pytest.mark.parametrize("is_stored", [False, True], ids=["model", "path"])
def test_encoder_and_decoder_that_share_experts(tmp_path: Path, is_stored: bool) -> None:
    whole = diffusion_gemma()
    whole.save_pretrained(tmp_path)
    model = offload_experts(
        tmp_path if is_stored else copy.deepcopy(whole), experts_per_layer=2, policy="oled"
    )
    with torch.no_grad():
        found, wanted = (
            each(input_ids=PROMPTS, decoder_input_ids=PROMPTS.flip(0)).logits
            for each in (model, whole)
        )
    assert_close(found, wanted)
    stats = expert_stats(model)
    # One set of experts for both, and a forward of each.
    assert stats.num_experts == 3 * 8 and stats.forwards == 2


def test_transposed_experts_are_offloaded_from_a_loaded_model(tmp_path: Path) -> None:
    config = hf.AriaTextConfig(
        **BASE, head_dim=8, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1
    )
    whole = random_model(lambda: config)
    whole.save_pretrained(tmp_path)
    model = offload_experts(copy.deepcopy(whole), experts_per_layer=2)
    assert_close(logits_of(model), logits_of(whole))
    restored = restore_experts(model).state_dict()
    assert all(torch.equal(restored[name], weight) for name, weight in whole.state_dict().items())
    with pytest.raises(ConfigError, match="transposed"):
        offload_experts(tmp_path)


def test_an_activation_other_than_silu_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        offload_experts(random_model(MODELS["gemma4_text"]), experts_per_layer=2)
    assert "GELU" in caplog.text and "slower" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_dtypes(stored_qwen: tuple[Any, Path], dtype: torch.dtype) -> None:
    whole, path = stored_qwen
    small = copy.deepcopy(whole).to(dtype)
    model = offload_experts(path, experts_per_layer=2, dtype=dtype)
    assert model.dtype == dtype
    torch.testing.assert_close(logits_of(model), logits_of(small), atol=0.1, rtol=0.1)


@pytest.fixture(scope="module")
def stored_qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, path = random_model(), tmp_path_factory.mktemp("qwen")
    model.save_pretrained(path)
    return model, path


# Memory


def test_a_budget_below_one_expert_a_layer_names_the_smallest_that_works(
    stored_qwen: tuple[Any, Path],
) -> None:
    whole, path = stored_qwen
    for source in (path, copy.deepcopy(whole)):
        with pytest.raises(DoesNotFitError, match=r"is 9\.8 KiB, .* of 8\.0 KiB for .*") as refused:
            offload_experts(source, "10KB")
        # As the argument takes it, and not a byte more than is needed.
        advised = re.findall(r"raise it to (\w+) or more", str(refused.value))[0]
        least = parse_size("expert_memory", advised)
        assert advised.endswith("KiB")
        with pytest.raises(DoesNotFitError):
            offload_experts(source, least - 1)
        with pytest.raises(DoesNotFitError, match="experts_per_layer"):
            offload_experts(source, experts_per_layer=0.5)
        model = offload_experts(source, advised)
        assert_close(logits_of(model), logits_of(whole))
        stats = expert_stats(model)
        assert stats.resident_bytes <= stats.slot_bytes <= stats.budget_bytes == least


def test_what_does_not_fit_names_only_what_can_be_given(
    stored_qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = stored_qwen
    for usable_bytes, advised in (
        (0, "close other programs"),
        (300 * 2**10, "lower expert_memory to "),
    ):
        monkeypatch.setattr(integration, "usable_memory_bytes", lambda value=usable_bytes: value)
        with pytest.raises(DoesNotFitError, match=advised) as refused:
            offload_experts(path, "2GiB")
        assert "force" not in str(refused.value) and "max_model_len" not in str(refused.value)


@pytest.mark.parametrize("policy", ["oled", "naive-lru", "oled+prefetch", "oled+global", "tide"])
def test_no_more_experts_are_there_than_slots(stored_qwen: tuple[Any, Path], policy: str) -> None:
    whole, path = stored_qwen
    model = offload_experts(path, "30%", policy=policy)
    most = 0

    def observe(demand: LayerDemand, plan: LayerPlan) -> None:
        nonlocal most
        most = max(most, offloaded_experts(model).cache.num_resident)

    offloaded_experts(model).observers.append(observe)
    assert torch.equal(answer(model), answer(whole))
    stats = expert_stats(model)
    num_slots = stats.slot_bytes // stats.expert_bytes
    assert 0 < most <= num_slots and stats.max_resident_experts <= num_slots
    assert stats.budget_bytes == int(0.3 * 24 * stats.expert_bytes)


MEASURE = """
import re, sys, torch
from oled_moe.integrations.transformers import expert_stats, offload_experts
from oled_moe.memory import process_memory_bytes
torch.zeros(64, 64) @ torch.zeros(64, 64)
before = process_memory_bytes()
model = offload_experts(sys.argv[1], int(sys.argv[2]))
model.generate(torch.arange(2, 34)[None], max_new_tokens=4, do_sample=False)
peak = 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
print(peak - before, expert_stats(model).loads)
"""


def test_peak_memory_from_loading_on(tmp_path: Path) -> None:
    """A checkpoint with four times the budget of experts never has them all in RAM."""
    config = hf.Qwen3MoeConfig(
        **{**BASE, "hidden_size": 256, "num_hidden_layers": 8},
        head_dim=64,
        moe_intermediate_size=256,
        num_experts=32,
        num_experts_per_tok=4,
    )
    hf.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path, max_shard_size="30MB")
    all_bytes = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert all_bytes > 200e6 and len(list(tmp_path.glob("*.safetensors"))) > 5
    budget = all_bytes // 4
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(budget)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    grown, loads = map(int, ran.stdout.split())
    assert loads > 60
    # Code that is first run here, and buffers, take some tens of MB; experts a quarter of theirs.
    assert grown < budget + 60e6 < all_bytes


def test_a_loaded_model_spills_to_a_file_without_a_name(tmp_path: Path) -> None:
    whole = random_model()
    model = offload_experts(copy.deepcopy(whole), experts_per_layer=2, offload_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert_close(logits_of(model), logits_of(whole))
    restore_experts(model)
    assert_close(logits_of(model), logits_of(whole))


# Devices


def test_a_device_with_memory_of_its_own(stored_qwen: tuple[Any, Path]) -> None:
    """Slots are NaN before their copies are complete; copies and kernels are late."""
    whole, path = stored_qwen
    for source, settings in (
        (path, {}),
        (copy.deepcopy(whole), {"cpu_experts": True}),
        (random_model(MODELS["gemma4_text"]), {}),
    ):
        wanted = logits_of(whole if source is path else source)
        model = offload_experts(source, experts_per_layer=2, device="emulated", **settings)
        for _ in range(2):
            assert_close(logits_of(model), wanted)


@pytest.mark.parametrize("ram_bytes", [8 * 2**30, 0], ids=["pinned", "from disk"])
def test_a_gpu_played_by_late_streams(
    stored_qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, ram_bytes: int
) -> None:
    whole, path = stored_qwen
    cpu = torch.device("cpu")
    gpu = Gpu(cpu, 4 * 2**30, FakeStreams(0), FakePinning(), GPU_KERNELS["each"], FakeGraphs)
    monkeypatch.setattr(integration, "open_gpu", lambda: gpu)
    if ram_bytes == 0:
        plan = integration.plan_gpu_memory

        def without_ram(*args: Any, **settings: Any) -> Any:
            found = plan(*args, **settings)
            return type(found)(found.gpu, 0, found.host_process_bytes, found.bounce_bytes)

        monkeypatch.setattr(integration, "plan_gpu_memory", without_ram)
    for source in (path, copy.deepcopy(whole)):
        model = offload_experts(source, experts_per_layer=2, device="cuda")
        for _ in range(2):
            assert_close(logits_of(model), logits_of(whole))
        restored = restore_experts(model)
        assert_close(logits_of(restored), logits_of(whole))


# What policies are told, statistics and traces


def test_forwards_are_told_apart(stored_qwen: tuple[Any, Path]) -> None:
    model = offload_experts(stored_qwen[1], experts_per_layer=3)
    with record_routing(model, name="tiny") as trace:
        answer(model)
        answer(model)
    recorded = trace()
    num_new = 10
    # Two prompts and all but the last of ten new tokens, of two sequences, twice.
    assert recorded.row_phase.tolist() == 2 * [
        *[Phase.PREFILL] * 2,
        *[Phase.DENOISE] * 2 * (num_new - 1),
    ]
    assert [request.num_prompt_tokens for request in recorded.requests] == [11] * 4
    assert [request.num_generated_tokens for request in recorded.requests] == [num_new - 1] * 4
    first = recorded.token_position[recorded.row_token_offset[0] : recorded.row_token_offset[1]]
    assert first.tolist() == list(range(11))
    assert recorded.token_position[-1] == 11 + num_new - 2
    assert recorded.top_k == 2 and recorded.num_moe_layers == 3
    assert expert_stats(model).forwards == 2 * num_new


def test_without_a_cache_equally_long_passes_are_steps(stored_qwen: tuple[Any, Path]) -> None:
    model = offload_experts(stored_qwen[1], experts_per_layer=3)
    phases = []

    def observe(demand: LayerDemand, plan: LayerPlan) -> None:
        if demand.layer == 0:
            phases.append(demand.context.rows[0].phase)
            assert (demand.context.token_confidence == 1).all()
            torch.testing.assert_close(
                torch.from_numpy(demand.gate_weights).sum(-1), torch.ones(len(demand.topk_ids))
            )

    offloaded_experts(model).observers.append(observe)
    with torch.no_grad():
        for length in (11, 11, 8, 8):
            model(PROMPTS[:, :length], use_cache=False)
    assert phases == [Phase.PREFILL, Phase.DENOISE, Phase.PREFILL, Phase.DENOISE]


def test_statistics_are_those_of_the_plans(stored_qwen: tuple[Any, Path]) -> None:
    model = offload_experts(stored_qwen[1], experts_per_layer=3, policy="oled+prefetch")
    counts = {"demanded": 0, "hits": 0, "loads": 0}

    def observe(demand: LayerDemand, plan: LayerPlan) -> None:
        counts["demanded"] += len(demand.expert_ids)
        counts["hits"] += len(plan.hit_ids)
        counts["loads"] += len(plan.load_ids)

    offloaded_experts(model).observers.append(observe)
    answer(model)
    stats = expert_stats(model)
    assert {name: getattr(stats, name) for name in counts} == counts
    assert stats.hits > 0 and stats.hit_rate == stats.hits / stats.demanded
    assert stats.bytes_loaded == stats.loads * 3 * 32 * 16 * 4


def test_all_experts_resident_are_loaded_once(stored_qwen: tuple[Any, Path]) -> None:
    model = offload_experts(stored_qwen[1], "100%")
    assert_close(logits_of(model), logits_of(stored_qwen[0]))
    stats = expert_stats(model)
    assert stats.loads == 0 and stats.hit_rate == 1 and stats.resident_experts == 24


# One model among others


def test_experts_come_back_to_a_model_that_has_changed_since() -> None:
    """A part that was added is left alone, and what a model had for saving is back."""
    model = random_model()

    def own_saving(*_: object) -> None: ...

    model.model.save_pretrained = own_saving
    offload_experts(model, experts_per_layer=2)
    model.added = random_model()
    restore_experts(model)
    assert model.model.save_pretrained is own_saving
    assert "save_pretrained" not in vars(model) and "save_pretrained" not in vars(model.added)


def test_saving_and_copying_are_refused_until_experts_are_back(tmp_path: Path) -> None:
    whole = random_model()
    model = offload_experts(copy.deepcopy(whole), experts_per_layer=2)
    for refused in (
        *(lambda: model.save_pretrained(tmp_path), lambda: model.model.save_pretrained(tmp_path)),
        *(model.state_dict, lambda: type(model).save_pretrained(model, tmp_path / "other")),
    ):
        with pytest.raises(OledMoeError, match="restore_experts"):
            refused()
    # A config without weights would be half a checkpoint.
    assert not (tmp_path / "config.json").exists()
    with pytest.raises(OledMoeError, match="copied or pickled"):
        copy.deepcopy(model)
    with pytest.raises(ConfigError, match="offloaded already"):
        offload_experts(model)
    restore_experts(model).save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert_close(logits_of(copy.deepcopy(model)), logits_of(whole))
    with pytest.raises(ConfigError, match="no offloaded experts"):
        expert_stats(model)
    # It can be offloaded anew.
    assert_close(logits_of(offload_experts(model, experts_per_layer=1)), logits_of(whole))


def test_a_model_of_the_same_config_is_left_alone() -> None:
    config = MODELS["qwen3_moe"]()
    torch.manual_seed(0)
    first, second = (hf.Qwen3MoeForCausalLM(config).eval() for _ in range(2))
    wanted = logits_of(second)
    offload_experts(first, experts_per_layer=2)
    assert_close(logits_of(second), wanted)


def test_two_threads_run_one_model(stored_qwen: tuple[Any, Path]) -> None:
    whole, path = stored_qwen
    model = offload_experts(path, experts_per_layer=2)
    wanted = answer(whole)
    found: list[bool] = []

    def run() -> None:
        found.extend(torch.equal(answer(model), wanted) for _ in range(3))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6
    offloaded_experts(model).cache.check()


def test_a_forked_process_is_told(
    stored_qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads are not there: without a word it would wait for a copy for ever."""
    model = offload_experts(stored_qwen[1], experts_per_layer=2)
    with monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: -1)
        with pytest.raises(OledMoeError, match="forked"):
            logits_of(model)
    assert logits_of(model).isfinite().all()


def test_a_dropped_model_leaves_no_threads(stored_qwen: tuple[Any, Path]) -> None:
    before = set(threading.enumerate())
    model = offload_experts(stored_qwen[1], experts_per_layer=2)
    logits_of(model)
    started = set(threading.enumerate()) - before
    assert started
    restore_experts(model)
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_a_failure_while_building_leaves_the_model_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model()
    wanted = logits_of(model)

    def fail(*args: Any, **settings: Any) -> Any:
        args[3].close()
        raise CheckpointError("no such luck")

    monkeypatch.setattr(integration, "build_tiers", fail)
    with pytest.raises(CheckpointError, match="no such luck"):
        offload_experts(model, experts_per_layer=2)
    assert torch.equal(logits_of(model), wanted)


def test_the_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[1] / "examples" / "transformers_offload.py"
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert re.search(r"hits    \d+ of \d+ \(\d+%\), \d+ loads", capsys.readouterr().out)


# What is refused


def test_experts_that_cannot_be_run_are_refused_by_name() -> None:
    gpt_oss = hf.GptOssConfig(
        **{**BASE, "max_position_embeddings": 131072},
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    with pytest.raises(ConfigError, match="GptOssExperts have biases"):
        offload_experts(hf.AutoModelForCausalLM.from_config(gpt_oss))
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**BASE))
    with pytest.raises(ConfigError, match="no expert modules"):
        offload_experts(llama)
    with pytest.raises(ConfigError, match="allowed: a PreTrainedModel"):
        offload_experts(torch.nn.Linear(2, 2))


def test_lossy_rules_are_refused(stored_qwen: tuple[Any, Path]) -> None:
    _, path = stored_qwen
    with pytest.raises(ConfigError, match="choose their experts themselves"):
        offload_experts(path, lossy="dmoe")


def test_settings_that_mean_nothing_are_refused(stored_qwen: tuple[Any, Path]) -> None:
    whole, path = stored_qwen
    for settings, said in (
        ({"policy": "finemoe:distance=1"}, "needs .*gate_scores"),
        ({"policy": "belady"}, "simulate"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"offload_folder": "x"}, "loaded already"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"experts_per_layer": 2, "expert_memory": "1MB"}, "expert_memory"),
    ):
        with pytest.raises(ConfigError, match=said):
            offload_experts(path, **settings)
    with pytest.raises(ConfigError, match=re.escape("model.to(dtype)")):
        offload_experts(whole, dtype="float16")


def test_training_and_gradients_are_refused() -> None:
    whole = random_model()
    model = offload_experts(copy.deepcopy(whole), experts_per_layer=2)
    # No `no_grad` is needed: nothing asks for gradients.
    assert_close(model(PROMPTS).logits, logits_of(whole))
    model.train()
    with pytest.raises(OledMoeError, match="call model.eval"):
        logits_of(model)
    model.eval()
    embedded = model.get_input_embeddings()(PROMPTS).requires_grad_()
    with pytest.raises(OledMoeError, match="no_grad"):
        model(inputs_embeds=embedded)
    assert_close(logits_of(model), logits_of(whole))
    model.to(torch.bfloat16)
    with pytest.raises(OledMoeError, match="convert or move the model before"):
        logits_of(model)


def test_transformers_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("oled_moe.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=re.escape("oled-moe[transformers]")):
        importlib.import_module("oled_moe.integrations.transformers")


def test_the_implementation_alone_does_nothing_but_say_so() -> None:
    model = random_model()
    model.set_experts_implementation(integration.IMPLEMENTATION)
    with pytest.raises(OledMoeError, match="call oled_moe.integrations"):
        logits_of(model)


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    directory = Path(__file__).parent / "golden" / "rnd1"
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    write_gguf(tmp_path / "model.gguf", "rnd1", tensors, config)
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ConfigError, match="is a GGUF file, which is read for this package's"):
            offload_experts(path, experts_per_layer=2)


def test_checkpoints_with_faults(stored_qwen: tuple[Any, Path], tmp_path: Path) -> None:
    whole, _ = stored_qwen
    whole.save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    del index["weight_map"][name]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="up of layer 1, expert 3"):
        offload_experts(tmp_path, experts_per_layer=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Nothing"]}))
    with pytest.raises(ConfigError, match="architectures in config.json"):
        offload_experts(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 2.5},
        {"num_experts_per_tok": None},
        {"head_dim": 0},
        {"dtype": "floats"},
        {"pad_token_id": 999},
        {"num_attention_heads": 3},
    ],
)
def test_configs_that_cannot_be_are_told_in_a_line(
    stored_qwen: tuple[Any, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    shutil.copytree(stored_qwen[1], tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match="Transformers") as caught:
        offload_experts(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_a_file_that_changes_while_it_is_loaded_is_told(
    stored_qwen: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stored_qwen[1], tmp_path / "model")
    open_store = PretrainedExperts.open_store

    def cut_short(pretrained: PretrainedExperts, method: str) -> Any:
        store = open_store(pretrained, method)
        os.truncate(tmp_path / "model/model.safetensors", 1000)
        return store

    monkeypatch.setattr(PretrainedExperts, "open_store", cut_short)
    with pytest.raises(CheckpointError, match="try again"):
        offload_experts(tmp_path / "model")


def test_a_read_that_fails_is_told_and_the_next_forward_works(
    stored_qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = stored_qwen
    model = offload_experts(path, experts_per_layer=2)
    pool = offloaded_experts(model).pool
    copy_expert = pool._copy

    def fail(layer: int, expert: int, slot: torch.Tensor) -> None:
        if layer == 1:
            raise CheckpointError("the disk is gone")
        copy_expert(layer, expert, slot)

    monkeypatch.setattr(pool, "_copy", fail)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        logits_of(model)
    monkeypatch.setattr(pool, "_copy", copy_expert)
    assert_close(logits_of(model), logits_of(whole))
