"""Who may import whom (style.md 2), read from the source of every module."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import oled_moe

PACKAGE = "oled_moe"
ROOT = Path(oled_moe.__file__).parent

LAYERS: dict[str, tuple[str, ...]] = {
    # `demo` is a folder of data with a docstring.
    "0": ("types", "errors", "registry", "config", "reference_arguments", "shapes", "demo"),
    "1": ("policies", "cache", "costs", "hardware", "sizing", "counters", "sharing", "lossy"),
    "2a": ("traces", "trace_stats", "synthesis", "simulator", "virtual_clock", "prediction"),
    "2b": (
        *("lanes", "quantization", "codes", "store", "slots", "kernels"),
        *("cuda", "cuda_graphs", "cuda_memory"),
    ),
    "3": (
        *("layers", "kv_cache", "experts", "models"),
        *("tensor_files", "encodings", "packs", "checkpoint"),
        *("gguf_types", "gguf_files", "gguf_models"),
    ),
    "4": (
        *("edits", "sampling", "unmasking", "closing", "constrained", "decoding"),
        *("random_canvas", "canvas"),
    ),
    "5": (
        "tokenization",
        "chat_template",
        "grammar",
        "tool_calls",
        "memory",
        "low_precision",
        "model_paths",
        "metrics",
        "machine",
        "measuring",
        "disk_speed",
        "profiler",
        "devices",
        "engine",
        "scheduler",
        "monitor",
        "recording",
        "inspection",
        "outlook",
        "bench",
        "bench_serve",
        "bench_serve_figures",
        "environment",
        "hub",
        "hub_cache",
        "hub_client",
        "hub_packing",
        "report",
        "pack_places",
        "pack_writer",
        "packing",
        "random_checkpoint",
        "stand_ins",
        "roofline",
        "replay",
        "replay_bench",
        "integrations",
    ),
    "6": (
        "__main__",
        "block_screen",
        "chat_screen",
        "cli",
        "cli_bench",
        "cli_bench_serve",
        "cli_bench_shape",
        "cli_chat",
        "cli_config",
        "cli_flags",
        "cli_pack",
        "cli_plan",
        "cli_pull",
        "cli_reproduce",
        "cli_serve",
        "cli_settings",
        "cli_shared",
        "cli_simulate",
        "cli_text",
        "cli_trace",
        "chat",
        "demo_screen",
        "gantt",
        "ray_serve",
        "server",
        "server_answers",
        "server_backend",
        "server_errors",
        "server_host",
        "server_metrics",
        "server_middleware",
        "server_openapi",
        "server_prompts",
        "server_replies",
        "server_schema",
        "server_streams",
    ),
}
# A layer may import its own modules too, as long as no cycle comes of it.
MAY_IMPORT: dict[str, set[str]] = {
    "0": set(),
    "1": {"0"},
    "2a": {"0", "1"},
    "2b": {"0"},
    "3": {"0", "1", "2a", "2b"},
    "4": {"0", "3"},
    "5": {"0", "1", "2a", "2b", "3", "4"},
    "6": {"0", "5"},
}
# What faces may use besides; "" is the package itself, as its users know it.
BELOW_FACES = {
    "",
    "hardware",
    "policies",
    "simulator",
    "sizing",
    "synthesis",
    "trace_stats",
    "traces",
    "virtual_clock",
}
WITHOUT_TORCH = ("0", "1", "2a")
# Decisions are the same on every run: they look neither at clocks nor at luck.
NEVER_IN_DECISIONS = {"time", "datetime", "random", "secrets"}

LAYER_OF = {module: layer for layer, modules in LAYERS.items() for module in modules}


def module_names() -> list[str]:
    """Every module of the package by its dotted name below it, packages by their own."""
    names = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        names.append(".".join(parts))
    return names


# The package itself is exempt: it imports lazily, on behalf of users.
MODULES = [name for name in module_names() if name]


def source_of(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_names(module: str) -> Iterator[str]:
    """Full dotted names of all that a module imports, wherever in it the import stands."""
    is_package = (ROOT / Path(*module.split("."))).is_dir()
    package = [PACKAGE, *module.split(".")]
    if not is_package:
        package.pop()
    for node in ast.walk(source_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], base]).rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(module: str) -> set[str]:
    """The package's modules that a module imports, by their names below the package."""
    found = set()
    for name in imported_names(module):
        top, _, rest = name.partition(".")
        if top != PACKAGE:
            continue
        parts = rest.split(".")
        while parts and ".".join(parts) not in MODULES:
            parts.pop()
        # The package itself, "", has nothing for its modules but the version.
        if parts or rest != "__version__":
            found.add(".".join(parts))
    return found - {module}


def is_allowed(module: str, imported: str) -> bool:
    home, target = module.split(".")[0], imported.split(".")[0]
    layer, below = LAYER_OF[home], LAYER_OF.get(target)
    if below == layer or below in MAY_IMPORT[layer]:
        return True
    return layer == "6" and target in BELOW_FACES


def test_the_package_is_found() -> None:
    assert {"types", "cache", "experts", "engine", "policies.dispatch"} <= set(MODULES)
    assert "cache" in own_imports("experts") and "kernels.cpu" in own_imports("kernels")


@pytest.mark.parametrize("module", MODULES)
def test_module_has_a_layer(module: str) -> None:
    assert module.split(".")[0] in LAYER_OF, (
        f"{module} has no layer: give it one in style.md 2 and in LAYERS"
    )


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] in LAYER_OF])
def test_arrows_point_down(module: str) -> None:
    wrong = sorted(name for name in own_imports(module) if not is_allowed(module, name))
    assert not wrong, f"{module} (layer {LAYER_OF[module.split('.')[0]]}) may not import {wrong}"


def test_no_cycles() -> None:
    imports = {module: own_imports(module) & set(MODULES) for module in MODULES}
    left = set(MODULES)
    while done := {module for module in left if not imports[module] & left}:
        left -= done
    assert not left, f"these import one another in a circle, or who does: {sorted(left)}"


@pytest.mark.parametrize(
    "module", [name for name in MODULES if LAYER_OF.get(name.split(".")[0]) in WITHOUT_TORCH]
)
def test_decisions_need_only_numpy(module: str) -> None:
    foreign = {name.split(".")[0] for name in imported_names(module)} - {PACKAGE}
    allowed = set(sys.stdlib_module_names) | {"numpy"}
    # The simulator's traces are safetensors files; safetensors itself works without torch.
    if module == "traces":
        allowed |= {"safetensors"}
    assert foreign <= allowed - NEVER_IN_DECISIONS


def test_relative_imports_do_not_leave_a_package() -> None:
    climbing = [
        module
        for module in MODULES
        for node in ast.walk(source_of(module))
        if isinstance(node, ast.ImportFrom) and node.level > 1
    ]
    assert not climbing


def test_decisions_run_where_torch_is_missing() -> None:
    modules = [
        f"{PACKAGE}.{name}" for name in MODULES if LAYER_OF.get(name.split(".")[0]) in WITHOUT_TORCH
    ]
    program = f"import sys; sys.modules['torch'] = None\nimport {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
