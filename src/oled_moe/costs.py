"""Measured numbers of a machine, and the times that decisions are made by.

A HardwareProfile is what `oled-moe doctor` measures and stores as JSON; a CostModel applies it to
the experts of one model. Sizes scale: times are kept per byte of expert weights, so that one
profile serves models with other expert shapes.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oled_moe.config import DEVICES, DTYPES, check_choice, check_flag, check_int
from oled_moe.errors import ConfigError, ModelNotFoundError

PROFILE_VERSION = 1
# Devices that have a profile of their own.
PROFILE_DEVICES = DEVICES
PLACES = ("cpu", "cuda")
OPERATIONS = ("expert", "dense")
# As quantization.py writes its forms.
_QUANTISED = re.compile(r"int[48]-(row|g\d+)(-asym)?")


@dataclass(frozen=True, slots=True)
class WeightRate:
    """How fast weights are worked through where each meets `num_rows` rows.

    `place`: cpu or cuda. `operation`: expert (one of many in a call), or dense (one large matrix).
    `dtype`: of experts also a quantised form, as int4-g64.
    Units: bytes_per_s is weight bytes over the time of the whole product.
    """

    place: str
    operation: str
    dtype: str
    num_rows: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_choice("hardware profile: weight_rates: place", self.place, PLACES)
        check_choice("hardware profile: weight_rates: operation", self.operation, OPERATIONS)
        if self.operation != "expert" or not _QUANTISED.fullmatch(self.dtype):
            check_choice("hardware profile: weight_rates: dtype", self.dtype, DTYPES)
        check_int("hardware profile: weight_rates: num_rows", self.num_rows, minimum=1)
        _check_number("weight_rates: bytes_per_s", self.bytes_per_s, is_positive=True)


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """What one machine was measured to do.

    `copy_*`: slow tier to a slot, on the device the profile is for (`cpu`: disk to RAM;
    `emulated`: RAM to RAM, at this set rate; `cuda`: pinned RAM to GPU). `cpu_*`: one expert
    computed where it lies: reading its weights once, and each token on top of that.
    `mean_tokens_per_miss` is n̄ of policies.md 2.1; dispatch refreshes it online.
    `emulated_jitter_s`: upper end of the seeded random delay of each emulated operation.
    `disk_method` is the faster way of cold reads found by doctor: direct or buffered.
    The rest is for simulation. `device_*`: weights computed from a slot, read once and each token
    on top; None where the device is this CPU and takes what `cpu_*` say. `layer_overhead_s` and
    `forward_overhead_s`: software around one MoE layer, and around one forward; `load_overhead_s`:
    around one copy on demand.
    `activation_round_trip_s`: activations to the CPU and results back, once for each layer that
    computes there. `has_cpu_experts`: whether there is a second place to compute.
    For predictions, None or empty where unknown: `memory_read_bytes_per_s`, the best streaming read
    of RAM; `matrix_flops_per_s`, the best large product on the CPU; `weight_rates`, times by rows
    and dtype; `gpu_memory_bytes`, `ram_bytes`, what the machine has; `is_disturbed`, whether other
    processes were busy while it was measured.

    Units: seconds, bytes, bytes per second. Raises: ConfigError for a value out of range.
    """

    name: str
    copy_bytes_per_s: float
    copy_latency_s: float
    cpu_weight_bytes_per_s: float
    cpu_token_weight_bytes_per_s: float
    mean_tokens_per_miss: float
    disk_method: str
    disk_direct_bytes_per_s: float
    disk_buffered_bytes_per_s: float
    disk_queue_depth: int
    emulated_jitter_s: float = 0.0
    is_measured: bool = False
    note: str = ""
    device_weight_bytes_per_s: float | None = None
    device_token_weight_bytes_per_s: float | None = None
    layer_overhead_s: float = 0.0
    forward_overhead_s: float = 0.0
    activation_round_trip_s: float = 0.0
    has_cpu_experts: bool = False
    memory_read_bytes_per_s: float | None = None
    matrix_flops_per_s: float | None = None
    weight_rates: tuple[WeightRate, ...] = ()
    gpu_memory_bytes: int | None = None
    ram_bytes: int | None = None
    load_overhead_s: float = 0.0
    is_disturbed: bool = False

    def __post_init__(self) -> None:
        positive: tuple[str, ...] = (
            "copy_bytes_per_s",
            "cpu_weight_bytes_per_s",
            "cpu_token_weight_bytes_per_s",
            "mean_tokens_per_miss",
            "disk_direct_bytes_per_s",
            "disk_buffered_bytes_per_s",
        )
        not_negative = (
            "copy_latency_s",
            "emulated_jitter_s",
            "layer_overhead_s",
            "forward_overhead_s",
            "activation_round_trip_s",
            "load_overhead_s",
        )
        optional = (
            "device_weight_bytes_per_s",
            "device_token_weight_bytes_per_s",
            "memory_read_bytes_per_s",
            "matrix_flops_per_s",
        )
        positive += tuple(name for name in optional if getattr(self, name) is not None)
        for name in (*positive, *not_negative):
            _check_number(name, getattr(self, name), is_positive=name in positive)
        for name in ("gpu_memory_bytes", "ram_bytes"):
            if getattr(self, name) is not None:
                check_int(f"hardware profile: {name}", getattr(self, name), minimum=1)
        if self.disk_method not in ("direct", "buffered"):
            raise ConfigError(
                f"hardware profile: disk_method is {self.disk_method!r}; allowed: direct, buffered"
            )
        depth = self.disk_queue_depth
        if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= 64:
            raise ConfigError(f"hardware profile: disk_queue_depth is {depth!r}; allowed: 1 to 64")
        check_flag("hardware profile: has_cpu_experts", self.has_cpu_experts)
        check_flag("hardware profile: is_disturbed", self.is_disturbed)

    def to_json(self) -> str:
        """The profile as JSON text, with its format version."""
        return json.dumps({"version": PROFILE_VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Any) -> "HardwareProfile":
        """Build from parsed JSON. Raises: ConfigError naming the missing or unknown field."""
        if not isinstance(values, dict) or values.get("version") != PROFILE_VERSION:
            raise ConfigError(f"hardware profile: not a version {PROFILE_VERSION} profile")
        known = {field.name for field in fields(cls)}
        given = {key: value for key, value in values.items() if key != "version"}
        if unknown := sorted(set(given) - known):
            raise ConfigError(f"hardware profile: unknown field {unknown[0]!r}")
        required = [field.name for field in fields(cls) if field.default is MISSING]
        if missing := [name for name in required if name not in given]:
            raise ConfigError(f"hardware profile: {missing[0]!r} is missing")
        if "weight_rates" in given:
            given["weight_rates"] = _parse_rates(given["weight_rates"])
        return cls(**given)


def _check_number(name: str, value: object, *, is_positive: bool) -> None:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    is_bad = not is_real or math.isnan(value)  # type: ignore[arg-type]  # is_real narrows
    if is_bad or value < 0 or (is_positive and value == 0):  # type: ignore[operator]  # as above
        limit = "above 0" if is_positive else "0 or more"
        raise ConfigError(f"hardware profile: {name} is {value!r}; allowed: {limit}")


def _parse_rates(values: Any) -> tuple[WeightRate, ...]:
    names = {field.name for field in fields(WeightRate)}
    if not isinstance(values, list | tuple):
        raise ConfigError("hardware profile: weight_rates is not a list")
    for value in values:
        if not isinstance(value, dict) or set(value) != names:
            raise ConfigError(
                f"hardware profile: an entry of weight_rates is {str(value)[:80]}; allowed: "
                f"objects with {', '.join(sorted(names))}"
            )
    return tuple(WeightRate(**value) for value in values)


# A guess for a desktop with a SATA-class SSD and two memory channels, used until doctor has run.
DEFAULT_PROFILE = HardwareProfile(
    name="built-in guess",
    copy_bytes_per_s=1.0e9,
    copy_latency_s=1.0e-4,
    cpu_weight_bytes_per_s=1.5e10,
    cpu_token_weight_bytes_per_s=2.0e11,
    mean_tokens_per_miss=2.0,
    disk_method="buffered",
    disk_direct_bytes_per_s=1.0e9,
    disk_buffered_bytes_per_s=1.0e9,
    disk_queue_depth=4,
)

# What `emulated` plays until a profile says otherwise: a PCIe 4.0 x16 card.
DEFAULT_EMULATED_PROFILE = replace(
    DEFAULT_PROFILE,
    name="emulated PCIe 4.0 x16",
    copy_bytes_per_s=2.5e10,
    copy_latency_s=1.0e-5,
    has_cpu_experts=True,
)

# What the link of a GPU is taken to be until doctor has run.
DEFAULT_CUDA_PROFILE = replace(DEFAULT_EMULATED_PROFILE, name="built-in guess, PCIe 4.0 x16")

# By device.
DEFAULT_PROFILES: Mapping[str, HardwareProfile] = MappingProxyType(
    {
        "cpu": DEFAULT_PROFILE,
        "cuda": DEFAULT_CUDA_PROFILE,
        "emulated": DEFAULT_EMULATED_PROFILE,
    }
)


def default_profile_path(device: str, *, cache_directory: Path | None = None) -> Path:
    """Where doctor stores the profile of `device`; `cache_directory` None is ~/.cache/oled-moe.

    Raises: ConfigError for an unknown device.
    """
    check_choice("device", device, PROFILE_DEVICES)
    folder = Path.home() / ".cache" / "oled-moe" if cache_directory is None else cache_directory
    return folder / f"hardware-{device}.json"


def load_profile(path: Path) -> HardwareProfile:
    """Read a profile that doctor wrote.

    Raises: ModelNotFoundError where there is no such file, ConfigError where it is not a profile.
    """
    remedy = "run `oled-moe doctor` to measure this machine again"
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file; {remedy}")
        return HardwareProfile.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ModelNotFoundError(f"no hardware profile at {path}; run `oled-moe doctor`") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read as a hardware profile ({error}); {remedy}"
        ) from None


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times for the experts of one model on one machine. Units: seconds, bytes."""

    transfer_s: float
    cpu_base_s: float
    cpu_token_s: float
    mean_tokens_per_miss: float
    # Of a layer besides its routed experts, when the copy lane has nothing urgent.
    layer_overhead_s: float = 0.0

    @classmethod
    def from_profile(cls, profile: HardwareProfile, expert_bytes: int) -> "CostModel":
        """Scale a profile to experts of `expert_bytes`."""
        return cls(
            transfer_s=profile.copy_latency_s + expert_bytes / profile.copy_bytes_per_s,
            cpu_base_s=expert_bytes / profile.cpu_weight_bytes_per_s,
            cpu_token_s=expert_bytes / profile.cpu_token_weight_bytes_per_s,
            mean_tokens_per_miss=profile.mean_tokens_per_miss,
            layer_overhead_s=profile.layer_overhead_s,
        )

    @property
    def num_idle_copies(self) -> int:
        """Experts that can be copied while a layer does other things than wait for experts."""
        return int(self.layer_overhead_s / self.transfer_s)

    def cpu_s(self, num_tokens: float) -> float:
        """Time of one expert on the CPU for `num_tokens` of at least one token.

        Affine rather than the paper's τ·n: with about two tokens an expert, reading its weights
        costs most (policies.md 1.3).
        """
        return self.cpu_base_s + self.cpu_token_s * num_tokens
