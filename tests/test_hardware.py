"""Built-in hardware profiles, and how a name becomes one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.errors import ConfigError, ModelNotFoundError
from oled_moe.hardware import hardware_names, load_hardware

NAMES = ("h200", "rtx3060-laptop", "rtx4090-ddr5", "testbed-a", "testbed-b")


def test_all_are_there() -> None:
    assert hardware_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_built_in_profiles(name: str) -> None:
    profile = load_hardware(name)
    assert profile.name == name
    # Nobody measured these machines, and whoever reads the file is told so.
    assert not profile.is_measured
    assert "Nothing here was measured" in profile.note and "assumed" in profile.note
    assert profile.has_cpu_experts
    # A device reads weights faster than they come over its link, which is what offloading is about.
    assert profile.device_weight_bytes_per_s is not None
    assert profile.device_weight_bytes_per_s > profile.copy_bytes_per_s
    assert profile.layer_overhead_s > 0 and profile.activation_round_trip_s > 0


@pytest.mark.parametrize("name", ["testbed-a", "testbed-b"])
def test_what_was_set_from_the_paper_is_said(name: str) -> None:
    note = load_hardware(name).note
    assert "layer_overhead_s is the one number set from the OLED-MoE paper" in note
    assert "Nothing else was tuned" in note


def test_a_path_is_read(tmp_path: Path) -> None:
    profile = replace(DEFAULT_PROFILE, name="mine", layer_overhead_s=0.25, has_cpu_experts=True)
    path = tmp_path / "mine.json"
    path.write_text(profile.to_json())
    assert load_hardware(path) == load_hardware(str(path)) == profile


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(
        ModelNotFoundError, match="known: h200, .*testbed-b, this-machine"
    ) as caught:
        load_hardware("testbed-z")
    assert "testbed-z" in str(caught.value)


def test_this_machine_needs_a_measurement(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="run `oled-moe doctor --device cpu`"):
        load_hardware("this-machine", cache_directory=tmp_path)
    with pytest.raises(ConfigError, match="this-machine:emulated"):
        load_hardware("this-machine:abacus", cache_directory=tmp_path)


def test_this_machine_is_what_doctor_stored(tmp_path: Path) -> None:
    (tmp_path / "hardware-cpu.json").write_text(DEFAULT_PROFILE.to_json())
    stored = replace(DEFAULT_EMULATED_PROFILE, has_cpu_experts=False)
    (tmp_path / "hardware-emulated.json").write_text(stored.to_json())
    assert load_hardware("this-machine", cache_directory=tmp_path) == DEFAULT_PROFILE
    emulated = load_hardware("this-machine:emulated", cache_directory=tmp_path)
    # Profiles stored by earlier versions do not say that this device has a second place.
    assert emulated == DEFAULT_EMULATED_PROFILE and emulated.has_cpu_experts


def test_profiles_of_earlier_versions_stay_readable(tmp_path: Path) -> None:
    old = json.loads(DEFAULT_PROFILE.to_json())
    for name in (
        "device_weight_bytes_per_s",
        "device_token_weight_bytes_per_s",
        "layer_overhead_s",
        "forward_overhead_s",
        "activation_round_trip_s",
        "has_cpu_experts",
    ):
        del old[name]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    assert load_hardware(path) == DEFAULT_PROFILE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device_weight_bytes_per_s", 0),
        ("device_token_weight_bytes_per_s", -1.0),
        ("layer_overhead_s", -1e-9),
        ("forward_overhead_s", None),
        ("activation_round_trip_s", "1"),
        ("has_cpu_experts", 1),
    ],
)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(DEFAULT_PROFILE, **{name: value})


def test_the_beginning_of_a_name_will_do() -> None:
    assert load_hardware("rtx4090") == load_hardware("rtx4090-ddr5")
    with pytest.raises(ConfigError, match="testbed-a or testbed-b"):
        load_hardware("testbed")


@pytest.mark.parametrize("name", NAMES)
def test_gpu_memory_is_known(name: str) -> None:
    """As the note says it, in GB or GiB."""
    profile = load_hardware(name)
    assert profile.gpu_memory_bytes is not None
    sizes = {round(profile.gpu_memory_bytes / unit) for unit in (10**9, 2**30)}
    assert any(f"{size} GB" in profile.note for size in sizes)
    if profile.ram_bytes is not None:
        assert f"{round(profile.ram_bytes / 10**9)} GB host" in profile.note
