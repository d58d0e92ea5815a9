"""Built-in hardware profiles, one JSON file each, and how a name becomes a profile.

None of them was measured here: each `note` says where every number comes from. A file more in this
folder is a profile more.
"""

from dataclasses import replace
from pathlib import Path

from oled_moe.costs import PROFILE_DEVICES, HardwareProfile, default_profile_path, load_profile
from oled_moe.errors import ConfigError, ModelNotFoundError

# What `oled-moe doctor` stored; `this-machine:emulated` is its profile for that device.
THIS_MACHINE = "this-machine"
_FOLDER = Path(__file__).parent


def hardware_names() -> tuple[str, ...]:
    """The names of built-in profiles."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_hardware(
    name_or_path: str | Path, *, cache_directory: Path | None = None
) -> HardwareProfile:
    """The profile of that name, the stored one of this machine, or the one in a file.

    A beginning that only one name has will do: `rtx4090`. `this-machine` is what doctor stored for
    device `cpu`, where misses are read from disk;
    `this-machine:emulated` for that device, with CPU experts.
    Raises: ModelNotFoundError where nothing is there, listing the known names; ConfigError where
    the file is no profile.
    """
    name = str(name_or_path)
    if name.partition(":")[0] == THIS_MACHINE:
        return _load_stored(name, cache_directory)
    if name in hardware_names():
        return load_profile(_FOLDER / f"{name}.json")
    path = Path(name_or_path)
    if path.exists():
        return load_profile(path)
    begun = [known for known in hardware_names() if name and known.startswith(name)]
    if len(begun) == 1:
        return load_profile(_FOLDER / f"{begun[0]}.json")
    if begun:
        raise ConfigError(f"hardware {name!r} may be {' or '.join(begun)}; write the whole name")
    known = ", ".join([*hardware_names(), THIS_MACHINE])
    raise ModelNotFoundError(
        f"no hardware profile {name!r}: neither a file nor a known name; known: {known}, "
        "the last as `oled-moe doctor` measured it"
    )


def _load_stored(name: str, cache_directory: Path | None) -> HardwareProfile:
    device = name.partition(":")[2] or "cpu"
    if device not in PROFILE_DEVICES:
        known = ", ".join(f"{THIS_MACHINE}:{each}" for each in PROFILE_DEVICES)
        raise ConfigError(f"hardware {name!r} is not known; allowed: {THIS_MACHINE}, {known}")
    path = default_profile_path(device, cache_directory=cache_directory)
    if not path.is_file():
        raise ModelNotFoundError(
            f"this machine has not been measured for device {device}: there is no {path}; run "
            f"`oled-moe doctor --device {device}` first"
        )
    # Profiles of version 1 that doctor stored before this field was there do not say so.
    return replace(load_profile(path), has_cpu_experts=device != "cpu")
