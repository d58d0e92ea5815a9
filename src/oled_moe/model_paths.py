"""Where a model is: the bundled one, a directory, or the local hub cache. Nothing is downloaded.

Imports no torch, so that a command can say at once that a model is not there.
"""

from pathlib import Path

from oled_moe.errors import ConfigError, ModelNotFoundError
from oled_moe.hub_cache import CachedModel, default_hub_cache
from oled_moe.shapes import SHAPES, shape_name

DEMO_MODEL = "demo"


def find_model(model: str | Path, *, hub_cache: Path | None = None) -> Path:
    """The directory of `demo`, a local path, or a hub id that is already in the local cache.

    A path may be that of a GGUF file.

    Raises: ModelNotFoundError with the command that downloads the model.
    """
    if not isinstance(model, str | Path):
        raise ConfigError(f"model is {model!r}; allowed: `demo`, a directory, a hub id ORG/NAME")
    if str(model) == DEMO_MODEL:
        return Path(__file__).parent / "demo"
    path, name = Path(model), str(model)
    try:
        if name and path.exists():
            return path
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{name[:200]!r} cannot be a path: {error}") from None
    if is_hub_id(name):
        hub_cache = hub_cache or default_hub_cache()
        snapshot = CachedModel(hub_cache, name).find_snapshot()
        if snapshot is not None:
            return snapshot
        raise ModelNotFoundError(
            f"{name} is neither a directory nor in the local hub cache {hub_cache}; "
            f"download it with: oled-moe pull {name}"
        )
    if shape_name(name) in SHAPES:
        raise ModelNotFoundError(
            f"{name} is no model here, only its sizes are known: see `oled-moe plan {name}` or "
            f"`oled-moe bench --shape {name}`; to run it, give a directory with config.json, a "
            ".gguf file, or a hub id ORG/NAME"
        )
    raise ModelNotFoundError(
        f"no model at {name}; give `demo`, a directory with config.json, a .gguf file, or a hub id "
        "ORG/NAME"
    )


def find_sizes(model: str | Path, *, hub_cache: Path | None = None) -> Path | None:
    """Where the sizes of a model are: as `find_model`, or None where its name says them.

    Raises: ModelNotFoundError.
    """
    name = str(model)
    if shape_name(name) in SHAPES and not Path(name).exists():
        return None
    try:
        return find_model(model, hub_cache=hub_cache)
    except ModelNotFoundError as error:
        if is_hub_id(name) and shape_name(name.rpartition("/")[2]) in SHAPES:
            return None
        raise ModelNotFoundError(
            f"{error}; or plan a directory that holds its config.json alone, or sizes by name: "
            f"{', '.join(SHAPES)}"
        ) from None


def is_hub_id(name: str) -> bool:
    """Whether what somebody typed reads as ORG/NAME."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))
