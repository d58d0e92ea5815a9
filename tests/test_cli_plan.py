"""`plan` and `doctor MODEL`: verdicts, exit codes, index-only models, JSON and text."""

import contextlib
import copy
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oled_moe import cli, measuring, outlook, prediction, profiler
from oled_moe.cli_plan import PlanFlags, print_outlook
from oled_moe.config import EngineConfig
from oled_moe.costs import DEFAULT_PROFILE
from oled_moe.errors import CheckpointError, ConfigError, ModelNotFoundError
from oled_moe.inspection import measure_software
from oled_moe.model_paths import find_model
from oled_moe.models import FAMILIES
from oled_moe.outlook import Machine, imagine, open_sizes, plan_for
from oled_moe.packing import pack_checkpoint, plan_pack
from oled_moe.random_checkpoint import checkpoint_shards
from oled_moe.shapes import SHAPES

pytestmark = pytest.mark.usefixtures("shared_texts")

GIB = 2**30
Run = Callable[..., tuple[int, str, str]]


REAL_LENGTHS = {name: getattr(prediction, name) for name in ("_MAX_LAYERS", "_ANSWER_TOKENS")}


@pytest.fixture(autouse=True)
def short_replays(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """What is predicted is tested in test_prediction.py; here, that it is said."""
    if not pytestconfig.getoption("--full"):
        monkeypatch.setattr(prediction, "_MAX_LAYERS", 2)
        monkeypatch.setattr(prediction, "_ANSWER_TOKENS", 32)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"JSON holds {name}")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def index_only(tmp_path: Path) -> Path:
    """LLaDA2-mini's config and an index of shards that are not there."""
    folder = tmp_path / "mini"
    folder.mkdir()
    config = {**SHAPES["llada2-mini"].config, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    shards = checkpoint_shards(config)
    file_of = {tensor.name: shard.file_name for shard in shards for tensor in shard.tensors}
    index = {"metadata": {"total_size": 32_511_286_784}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# Models without weights


def test_index_only_directory_is_planned(run: Run, index_only: Path) -> None:
    code, out, err = run("plan", str(index_only), "--ram", "12GiB", "--json")
    view = strict(out)
    assert code == 0 and err == ""
    assert not view["has_weights"] and view["path"] == str(index_only)
    assert "20 of 20 weight files are missing" in view["notes"][0]
    assert view["fit"]["plan"]["expert_bytes"] == 3 * 2048 * 512 * 2
    assert view["fit"]["plan"]["num_experts"] == 19 * 256
    assert view["prediction"]["prompt_tokens"] == 512
    # Nothing is said about an index that agrees.
    assert len(view["notes"]) == 1


def test_a_short_context_is_planned_for_a_prompt_that_fits(
    run: Run, index_only: Path, tmp_path: Path
) -> None:
    """The default of --prompt-tokens was refused as if somebody had asked for it."""
    folder = tmp_path / "short"
    shutil.copytree(index_only, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 256
    (folder / "config.json").write_text(json.dumps(config))
    code, out, _ = run("plan", str(folder), "--ram", "12GiB", "--json")
    assert code == 0 and strict(out)["prediction"]["prompt_tokens"] <= 256
    assert run("plan", str(folder), "--ram", "12GiB", "--prompt-tokens", "512")[0] == 2


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["weight_map"].pop(name)


def test_an_index_of_another_model_is_refused(run: Run, index_only: Path) -> None:
    path = index_only / "model.safetensors.index.json"
    right = json.loads(path.read_text())
    router = "model.layers.3.mlp.gate.weight"
    experts = [name for name in right["weight_map"] if name.startswith("model.layers.4.mlp.exp")]
    others = {
        "weights take 953.7 MiB, where config.json makes it 30.3 GiB": lambda index: index[
            "metadata"
        ].update(total_size=10**9),
        f"lacks 1 of the model's tensors, {router} first": drop(router),
        "lacks 1 of the model's tensors, experts of MoE layer 3 first": lambda index: [
            index["weight_map"].pop(name) for name in experts
        ],
        "lists model.layers.0.mlp.gate.weight, which config.json does not": lambda index: index[
            "weight_map"
        ].update({"model.layers.0.mlp.gate.weight": "x"}),
    }
    for words, spoil in others.items():
        index = copy.deepcopy(right)
        spoil(index)
        path.write_text(json.dumps(index))
        code, out, err = run("plan", str(index_only))
        assert code == 2 and out == "" and err.count("\n") == 1
        assert words in err and "do not belong together; download both again" in err
    # Another family's index, and one that holds another part of a model besides.
    sdar = checkpoint_shards(SHAPES["sdar-30b"].config)
    names = {tensor.name: shard.file_name for shard in sdar for tensor in shard.tensors}
    path.write_text(json.dumps({**right, "weight_map": names}))
    assert run("plan", str(index_only))[0] == 2
    more = {
        "metadata": {"total_size": 34 * 10**9},
        "weight_map": {**right["weight_map"], "eye": "e"},
    }
    path.write_text(json.dumps(more))
    assert open_sizes(index_only).denoising.block_length == 32


def test_config_alone_will_do(index_only: Path) -> None:
    (index_only / "model.safetensors.index.json").unlink()
    model = open_sizes(index_only)
    assert "there is no weight file" in model.notes[0] and not model.has_weights


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_without_files(name: str) -> None:
    model = open_sizes(name)
    assert model.path is None and model.family == SHAPES[name].config["model_type"]
    assert model.sizes.shape.num_layers == SHAPES[name].num_moe_layers
    assert 0 < model.sizes.head_bytes < model.weights.dense_bytes


# Words that only the plans of some families have: blocks with a prefix, or whole canvases.
@pytest.mark.parametrize(
    ("name", "block_length", "canvas_tokens", "kv_bytes"),
    [
        # models.md 1.5: bytes of keys and values for a token.
        ("LLaDA2.1-mini", 32, 0, 40_960),
        ("llada2-flash", 32, 0, 65_536),
        ("SDAR-30B-A3B-Chat", 4, 0, 98_304),
        ("RND1-Base-0910", 256, 256, 98_304),
        ("LLaDA-MoE-7B-A1B-Instruct", 32, 256, 131_072),
        ("LLaDA2.2-flash", 32, 0, 65_536),
        # Keys and values of 25 layers of 8 · 256 and 5 of 2 · 512.
        ("DiffusionGemma-26B-A4B-it", 256, 0, 225_280),
    ],
)
def test_every_published_name_is_planned(
    run: Run, name: str, block_length: int, canvas_tokens: int, kv_bytes: int
) -> None:
    code, out, _ = run(
        "plan", name, "--gpu-memory", "24GiB", "--ram", "256GiB", "--hardware", "rtx4090", "--json"
    )
    view = strict(out)
    prediction, lines = view["prediction"], view["fit"]["plan"]["lines"]
    assert code == 0 and not view["has_weights"]
    assert prediction["block_length"] == block_length
    assert prediction["canvas_tokens"] == canvas_tokens
    is_gemma = "Gemma" in name
    if not is_gemma:
        assert {"what": "keys and values", "bytes": 4096 * kv_bytes} in lines
    assert open_sizes(name).sizes.kv_bytes_per_token == kv_bytes
    assert view["cache"]["policy"] == ("stream" if is_gemma else "oled")
    assert view["cache"]["active_per_layer"] <= view["cache"]["num_experts_per_layer"]
    is_assumed = any("not published" in note for note in prediction["notes"])
    assert is_assumed == (not name.lower().startswith("llada2"))
    text = capture(print_outlook, view)
    words = " ".join(text.split())
    assert ("takes the whole canvas of 768 tokens" in words) == bool(canvas_tokens)
    assert ("answer of 256 takes 256 forwards" in words) == ("RND1" in name)
    assert ("5.3 tokens each, as many steps as are set" in words) == is_gemma
    assert ("a block admits 48 of 256 experts" in words) == ("2.2" in name)
    if "2.2" in name:
        assert 40 < view["cache"]["active_per_layer"] <= 48


def capture(show: Callable[[Any], None], view: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show(view)
    return out.getvalue()


def test_sizes_of_config_are_those_of_headers(tmp_path: Path) -> None:
    """The bundled model with its weights, and its config alone, agree.

    But for the router's bias, which checkpoints may store as float32 without saying so.
    """
    real = open_sizes("demo")
    shutil.copy(find_model("demo") / "config.json", tmp_path)
    bare = open_sizes(tmp_path)
    assert real.has_weights and not bare.has_weights
    assert bare.sizes == real.sizes and bare.weights.layout == real.weights.layout
    assert bare.weights.dense_bytes == pytest.approx(real.weights.dense_bytes, rel=1e-3)
    wide = open_sizes(tmp_path, EngineConfig(dtype="float32"))
    assert wide.weights.read_slots == 2 and wide.sizes.dtype == "float32"
    assert wide.weights.dense_bytes > 1.7 * bare.weights.dense_bytes


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_planned(family: str, tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden"
    own = {name: name for name in ("sdar_moe", "rnd1", "diffusion_gemma")}
    own |= {"llada": "llada_moe"}
    source = golden / own[family] if family in own else find_model("demo")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": family}))
    model = open_sizes(tmp_path)
    assert model.family == family and model.sizes.body_bytes > 0


# Packs


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's packs."""
    folder = tmp_path_factory.mktemp("packs")
    for form in ("int4", "int8"):
        pack_checkpoint("demo", folder / form, dtype=form, method="nearest")
    return folder


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_a_pack_is_planned_as_it_was_before_it_was_made(packs: Path, form: str) -> None:
    made, planned = open_sizes(packs / form), open_sizes("demo", form=form)
    assert made.sizes == planned.sizes and made.weights == planned.weights
    assert made.sizes.shape.expert_bytes < open_sizes("demo").sizes.shape.expert_bytes
    assert open_sizes(packs / form, form=form).sizes == made.sizes


def test_every_command_takes_a_pack(run: Run, quick_doctor: None, packs: Path) -> None:
    pack, form = str(packs / "int4"), "experts int4-g64, the rest bfloat16"
    for command in (["plan", pack], ["plan", "demo", "--dtype", "int4"]):
        code, out, _ = run(*command, "--expert-memory", "1MiB", "--json")
        view = strict(out)
        assert code == 0 and view["dtype"] == form and view["fit"]["plan"]["expert_bytes"] == 8192
        assert any("was not measured" in note for note in view["prediction"]["notes"])
    code, out, _ = run("serve", pack, "--dry-run")
    assert code == 0 and form in out
    code, out, _ = run("doctor", pack, "--quick", "--device", "cpu", "--json")
    view = strict(out)
    kinds = {each["dtype"] for each in view["measurements"]["products"]}
    assert code == 0 and {"bfloat16", "int4-g64"} <= kinds
    assert not any("was not measured" in note for note in view["outlook"]["prediction"]["notes"])
    code, out, _ = run("bench", pack, "--quick", "--num-prompts", "1", "--policy", "oled", "--json")
    assert code == 0 and strict(out)


def test_forms_that_no_kernel_reads_or_a_pack_has_not_are_bad_input(run: Run, packs: Path) -> None:
    for model, form, words in (
        ("demo", "int5", "dtype is 'int5'; allowed: bfloat16 or bf16, float16, float32; for expe"),
        ("demo", "nonsense", "float32; for experts int8 or int4, then -row, -g32"),
        (str(packs / "int4"), "int8", "is packed as int4-g64; leave dtype out"),
    ):
        code, out, err = run("plan", model, "--dtype", form)
        assert code == 2 and out == "" and words in err and err.count("\n") == 1


def test_bf16_and_bfloat16_are_one() -> None:
    assert EngineConfig(dtype="bf16") == EngineConfig(dtype="bfloat16")
    assert PlanFlags(dtype="bf16").config().dtype == "bfloat16"


def test_int8_is_said_to_be_rounded_to_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'float32'; allowed: bfloat16 or bf16, int8"):
        pack_checkpoint("demo", tmp_path / "none", dtype="float32")
    source = find_model("demo")
    for form, method, words in (
        ("int8", None, "rounded to the nearest"),
        ("int8", "searched", "rounded to the nearest"),
        ("int4", None, "rounded, scales searched for the least error"),
        ("int4", "nearest", "rounded to the nearest"),
    ):
        job = plan_pack(source, form, wanted_method=method)
        job.close()
        # What the manifest says is the method that was asked for, as before.
        assert job.rounding == words and job.method == (method or "searched")


# Names without files


def test_a_hub_id_that_is_not_here_is_planned_by_its_name(run: Run) -> None:
    code, out, _ = run("plan", "inclusionAI/LLaDA2.0-mini", "--ram", "12GiB", "--json")
    view = strict(out)
    assert code == 0 and not view["has_weights"] and view["path"] is None
    assert "not in the local hub cache: its sizes are taken from its name" in view["notes"][0]
    assert view["notes"][1].startswith("sizes are the published ones of llada2-mini")
    plain = open_sizes("llada2-mini")
    assert open_sizes("inclusionAI/LLaDA2.0-mini").sizes == plain.sizes
    # What is no hub id is a path, whatever it ends with.
    for name in ("./llada2-mini", "/llada2-mini", "a/b/llada2-mini"):
        assert run("plan", name)[0] == 3


def test_a_hub_id_of_unknown_sizes_says_what_to_do(run: Run) -> None:
    code, out, err = run("plan", "org/absent")
    assert code == 3 and out == "" and err.count("\n") == 1
    assert "oled-moe pull org/absent; or plan a directory that holds its config.json alone" in err


@pytest.mark.parametrize(
    "command", [["inspect"], ["generate", "-p", "x"], ["pack", "out"], ["serve"], ["bench"]]
)
def test_names_of_sizes_are_told_from_models(run: Run, command: list[str]) -> None:
    name, *flags = command
    code, out, err = run(name, "RND1-Base-0910", *flags)
    assert code == 3 and out == "" and err.count("\n") == 1
    assert "only its sizes are known: see `oled-moe plan RND1-Base-0910`" in err


# Exit codes


def test_absent_models_are_exit_code_3(run: Run, tmp_path: Path) -> None:
    assert run("plan", str(tmp_path / "absent"))[0] == 3
    assert run("plan", "org/absent")[0] == 3
    assert run("plan", "demo", "--hardware", "no-such-machine")[0] == 3
    with pytest.raises(ModelNotFoundError):
        open_sizes(tmp_path)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gpu-memory", "much"], "gpu-memory"),
        (["--ram", "0"], "ram"),
        (["--device", "abacus"], "device"),
        (["--device", "cpu", "--gpu-memory", "8GiB"], "gpu-memory"),
        (["--experts-per-layer", "1000"], "--experts-per-layer is"),
        (["--experts-per-layer", "4", "--memory", "1GiB"], "--experts-per-layer and --memory are"),
        (["--policy", "psychic"], "unknown policy 'psychic'; known: fiddler"),
        (["--policy", "belady"], "belady"),
        (["--prompt-tokens", "0"], "prompt-tokens"),
        (["--prompt-tokens", "99999"], "prompt-tokens"),
        (["--max-model-len", "99999"], "--max-model-len is 99999"),
        (["--dtype", "int3"], "dtype"),
        (["--hardware", "testbed"], "testbed-a or testbed-b"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_line(run: Run, flags: list[str], named: str) -> None:
    code, out, err = run("plan", "demo", *flags)
    assert code == 2 and out == ""
    assert named in err and err.count("\n") == 1


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": "other"}', '{"a": 1}'])
def test_damaged_configs_are_exit_code_2(run: Run, content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert run("plan", str(tmp_path))[0] == 2
    with pytest.raises(CheckpointError):
        open_sizes(tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        ["--ram", "1GiB"],
        ["--gpu-memory", "1GiB", "--ram", "64GiB"],
        ["--gpu-memory", "2GiB", "--ram", "64GiB"],
        ["--ram", "8GiB", "--experts-per-layer", "200"],
        ["--gpu-memory", "16GiB", "--ram", "64GiB", "--experts-per-layer", "250"],
    ],
)
def test_what_does_not_fit_is_exit_code_4_and_says_what_to_change(
    run: Run, flags: list[str]
) -> None:
    code, out, _ = run("plan", "llada2-mini", *flags, "--json")
    view = strict(out)
    assert code == 4 and view["prediction"] is None and view["cache"] is None
    assert view["fit"]["word"] == "does not fit" and not view["fit"]["is_fitting"]
    assert "raise" in view["fit"]["remedy"] or "lower" in view["fit"]["remedy"]
    code, out, _ = run("plan", "llada2-mini", *flags)
    assert code == 4 and "It does not fit: " in out


def test_advice_works_when_followed(run: Run) -> None:
    flags = ("plan", "llada2-mini", "--gpu-memory", "16GiB", "--ram", "64GiB")
    _, out, _ = run(*flags, "--experts-per-layer", "250", "--json")
    remedy = strict(out)["fit"]["remedy"]
    advised = remedy.split("lower --experts-per-layer to ")[1].split(",")[0]
    assert run(*flags, "--experts-per-layer", advised)[0] == 0


def test_advice_is_a_size_and_a_flag_that_plan_has(run: Run) -> None:
    code, out, _ = run("plan", "demo", "--memory", "60MiB", "--json")
    remedy = strict(out)["fit"]["remedy"]
    assert code == 4
    advised = re.search(r"raise --memory to (\d+MiB) or more", remedy)
    assert advised is not None
    # The process itself may have grown by then.
    assert run("plan", "demo", "--memory", advised[1], "--max-model-len", "64")[0] == 0
    code, out, _ = run("plan", "demo", "--ram", "1MiB", "--json")
    remedy = strict(out)["fit"]["remedy"]
    assert code == 4 and "lower --max-model-len, raise --ram" in remedy
    assert "force" not in remedy and "max-num-seqs" not in remedy


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        (["--ram", "8GiB", "--experts-per-layer", "20"], "--experts-per-layer to"),
        (["--ram", "8GiB", "--expert-memory", "1GiB"], "--expert-memory by"),
        (["--ram", "8GiB", "--memory", "4GiB"], "--memory by"),
        (["--ram", "9GiB"], "--ram by"),
        (["--gpu-memory", "6GiB", "--ram", "64GiB"], "--gpu-memory by"),
        (["--gpu-memory", "16GiB", "--ram", "16GiB"], "--ram by"),
    ],
)
def test_tight_plans_name_the_number_to_change(run: Run, flags: list[str], number: str) -> None:
    code, out, _ = run("plan", "llada2-mini", *flags, "--json")
    fit = strict(out)["fit"]
    assert code == 0 and fit["word"] == "tight" and f"raise {number}" in fit["remedy"]


def test_raising_ram_as_advised_holds_what_a_block_wants(run: Run) -> None:
    first = strict(run("plan", "llada2-mini", "--ram", "9GiB", "--json")[1])
    more = re.search(r"raise --ram by ([0-9.]+) GiB", first["fit"]["remedy"])
    assert more is not None
    advised = f"{9 + float(more[1]) + 0.1:.2f}GiB"
    assert (
        strict(run("plan", "llada2-mini", "--ram", advised, "--json")[1])["fit"]["word"] == "fits"
    )


def test_a_plan_says_what_it_leaves(run: Run) -> None:
    """RAM is the plan, what is left free, and what the system gets."""
    view = strict(run("plan", "llada2-mini", "--ram", "16GiB", "--json")[1])
    total = view["fit"]["plan"]["total_bytes"]
    assert view["machine"]["reserve_bytes"] == 2 * 2**30
    assert total + view["spare_bytes"] + 2 * 2**30 == 16 * 2**30
    out = run("plan", "llada2-mini", "--ram", "16GiB")[1]
    assert "14.0 GiB of RAM for the process, 2.0 GiB left to the system" in out
    assert "left free, unless --memory says otherwise" in out
    # Nothing is left alone by a plan that was told what to take, or has all it wants.
    for flags in (["--ram", "16GiB", "--memory", "8GiB"], ["--ram", "64GiB"]):
        assert strict(run("plan", "llada2-mini", *flags, "--json")[1])["spare_bytes"] is None


# Verdicts and plans


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--ram", "64GiB"], "fits"),
        (["--ram", "20GiB"], "fits"),
        (["--ram", "10GiB"], "tight"),
        (["--gpu-memory", "48GiB", "--ram", "64GiB"], "fits"),
        (["--gpu-memory", "16GiB", "--ram", "64GiB"], "fits"),
        (["--gpu-memory", "16GiB", "--ram", "24GiB"], "tight"),
        (["--gpu-memory", "8GiB", "--ram", "64GiB"], "tight"),
    ],
)
def test_verdicts(run: Run, flags: list[str], word: str) -> None:
    _, out, _ = run("plan", "llada2-mini", *flags, "--json")
    view = strict(out)
    assert view["fit"]["word"] == word
    assert bool(view["fit"]["remedy"]) == (word == "tight")
    for name in ("lines", "ram_lines"):
        lines = [line["bytes"] for line in view["fit"]["plan"].get(name, [])]
        assert not lines or sum(lines[:-1]) == lines[-1]
    machine, plan = view["machine"], view["fit"]["plan"]
    assert plan["total_bytes"] <= (machine["gpu_bytes"] or machine["ram_bytes"])
    if machine["gpu_bytes"]:
        assert plan["ram_bytes"] <= machine["ram_bytes"]
        assert plan["num_pinned"] + plan["num_on_disk"] == plan["num_experts"]


def slots_of(name: str, size: int, fixed: dict[str, int]) -> tuple[int, int]:
    model = open_sizes("llada2-mini")
    device = "cuda" if name == "gpu_bytes" or "gpu_bytes" in fixed else "cpu"
    machine = imagine(device, DEFAULT_PROFILE, **{**fixed, name: size})
    plan = plan_for(model, EngineConfig(), machine, DEFAULT_PROFILE)
    if isinstance(plan, outlook.GpuMemoryPlan):
        return plan.gpu.num_slots + plan.gpu.num_staging, plan.num_pinned
    return plan.num_slots + plan.num_staging, 0


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("ram_bytes", {}),
        ("gpu_bytes", {"ram_bytes": 32 * GIB}),
        ("ram_bytes", {"gpu_bytes": 16 * GIB}),
    ],
)
def test_more_memory_is_never_fewer_slots(name: str, fixed: dict[str, int]) -> None:
    found = [slots_of(name, size * GIB // 4, fixed) for size in range(20, 200, 7)]
    for few, many in zip(found, found[1:], strict=False):
        assert many[0] >= few[0] and many[1] >= few[1]
    assert found[0] != found[-1]


def test_what_a_machine_lacks_comes_from_the_profile_or_this_one() -> None:
    machine = imagine("cuda", outlook.load_hardware("testbed-a"))
    assert machine.gpu_bytes == 32 * GIB
    assert machine.ram_bytes == 90 * 10**9 - 2 * GIB
    with pytest.raises(ConfigError, match="--gpu-memory SIZE"):
        imagine("cuda", DEFAULT_PROFILE)
    here = imagine("cpu", DEFAULT_PROFILE)
    assert not here.is_imagined and isinstance(here, Machine)
    assert imagine("cpu", DEFAULT_PROFILE, ram_bytes=4 * GIB).ram_bytes == 3 * GIB


def test_a_short_hardware_name_and_the_cuda_plan_of_the_issue(run: Run) -> None:
    code, out, _ = run(
        "plan", "llada2-mini", "--gpu-memory", "16GiB", "--ram", "64GiB", "--hardware", "rtx4090"
    )
    assert code == 0
    for words in ("It fits", "rtx4090-ddr5", "per token", "first token", "experts in pinned RAM"):
        assert words in out
    assert "Time per token is forward time" in out.replace("\n", " ")


@pytest.mark.parametrize("columns", [40, 60, 80, 140])
def test_text_takes_the_width_of_the_terminal(
    run: Run, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oled_moe.cli_shared.line_width", lambda *_: columns)
    _, out, _ = run("plan", "llada2-flash", "--gpu-memory", "24GiB", "--ram", "64GiB")
    longest = max(map(len, out.splitlines()))
    assert 0.8 * columns < longest <= columns and "\x1b" not in out
    # Parts of one table are told apart by an empty line, and each says what is in its rows.
    assert out.count("GPU: active") == (2 if columns == 40 else 1)


def test_what_is_no_terminal_gets_a_line_for_each_fact(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in REAL_LENGTHS.items():
        monkeypatch.setattr(prediction, name, value)
    _, out, _ = run("plan", "rnd1", "--gpu-memory", "16GiB", "--ram", "64GiB")
    (first,) = [line for line in out.splitlines() if line.startswith("first token")]
    assert first.endswith("whose masks want fewer different experts than tokens do later")


def test_numbers_come_from_stored_measurements(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "home" / ".cache" / "oled-moe" / "hardware-cpu.json"
    profiler.save_profile(DEFAULT_PROFILE, path)
    assert strict(run("plan", "demo", "--json")[1])["hardware_source"] == str(path)


# doctor MODEL


def test_software_is_measured_on_the_bundled_model() -> None:
    found = measure_software("cpu")
    assert 0 < found.layer_s < 10 and 0 <= found.load_s < 10


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    small = measuring.Effort(2**21, 64, 2**20, 1, 2, 0.01, 0.2)
    measure = profiler.measure_hardware
    monkeypatch.setattr(profiler, "_MIN_WORKING_SET_BYTES", 2**21)
    monkeypatch.setattr(
        "oled_moe.inspection.measure_hardware", lambda **given: measure(**given, effort=small)
    )


def test_doctor_predicts_what_it_measured(run: Run, quick_doctor: None, tmp_path: Path) -> None:
    code, out, _ = run(
        "doctor", "demo", "--quick", "--device", "cpu", "--directory", str(tmp_path),
        "--expert-memory", "25%", "--prompt-tokens", "40", "--policy", "oled+", "--json",
    )  # fmt: skip
    report = strict(out)
    assert code == 0
    view, profile = report["outlook"], report["profile"]
    assert report["fit"] == view["fit"]
    assert view["hardware_source"] == "measured now" and view["hardware"] == profile["name"]
    assert view["prediction"]["prompt_tokens"] == 40 and view["prediction"]["policy"] == "oled+"
    assert view["cache"]["experts_per_layer"] == pytest.approx(24, abs=1.5)
    for name in ("memory_read_bytes_per_s", "matrix_flops_per_s", "layer_overhead_s"):
        assert profile[name] > 0
    dtypes = {(rate["operation"], rate["dtype"]) for rate in profile["weight_rates"]}
    assert dtypes == {
        (operation, dtype) for operation in ("expert", "dense") for dtype in ("bfloat16", "float32")
    }
    # plan says the same from what was stored.
    flags = ("--expert-memory", "25%", "--policy", "oled+", "--prompt-tokens", "40", "--json")
    stored = strict(run("plan", "demo", *flags)[1])
    assert stored["hardware"] == profile["name"]
    assert stored["cache"] == view["cache"]


def test_doctor_text(run: Run, quick_doctor: None, tmp_path: Path) -> None:
    code, out, _ = run(
        "doctor", "demo", "--quick", "--no-save", "--device", "cpu", "--directory", str(tmp_path)
    )
    assert code == 0
    for words in ("memory reads", "cpu expert bf16", "It fits", "per token", "One forward"):
        assert words in out


def test_what_measuring_takes_is_not_held_against_the_model(
    run: Run, quick_doctor: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = iter([200 * 2**20])
    # Measuring makes the process larger: by far more than the budget, here.
    monkeypatch.setattr("oled_moe.engine.process_memory_bytes", lambda: next(sizes, 2 * GIB))
    code, out, _ = run(
        "doctor", "demo", "--quick", "--no-save", "--device", "cpu", "--memory", "300MiB",
        "--hardware", "testbed-a", "--dtype", "int4", "--directory", str(tmp_path), "--json",
    )  # fmt: skip
    report = strict(out)
    assert code == 0 and report["fit"]["is_fitting"]
    assert report["fit"]["plan"]["lines"][0]["bytes"] == 200 * 2**20
    # What is noted about the model is no warning besides.
    notes = report["outlook"]["notes"]
    assert notes and not set(notes) & set(report["warnings"])


def test_doctor_takes_a_model_without_weights(
    run: Run, quick_doctor: None, index_only: Path, tmp_path: Path
) -> None:
    code, out, _ = run(
        "doctor", str(index_only), "--quick", "--no-save", "--device", "cpu", "--memory", "8GiB",
        "--hardware", "testbed-a", "--directory", str(tmp_path), "--json",
    )  # fmt: skip
    report = strict(out)
    assert code in (0, 4) and any("are missing" in note for note in report["outlook"]["notes"])
    assert report["outlook"]["hardware"] == "testbed-a"
    assert report["measurements"]["hidden_size"] == 2048


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("model", [[], ["demo"]])
def test_doctor_says_that_cuda_cannot_run_here(run: Run, model: list[str]) -> None:
    code, out, err = run("doctor", *model, "--device", "cuda", "--quick")
    assert code in (2, 5) and out == "" and "cuda" in err and err.count("\n") == 1
    assert run("plan", "demo", "--device", "cuda", "--gpu-memory", "4GiB")[0] == 0


def test_help_imports_nothing_heavy_and_lists_the_flags() -> None:
    program = (
        "import sys; from oled_moe.cli import main\n"
        "codes = [main([a, '--help']) for a in ('plan', 'doctor')]\n"
        "print(codes, [m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("[0, 0] []\n") and done.stderr == ""
    for flag in ("--gpu-memory", "--ram", "--hardware", "--prompt-tokens", "--experts-per-layer"):
        assert flag in done.stdout
