"""HardwareProfile as a file, and the times a CostModel makes of it."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_moe.costs import (
    DEFAULT_EMULATED_PROFILE,
    DEFAULT_PROFILE,
    PROFILE_VERSION,
    CostModel,
    HardwareProfile,
    WeightRate,
    load_profile,
)
from oled_moe.errors import ConfigError, ModelNotFoundError

POSITIVE = (
    "copy_bytes_per_s",
    "cpu_weight_bytes_per_s",
    "cpu_token_weight_bytes_per_s",
    "mean_tokens_per_miss",
    "disk_direct_bytes_per_s",
    "disk_buffered_bytes_per_s",
)
NOT_NEGATIVE = ("copy_latency_s", "emulated_jitter_s", "load_overhead_s")
# Of earlier versions nothing is known of these.
LATER = (
    "memory_read_bytes_per_s",
    "matrix_flops_per_s",
    "weight_rates",
    "gpu_memory_bytes",
    "ram_bytes",
    "load_overhead_s",
    "is_disturbed",
)


def changed(**changes: Any) -> HardwareProfile:
    return replace(DEFAULT_PROFILE, **changes)


positive = st.floats(min_value=1e-9, max_value=1e15)
rates = st.builds(
    WeightRate,
    place=st.sampled_from(("cpu", "cuda")),
    operation=st.sampled_from(("expert", "dense")),
    dtype=st.sampled_from(("bfloat16", "float32")),
    num_rows=st.integers(1, 64),
    bytes_per_s=positive,
)


@st.composite
def profiles(draw: st.DrawFn) -> HardwareProfile:
    return HardwareProfile(
        name=draw(st.text()),
        **{name: draw(positive) for name in (*POSITIVE, *NOT_NEGATIVE)},
        disk_method=draw(st.sampled_from(("direct", "buffered"))),
        disk_queue_depth=draw(st.integers(1, 64)),
        is_measured=draw(st.booleans()),
        note=draw(st.text()),
        memory_read_bytes_per_s=draw(st.none() | positive),
        matrix_flops_per_s=draw(st.none() | positive),
        weight_rates=tuple(draw(st.lists(rates, max_size=3))),
        gpu_memory_bytes=draw(st.none() | st.integers(1, 2**40)),
        ram_bytes=draw(st.none() | st.integers(1, 2**40)),
        is_disturbed=draw(st.booleans()),
    )


@given(profiles())
def test_json_round_trip(profile: HardwareProfile) -> None:
    assert HardwareProfile.from_dict(json.loads(profile.to_json())) == profile


@pytest.mark.parametrize("profile", [DEFAULT_PROFILE, DEFAULT_EMULATED_PROFILE])
def test_file_round_trip(profile: HardwareProfile, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    assert load_profile(path) == profile


def test_defaults_do_not_claim_to_be_measured() -> None:
    assert not DEFAULT_PROFILE.is_measured and not DEFAULT_EMULATED_PROFILE.is_measured


@pytest.mark.parametrize("name", (*POSITIVE, *NOT_NEGATIVE))
@pytest.mark.parametrize("value", [-1.0, math.nan, True, None, "1e9", [1.0]])
def test_bad_number_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        changed(**{name: value})


@pytest.mark.parametrize("name", POSITIVE)
def test_zero_rate_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*above 0"):
        changed(**{name: 0})


@pytest.mark.parametrize("name", NOT_NEGATIVE)
def test_zero_time_is_allowed(name: str) -> None:
    assert getattr(changed(**{name: 0.0}), name) == 0


@pytest.mark.parametrize("value", ["mmap", "", None, 1])
def test_bad_disk_method_names_the_allowed(value: object) -> None:
    with pytest.raises(ConfigError, match="disk_method.*direct, buffered"):
        changed(disk_method=value)


@pytest.mark.parametrize("value", [0, -1, 65, 1.0, True, None, "4"])
def test_bad_queue_depth_names_the_range(value: object) -> None:
    with pytest.raises(ConfigError, match="disk_queue_depth.*1 to 64"):
        changed(disk_queue_depth=value)


def stored(**changes: object) -> dict[str, object]:
    return {"version": PROFILE_VERSION, **asdict(DEFAULT_PROFILE), **changes}


def test_unknown_field_is_named() -> None:
    with pytest.raises(ConfigError, match="'warp_factor'"):
        HardwareProfile.from_dict(stored(warp_factor=9))


@pytest.mark.parametrize("name", [*POSITIVE, "copy_latency_s", "name", "disk_method"])
def test_missing_field_is_named(name: str) -> None:
    values = stored()
    del values[name]
    with pytest.raises(ConfigError, match=name):
        HardwareProfile.from_dict(values)


@pytest.mark.parametrize(
    ("name", "default"), [("emulated_jitter_s", 0.0), ("is_measured", False), ("note", "")]
)
def test_optional_field_may_be_missing(name: str, default: object) -> None:
    values = stored(emulated_jitter_s=0.5, is_measured=True, note="something")
    del values[name]
    assert getattr(HardwareProfile.from_dict(values), name) == default


def test_profiles_of_earlier_versions_stay_readable() -> None:
    values = json.loads(DEFAULT_PROFILE.to_json())
    for name in LATER:
        del values[name]
    assert HardwareProfile.from_dict(values) == DEFAULT_PROFILE


RATE = {
    "place": "cpu", "operation": "expert", "dtype": "bfloat16", "num_rows": 1, "bytes_per_s": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        3,
        {"cpu": 1},
        ["x"],
        [{}],
        [{**RATE, "more": 1}],
        [{**RATE, "place": "moon"}],
        [{**RATE, "operation": "guess"}],
        [{**RATE, "dtype": "int3"}],
        [{**RATE, "num_rows": 0}],
        [{**RATE, "bytes_per_s": 0}],
        [{**RATE, "bytes_per_s": math.nan}],
    ],
)
def test_bad_weight_rates_are_named(values: object) -> None:
    with pytest.raises(ConfigError, match="weight_rates"):
        HardwareProfile.from_dict(stored(weight_rates=values))
    assert HardwareProfile.from_dict(stored(weight_rates=[RATE])).weight_rates == (
        WeightRate(**RATE),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_read_bytes_per_s", 0),
        ("matrix_flops_per_s", -1.0),
        ("gpu_memory_bytes", 0),
        ("ram_bytes", 1.5),
        ("is_disturbed", 1),
    ],
)
def test_bad_values_for_predictions_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        changed(**{name: value})


@pytest.mark.parametrize(
    "values", [stored(version=PROFILE_VERSION + 1), stored(version=None), {}, [], None, "x", 3]
)
def test_other_version_or_no_profile_says_what_to_run(values: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="version"):
        HardwareProfile.from_dict(values)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"profile\.json: .*version.*oled-moe doctor"):
        load_profile(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": ' + "9" * 5000 + "}", "\0", ""])
def test_damaged_files_are_config_errors(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile\.json: .*oled-moe doctor"):
        load_profile(path)


def test_absent_file_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="oled-moe doctor"):
        load_profile(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe\x00", b"null", b"[1, 2]", b'{"version": 1}']
)
def test_garbage_file_is_a_config_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="hardware profile"):
        load_profile(path)


def test_folder_in_place_of_the_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        load_profile(tmp_path)


def test_cost_model_by_hand() -> None:
    profile = replace(
        DEFAULT_PROFILE,
        copy_bytes_per_s=100.0,
        copy_latency_s=0.5,
        cpu_weight_bytes_per_s=50.0,
        cpu_token_weight_bytes_per_s=400.0,
        mean_tokens_per_miss=3.0,
    )
    costs = CostModel.from_profile(profile, 200)
    assert costs == CostModel(
        transfer_s=2.5, cpu_base_s=4.0, cpu_token_s=0.5, mean_tokens_per_miss=3.0
    )
    assert costs.cpu_s(1) == 4.5
    assert costs.cpu_s(8) == 8.0


@given(profiles(), st.integers(1, 2**32), st.integers(2, 16), st.integers(1, 512))
def test_times_scale_with_the_expert(
    profile: HardwareProfile, expert_bytes: int, factor: int, num_tokens: int
) -> None:
    small = CostModel.from_profile(profile, expert_bytes)
    large = CostModel.from_profile(profile, expert_bytes * factor)
    assert large.cpu_s(num_tokens) == pytest.approx(factor * small.cpu_s(num_tokens))
    assert large.transfer_s == pytest.approx(
        profile.copy_latency_s + factor * expert_bytes / profile.copy_bytes_per_s
    )
    assert small.cpu_s(num_tokens + 1) >= small.cpu_s(num_tokens) > 0
