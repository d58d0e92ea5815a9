"""Parameters: wrong values are ConfigErrors that name the field, never anything else."""

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
from fakes import bounded
from hypothesis import example, given
from hypothesis import strategies as st

from oled_moe.config import (
    DecodingParams,
    EngineConfig,
    SamplingParams,
    format_size,
    parse_size,
    sampling_from_generation_config,
    size_to_type,
)
from oled_moe.errors import ConfigError, OledMoeError

GIB = 2**30
STRANGE: list[Any] = [
    "x",
    "",
    "1",
    b"1",
    [],
    [1],
    {},
    {"a": 1},
    {1},
    object(),
    np.arange(3),
    (value for value in "ab"),
]
HUGE = 10**400
WHOLE = [*STRANGE, True, False, 1.0, 1.5, math.nan, math.inf, -1, np.int64(1)]
REAL = [*STRANGE, True, "0.5", HUGE, math.nan, math.inf, -math.inf, -1, -0.001]
FLAG = [*STRANGE, 0, 1, 1.0, "true", HUGE]


def resolved(**values: Any) -> DecodingParams:
    return DecodingParams.resolve(SamplingParams(**{"mask_token_id": 7} | values))


# --- SamplingParams


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "block_length",
        "steps",
        "max_post_edit_steps",
        "num_to_transfer",
        "minimal_topk",
        "top_k",
        "seed",
        "mask_token_id",
        "eos_token_id",
        "pad_token_id",
    ],
)
@pytest.mark.parametrize("value", [*WHOLE, 2**63, HUGE], ids=lambda value: repr(value)[:20])
def test_whole_numbers_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name", ["max_tokens", "block_length", "steps", "num_to_transfer", "minimal_topk", "top_k"]
)
def test_counts_begin_at_one(name: str) -> None:
    assert getattr(SamplingParams(**{name: 1}), name) == 1
    with pytest.raises(ConfigError, match=f"{name} is 0; allowed: a whole number, 1"):
        SamplingParams(**{name: 0})


@pytest.mark.parametrize("name", ["max_post_edit_steps", "seed", "mask_token_id", "eos_token_id"])
def test_counts_that_may_be_zero(name: str) -> None:
    assert getattr(SamplingParams(**{name: 0}), name) == 0


@pytest.mark.parametrize("name", ["threshold", "edit_threshold", "top_p", "temperature"])
@pytest.mark.parametrize("value", REAL, ids=lambda value: repr(value)[:20])
def test_shares_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["threshold", "edit_threshold", "top_p"])
def test_shares_lie_between_zero_and_one(name: str) -> None:
    for value in (0, 0.0, 1, 1.0, 0.5):
        assert getattr(SamplingParams(**{name: value}), name) == value
    with pytest.raises(ConfigError, match="allowed: a number, 0 to 1"):
        SamplingParams(**{name: 1.0000001})


@pytest.mark.parametrize("name", ["eos_early_stop", "ignore_eos"])
@pytest.mark.parametrize("value", FLAG, ids=lambda value: repr(value)[:20])
def test_flags_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*; allowed: True, False"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [*STRANGE, "LowConfidence"], ids=lambda value: repr(value)[:20])
def test_algorithm_lists_the_known(value: Any) -> None:
    with pytest.raises(ConfigError, match="algorithm is .*low_confidence, joint_threshold"):
        SamplingParams(algorithm=value)


@pytest.mark.parametrize(
    "value",
    [5, True, 1.5, b"ab", "", ["a", ""], ["a", 1], [None], {"a": 1}, {"a"}, object(), iter(["a"])],
    ids=lambda value: repr(value)[:20],
)
def test_stop_strings_are_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="^stop is "):
        SamplingParams(stop=value)


@pytest.mark.parametrize(
    "value",
    [
        5,
        True,
        "12",
        "",
        b"12",
        [1.0],
        [True],
        [-1],
        ["1"],
        [None],
        {1: 2},
        {1},
        object(),
        iter([1]),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_stop_ids_are_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="^stop_token_ids is "):
        SamplingParams(stop_token_ids=value)


def test_stop_lists_become_tuples() -> None:
    ids = [1, 2]
    params = SamplingParams(stop="ab", stop_token_ids=ids)
    ids.append(3)
    assert params.stop == ("ab",) and params.stop_token_ids == (1, 2)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=[], stop_token_ids=[]).stop == ()
    hash(params)


def test_values_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().max_tokens = 1
    with pytest.raises(FrozenInstanceError):
        EngineConfig().seed = 1


def test_unknown_options_are_errors() -> None:
    with pytest.raises(TypeError):
        SamplingParams(max_length=1)


VALUES = st.sampled_from([*STRANGE[:-1], HUGE, math.nan, None, True, False, 0, 1, 2, 0.5, 1.0])


@bounded(200)
@given(st.dictionaries(st.sampled_from([f.name for f in fields(SamplingParams)]), VALUES))
def test_any_sampling_value_is_taken_or_a_config_error(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except ConfigError as error:
        assert any(str(error).startswith(f"{name} is ") for name in values)
    else:
        given_names = {name for name, value in values.items() if value is not None}
        assert {
            f.name for f in fields(params) if getattr(params, f.name) is not None
        } == given_names


# --- defaults and the step rule


def test_with_defaults_fills_only_what_is_open() -> None:
    mine = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=False, stop=())
    theirs = SamplingParams(
        max_tokens=9, temperature=1.0, ignore_eos=True, stop="x", threshold=0.5, eos_token_id=3
    )
    both = mine.with_defaults(theirs)
    assert (both.max_tokens, both.temperature, both.ignore_eos, both.stop) == (5, 0.0, False, ())
    assert (both.threshold, both.eos_token_id, both.top_k) == (0.5, 3, None)
    assert mine.with_defaults(SamplingParams()) == mine


def test_built_in_defaults() -> None:
    params = resolved()
    assert params.algorithm == "low_confidence"
    assert (params.max_tokens, params.block_length, params.steps) == (256, 32, 32)
    assert (params.threshold, params.edit_threshold) == (0.95, 0.9)
    assert (params.max_post_edit_steps, params.num_to_transfer) == (16, 1)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, None, None, 0)
    assert not params.eos_early_stop and not params.ignore_eos
    assert params.stop == () and params.stop_token_ids == () and params.eos_token_id is None


def test_a_zero_is_not_taken_for_open() -> None:
    params = resolved(threshold=0, edit_threshold=0.0, max_post_edit_steps=0, mask_token_id=0)
    assert (params.threshold, params.edit_threshold, params.max_post_edit_steps) == (0, 0, 0)
    assert params.mask_token_id == 0


def test_mask_id_is_needed() -> None:
    with pytest.raises(ConfigError, match="mask_token_id"):
        DecodingParams.resolve(SamplingParams())


@given(
    max_tokens=st.integers(1, 100),
    block_length=st.integers(1, 64),
    steps=st.none() | st.integers(1, 100),
    minimal_topk=st.none() | st.integers(1, 64),
)
@example(max_tokens=4, block_length=32, steps=None, minimal_topk=1)
@example(max_tokens=64, block_length=8, steps=32, minimal_topk=4)
def test_step_rule(
    max_tokens: int, block_length: int, steps: int | None, minimal_topk: int | None
) -> None:
    least, length = minimal_topk or 1, max(max_tokens, block_length)
    values = {
        "max_tokens": max_tokens,
        "block_length": block_length,
        "steps": steps,
        "minimal_topk": minimal_topk,
    }
    if least > length:
        with pytest.raises(ConfigError, match=f"minimal_topk is {least}; allowed: 1 to {length}"):
            resolved(**values)
        return
    params = resolved(**values)
    assert params.steps == min(steps or block_length, length // least) >= 1
    if steps is None and least == 1:
        # A small max_tokens must not accept a whole block at once.
        assert params.steps == block_length


# --- generation_config.json


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_new_tokens", "max_tokens"),
        ("gen_length", "max_tokens"),
        ("max_post_steps", "max_post_edit_steps"),
        ("mask_id", "mask_token_id"),
        ("eos_id", "eos_token_id"),
        ("steps", "steps"),
        ("pad_token_id", "pad_token_id"),
    ],
)
def test_generation_config_names(theirs: str, ours: str) -> None:
    assert sampling_from_generation_config({theirs: 5}) == SamplingParams(**{ours: 5})


def test_generation_config_edit_threshold() -> None:
    found = sampling_from_generation_config({"editing_threshold": 0.25})
    assert found == SamplingParams(edit_threshold=0.25)


def test_generation_config_ignores_strangers_and_nulls() -> None:
    values = {"transformers_version": "4", "num_beams": 4, "threshold": None, "_from": {}}
    assert sampling_from_generation_config(values) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "eos", "stops"),
    [
        ({"eos_token_id": 4}, 4, None),
        ({"eos_token_id": [4]}, 4, ()),
        ({"eos_token_id": [4, 5, 6]}, 4, (5, 6)),
        ({"eos_id": [4, 5]}, 4, (5,)),
        ({"eos_token_id": [4, 5], "stop_token_ids": [9]}, 4, (5, 9)),
        ({"eos_token_id": 4, "stop_token_ids": [9]}, 4, (9,)),
    ],
)
def test_generation_config_eos_lists(
    values: dict[str, Any], eos: int, stops: tuple[int, ...] | None
) -> None:
    found = sampling_from_generation_config(values)
    assert found.eos_token_id == eos
    assert found.stop_token_ids == stops


def test_generation_config_greedy_and_no_top_k() -> None:
    found = sampling_from_generation_config({"do_sample": False, "temperature": 0.6, "top_k": 0})
    assert found == SamplingParams(temperature=0.0)
    found = sampling_from_generation_config({"do_sample": True, "temperature": 0.6, "top_k": 20})
    assert found == SamplingParams(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"max_new_tokens": "many"}, "max_tokens"),
        ({"threshold": 2}, "threshold"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"eos_token_id": ["a"]}, "eos_token_id"),
        ({"eos_token_id": [1, "a"]}, "stop_token_ids"),
        ({"eos_token_id": [1, 2], "stop_token_ids": 5}, "stop_token_ids"),
        ({"top_k": False}, "top_k"),
        ({"stop": 5}, "stop"),
    ],
)
def test_generation_config_errors_name_file_and_field(values: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^generation_config.json: {name} is "):
        sampling_from_generation_config(values)


# --- EngineConfig


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("max_model_len", "1 or more"),
        ("max_num_seqs", "1 or more"),
        ("threads", "1 to 1024"),
        ("seed", "0 to"),
    ],
)
@pytest.mark.parametrize("value", WHOLE, ids=lambda value: repr(value)[:20])
def test_engine_whole_numbers(name: str, allowed: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*{allowed}"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", REAL, ids=lambda value: repr(value)[:20])
def test_experts_per_layer(value: Any) -> None:
    with pytest.raises(ConfigError, match="^experts_per_layer is "):
        EngineConfig(experts_per_layer=value)


@pytest.mark.parametrize("name", ["cpu_experts", "force"])
@pytest.mark.parametrize("value", [*FLAG, None], ids=lambda value: repr(value)[:20])
def test_engine_flags(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*; allowed: True, False"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name", ["device", "dtype"])
@pytest.mark.parametrize("value", [*STRANGE, "CPU", "int8"], ids=lambda value: repr(value)[:20])
def test_engine_choices(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*; allowed: "):
        EngineConfig(**{name: value})


def test_devices_are_known_wherever_they_are_planned() -> None:
    assert EngineConfig(device="cuda").device == "cuda"
    with pytest.raises(ConfigError, match="device is 'tpu'; allowed: cpu, cuda, emulated"):
        EngineConfig(device="tpu")


@pytest.mark.parametrize("name", ["expert_memory", "memory"])
@pytest.mark.parametrize(
    "value",
    [*STRANGE[:2], *STRANGE[3:], 1.5, math.nan, -1, True, "101%", "nan%", "-1GiB", "%", "1XB"],
    ids=lambda value: repr(value)[:20],
)
def test_sizes_of_the_engine(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    "names",
    [
        ("experts_per_layer", "expert_memory"),
        ("experts_per_layer", "memory"),
        ("expert_memory", "memory"),
    ],
)
def test_one_budget_at_most(names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"{names[0]} and {names[1]} are both given"):
        EngineConfig(**dict.fromkeys(names, 4))


# --- sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 * GIB),
        ("512MiB", GIB // 2),
        ("1.5 GiB", 3 * GIB // 2),
        ("1000000", 10**6),
        ("1KB", 1000),
        ("2TB", 2 * 10**12),
        ("1kib", 1024),
        ("3g", 3 * GIB),
        (" 7 B ", 7),
        ("0", 0),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size("memory", text) == num_bytes


@given(st.integers(0, 2**70))
def test_whole_bytes_are_exact(num_bytes: int) -> None:
    assert parse_size("memory", num_bytes) == num_bytes
    assert parse_size("memory", str(num_bytes)) == num_bytes
    assert parse_size("memory", f"{num_bytes}KiB") == num_bytes * 1024


@given(st.integers(0, 2**60), st.integers(0, 100))
def test_percent_is_a_share(whole: int, percent: int) -> None:
    found = parse_size("memory", f"{percent}%", whole_bytes=whole)
    assert 0 <= found <= whole
    assert abs(found - whole * percent / 100) <= 1 + whole * 1e-12
    assert parse_size("memory", "100%", whole_bytes=whole) == whole


def test_percent_needs_a_whole() -> None:
    with pytest.raises(ConfigError, match="memory is '50%'"):
        parse_size("memory", "50%")


@bounded(300)
@given(st.text(max_size=12) | st.from_regex(r"[0-9.]{1,400}\s?[KMGTkib%B]{0,3}", fullmatch=True))
@example("9" * 400)
@example("9" * 400 + "GiB")
@example("9" * 5000)
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        num_bytes = parse_size("memory", text, whole_bytes=1000)
    except ConfigError as error:
        assert str(error).startswith("memory is ")
    else:
        assert isinstance(num_bytes, int) and num_bytes >= 0


@given(st.integers(0, 10**15))
def test_sizes_to_type_are_within_a_hundredth(num_bytes: int) -> None:
    least, most = size_to_type(num_bytes), size_to_type(num_bytes, is_most=True)
    assert " " not in least + most
    assert num_bytes <= parse_size("x", least) <= 1.01 * num_bytes
    assert num_bytes >= parse_size("x", most) >= 0.99 * num_bytes
    assert size_to_type(291_400_576) == "278MiB"


@given(st.integers(0, 2**50))
def test_printed_sizes_read_back(num_bytes: int) -> None:
    printed = format_size(num_bytes)
    assert parse_size("memory", printed) == pytest.approx(num_bytes, rel=0.06)


def test_errors_are_of_the_project() -> None:
    assert issubclass(ConfigError, OledMoeError) and issubclass(ConfigError, ValueError)
    assert ConfigError.exit_code == 2
