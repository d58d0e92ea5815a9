"""Every golden case again, from packs: the same tokens in as many forwards as the reference."""

from collections.abc import Callable
from pathlib import Path

import pytest
import test_diffusion_gemma
import test_family_decoding
import test_golden
from test_golden import GOLDEN

from oled_moe.config import EngineConfig
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.engine import Engine
from oled_moe.packing import pack_checkpoint

MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
# On which device, and how many of an expert layer's 16 are in memory.
FEW = [("cpu", 3)]
MORE = [("cpu", 16), ("cpu", 1.6), ("emulated", 8), ("emulated", 1.6)]


def check_llada2(engine: Engine, model: str) -> int:
    versions = [path.stem.split("_")[1] for path in (GOLDEN / model).glob("generate_*.json")]
    for version in versions:
        test_golden.check_runs(engine, model, version)
    return sum(len(test_golden.golden_runs(model, version)) for version in versions)


def check_family(engine: Engine, model: str) -> int:
    runs = test_family_decoding.runs_of(model)
    for run in runs:
        test_family_decoding.check(engine, model, run)
    return len(runs)


def check_diffusion_gemma(engine: Engine, model: str) -> int:
    for run in test_diffusion_gemma.GOLDEN_RUNS:
        test_diffusion_gemma.check_run(engine, run)
    return len(test_diffusion_gemma.GOLDEN_RUNS)


CHECKS: dict[str, Callable[[Engine, str], int]] = {
    "llada2_a": check_llada2,
    "llada2_b": check_llada2,
    **dict.fromkeys(test_family_decoding.MODELS, check_family),
    "diffusion_gemma": check_diffusion_gemma,
}


@pytest.mark.parametrize("model", MODELS)
def test_golden_cases_of_a_pack(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With `--full` at other capacities and on the other device too."""
    pack_checkpoint(GOLDEN / model, tmp_path / "pack")
    is_full = request.config.getoption("--full", default=False)
    for device, capacity in FEW + MORE * is_full:
        profile = DEFAULT_PROFILE if device == "cpu" else DEFAULT_EMULATED_PROFILE
        config = EngineConfig(
            device=device, experts_per_layer=capacity, hardware=profile, cpu_experts=False
        )
        with Engine(tmp_path / "pack", config) as engine:
            assert CHECKS[model](engine, model) >= 4
