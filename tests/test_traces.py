"""Traces: files round trip, broken ones are refused by name, replay gives what was recorded."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from oled_moe.errors import TraceError, TraceNotFoundError
from oled_moe.traces import (
    METADATA_KEY,
    RoutingTrace,
    TraceRecorder,
    TraceRequest,
    concatenate_traces,
    is_trace,
    load_trace,
    mix_traces,
    save_trace,
)
from oled_moe.types import ForwardContext, ForwardOutcome, ForwardRow, LayerDemand, MoeShape, Phase

L, E, K = 2, 6, 2


def small_trace(**changes: Any) -> RoutingTrace:
    """Two requests in blocks of two: prefill, two steps, a commit folded into the next block."""
    rows = [  # forward, request, block, step, phase, positions, states
        (3, 0, 0, 0, 0, [0, 1], [0, 0]),
        (4, 0, 1, 0, 1, [2, 3], [0, 2]),
        (4, 1, 0, 0, 1, [0, 1], [2, 2]),
        (7, 1, 0, 1, 1, [0, 1], [1, 2]),
        (8, 1, 0, 2, 2, [0, 1], [1, 1]),
        (8, 1, 1, 0, 1, [2, 3], [2, 2]),
    ]
    rng = np.random.default_rng(0)
    num_tokens = 2 * len(rows)
    ids = np.argsort(rng.random((num_tokens, L, E)), axis=2)[:, :, :K].astype(np.int16)
    weights = rng.random((num_tokens, L, K)).astype(np.float32)
    weights /= weights.sum(axis=2, keepdims=True)
    for row in (0, 4):
        ids[2 * row : 2 * row + 2, -1], weights[2 * row : 2 * row + 2, -1] = -1, 0
    confidence = rng.random(num_tokens).astype(np.float32)
    confidence[[0, 1, 8, 9]] = np.nan
    accepted = np.zeros(num_tokens, dtype=np.uint8)
    accepted[[3, 4, 7]] = 1
    columns = list(zip(*rows, strict=True))
    values: dict[str, Any] = {
        "source": "recorded",
        "model_type": "llada2_moe",
        "model_name": "tiny",
        "num_moe_layers": L,
        "num_experts": E,
        "top_k": K,
        "expert_bytes": 1000,
        "block_length": 2,
        "threshold": 0.9,
        "requests": (
            TraceRequest("a", "math", 3, 1, {"note": "kept"}),
            TraceRequest("b", "code", 0, 4),
        ),
        "row_forward": np.array(columns[0], dtype=np.int32),
        "row_request": np.array(columns[1], dtype=np.int32),
        "row_block": np.array(columns[2], dtype=np.int32),
        "row_step": np.array(columns[3], dtype=np.int32),
        "row_phase": np.array(columns[4], dtype=np.uint8),
        "row_token_offset": np.arange(len(rows) + 1, dtype=np.int64) * 2,
        "token_position": np.concatenate(columns[5]).astype(np.int32),
        "token_state": np.concatenate(columns[6]).astype(np.uint8),
        "token_confidence": confidence,
        "token_accepted": accepted,
        "expert_ids": ids,
        "gate_weights": weights,
        "gate_scores": rng.random((num_tokens, L, E)).astype(np.float16),
        "hidden_cosine": np.full((num_tokens, L), np.nan, dtype=np.float32),
        "input_embedding": rng.random((num_tokens, 3)).astype(np.float16),
        "token_ids": np.arange(num_tokens, dtype=np.int32) - 1,
        "extra": {"commit": "abc"},
    }
    return RoutingTrace(**{**values, **changes})


TENSORS = small_trace().tensors()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.trace.safetensors"
    save_trace(small_trace(), path)
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the header and the tensors of a file, whatever comes of it."""
    tensors = dict(load_file(path))
    header = small_trace().header()
    change(header, tensors)
    metadata = {METADATA_KEY: json.dumps(header)}
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, path, metadata)


def same(one: RoutingTrace, other: RoutingTrace) -> bool:
    arrays, others = one.tensors(), other.tensors()
    return (
        one.header() == other.header()
        and arrays.keys() == others.keys()
        and all(np.array_equal(arrays[n], others[n], equal_nan=n != "token_ids") for n in arrays)
        and all(arrays[name].dtype == others[name].dtype for name in arrays)
    )


# Files


def test_round_trip(path: Path) -> None:
    trace = load_trace(path)
    assert same(trace, small_trace())
    assert trace.extra == {"commit": "abc"} and trace.requests[0].extra == {"note": "kept"}
    assert trace.shape == MoeShape(L, E, K, 1000) and is_trace(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_saved_files_have_the_usual_mode(path: Path) -> None:
    plain = path.parent / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_optional_tensors_may_be_absent_and_unknown_ones_are_ignored(path: Path) -> None:
    def change(header: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in ("gate_scores", "hidden_cosine", "input_embedding", "token_ids"):
            del tensors[name]
        tensors["from_the_future"] = np.zeros(3)
        header["from_the_future"] = [1]

    rewrite(path, change)
    trace = load_trace(path)
    assert trace.gate_scores is None and trace.token_ids is None
    assert trace.extra["from_the_future"] == [1]
    assert len(list(trace.forwards())) == 4


def test_a_missing_file_has_its_own_exit_code(tmp_path: Path) -> None:
    with pytest.raises(TraceNotFoundError, match="no such file") as caught:
        load_trace(tmp_path / "no.trace.safetensors")
    assert caught.value.exit_code == 3
    with pytest.raises(TraceError, match="is not a file") as other:
        load_trace(tmp_path)
    assert other.value.exit_code == 2


def test_a_failed_save_leaves_the_old_file(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(TraceError, match="cannot be written"):
        save_trace(small_trace(), path.parent / "no_folder" / "x.trace.safetensors")
    path.parent.joinpath("folder").mkdir()
    with pytest.raises(TraceError, match="cannot be written"):
        save_trace(small_trace(), path.parent / "folder")
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 2


@bounded(60)
@given(st.data())
def test_truncated_and_flipped_files_never_escape_as_anything_else(
    tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("broken") / "x.trace.safetensors"
    save_trace(small_trace(), path)
    content = bytearray(path.read_bytes())
    if draw.draw(st.booleans()):
        content = content[: draw.draw(st.integers(0, len(content) - 1))]
    else:
        content[draw.draw(st.integers(0, len(content) - 1))] ^= draw.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        load_trace(path)
    except TraceError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("content", [b"", b"not a trace", b"\xff" * 64])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.trace.safetensors"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="no safetensors file"):
        load_trace(path)


def test_safetensors_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(2)}, path)
    assert not is_trace(path)
    with pytest.raises(TraceError, match="no routing trace"):
        load_trace(path)
    save_file({"a": np.zeros(2)}, path, {METADATA_KEY: "{"})
    with pytest.raises(TraceError, match="is no JSON"):
        load_trace(path)
    save_file({"a": np.zeros(2)}, path, {METADATA_KEY: "[]"})
    with pytest.raises(TraceError, match="is a list; allowed: an object"):
        load_trace(path)


REQUIRED_KEYS = sorted(set(small_trace().header()) - {"commit"})


@pytest.mark.parametrize("name", REQUIRED_KEYS)
def test_every_key_is_needed(path: Path, name: str) -> None:
    rewrite(path, lambda header, tensors: header.pop(name))
    with pytest.raises(TraceError, match=f"{path}: {name}: is missing"):
        load_trace(path)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("version", 2, "allowed: 1"),
        ("version", "1", "allowed: 1"),
        ("source", "guessed", "recorded or synthetic"),
        ("model_type", 3, "a string"),
        ("model_name", None, "a string"),
        ("num_moe_layers", 0, "1 or more"),
        ("num_moe_layers", 2.0, "1 or more"),
        ("num_experts", "six", "1 to 32767"),
        ("num_experts", 40000, "1 to 32767"),
        ("top_k", 7, "1 to 6"),
        ("expert_bytes", True, "1 or more"),
        ("block_length", -1, "1 or more"),
        ("threshold", None, "0 or more"),
        ("threshold", -0.5, "0 or more"),
        ("requests", {}, "a list of objects"),
        ("requests", [], "one or more"),
        ("requests", [1], "an object"),
        ("requests", [{"id": "a"}], r"\[0\].workload"),
    ],
)
def test_wrong_header_values(path: Path, name: str, value: object, allowed: str) -> None:
    rewrite(path, lambda header, tensors: header.update({name: value}))
    with pytest.raises(TraceError, match=f"{name}.*{allowed}"):
        load_trace(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("id", 1.5), ("workload", 3), ("num_prompt_tokens", -1), ("num_generated_tokens", "4")],
)
def test_wrong_requests(path: Path, name: str, value: object) -> None:
    rewrite(path, lambda header, tensors: header["requests"][1].update({name: value}))
    with pytest.raises(TraceError, match=rf"requests\[1\].{name}: is"):
        load_trace(path)


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_every_tensor_has_its_dtype_and_shape(path: Path, name: str) -> None:
    original = path.read_bytes()
    wrong = np.float64 if TENSORS[name].dtype != np.float64 else np.float32
    rewrite(path, lambda header, tensors: tensors.update({name: tensors[name].astype(wrong)}))
    with pytest.raises(TraceError, match=f"{name}: is float64; allowed"):
        load_trace(path)
    for change in (lambda a: a[:-1], lambda a: a[..., None], lambda a: a.ravel()[0]):
        path.write_bytes(original)
        rewrite(path, lambda h, t, change=change: t.update({name: np.array(change(t[name]))}))
        with pytest.raises(TraceError, match="allowed"):
            load_trace(path)
    if name not in ("gate_scores", "hidden_cosine", "input_embedding", "token_ids"):
        path.write_bytes(original)
        rewrite(path, lambda header, tensors: tensors.pop(name))
        with pytest.raises(TraceError, match=f"{name}: the tensor is missing"):
            load_trace(path)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("row_forward", 1, 9, "row_forward, row 2: is 4; allowed: no less"),
        ("row_forward", 0, -1, "row_forward, row 0: is -1"),
        ("row_request", 2, 2, "row_request, row 2: is 2; allowed: 0 to 1"),
        ("row_block", 3, -1, "row_block, row 3: is -1"),
        ("row_step", 3, -2, "row_step, row 3: is -2"),
        ("row_phase", 5, 3, "row_phase, row 5: is 3; allowed: 0 prefill"),
        ("row_token_offset", 0, 1, "row_token_offset, row 0: starts at 1"),
        ("row_token_offset", 2, 2, "row_token_offset, row 1: is 2; allowed: more than"),
        ("row_token_offset", -1, 13, "row_token_offset: ends at 13; allowed: the 12 tokens"),
        ("token_position", 5, -1, "token_position, row 2, its token 1: is -1"),
        (
            "token_position",
            5,
            0,
            "token_position, row 2, its token 1: is 0; allowed: each position",
        ),
        ("token_state", 7, 3, "token_state, row 3, its token 1: is 3"),
        ("token_confidence", 7, 1.5, "token_confidence, row 3, its token 1: is 1.5"),
        ("token_confidence", 7, -0.1, "token_confidence, row 3, its token 1"),
        ("token_accepted", 7, 2, "token_accepted, row 3, its token 1: is 2; allowed: 0 or 1"),
        ("token_accepted", 6, 1, "token_accepted, row 3, its token 0: is 1; allowed: 1 at masked"),
        ("token_ids", 0, -2, "token_ids, row 0, its token 0: is -2"),
        ("expert_ids", (7, 1, 0), 6, "expert_ids, row 3, its token 1, layer 1: .*allowed: 0 to 5"),
        ("expert_ids", (7, 1, 0), -2, "expert_ids, row 3, its token 1, layer 1: .*allowed: 0 to 5"),
        ("expert_ids", (7, 1, 0), -1, "expert_ids, row 3.*-1 for all of a token or for none"),
        ("expert_ids", (7, 1), -1, "expert_ids, row 3, its token 1.*all tokens of a row or none"),
        ("expert_ids", (7, 1), 4, "expert_ids, row 3.*each expert once"),
        ("gate_weights", (7, 1, 0), np.nan, "gate_weights, row 3, its token 1, layer 1.*0 to 1"),
        ("gate_weights", (7, 1), (1.5, -0.5), "gate_weights, row 3.*0 to 1"),
        ("gate_weights", (7, 1), (0.3, 0.3), "gate_weights, row 3.*sum to 1"),
        ("hidden_cosine", (7, 1), 1.5, "hidden_cosine, row 3, its token 1, layer 1"),
    ],
)
def test_wrong_values_are_named(
    path: Path, name: str, index: Any, value: object, message: str
) -> None:
    def change(header: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][index] = value

    rewrite(path, change)
    with pytest.raises(TraceError, match=message) as caught:
        load_trace(path)
    assert str(caught.value).startswith(str(path))


def test_an_empty_trace_is_refused(path: Path) -> None:
    def change(header: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in tensors:
            tensors[name] = tensors[name][:0]
        tensors["row_token_offset"] = np.zeros(1, dtype=np.int64)

    rewrite(path, change)
    with pytest.raises(TraceError, match="is empty"):
        load_trace(path)


def test_arrays_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        small_trace().expert_ids[0, 0, 0] = 1


# Replay


def test_forwards_give_what_the_arrays_hold() -> None:
    trace = small_trace()
    forwards = list(trace.forwards(["gate_scores", "input_embedding", "token_ids"]))
    assert [forward.context.forward_id for forward in forwards] == [0, 1, 2, 3]
    assert [len(forward.demands) for forward in forwards] == [1, 2, 2, 2]
    assert [forward.ended_requests for forward in forwards] == [(), (0,), (), (1,)]
    offset = trace.row_token_offset
    bounds = trace.forward_row_offset
    for forward in forwards:
        index = forward.context.forward_id
        first, end = bounds[index], bounds[index + 1]
        here = slice(offset[first], offset[end])
        context = forward.context
        assert len(context.rows) == end - first
        assert context.token_ids is not None and context.token_position is not None
        assert trace.token_ids is not None and context.input_embedding is not None
        np.testing.assert_array_equal(context.token_ids, trace.token_ids[here])
        np.testing.assert_array_equal(context.token_position, trace.token_position[here])
        assert context.input_embedding.shape == (offset[end] - offset[first], 3)
        np.testing.assert_array_equal(
            forward.outcome.token_confidence, trace.token_confidence[here]
        )
        for demand in forward.demands:
            kept = [
                row
                for row in range(first, end)
                if trace.expert_ids[offset[row], demand.layer, 0] >= 0
            ]
            tokens = np.concatenate([np.arange(offset[r], offset[r + 1]) for r in kept])
            expected = LayerDemand.from_routing(
                demand.layer,
                context.part([row in kept for row in range(first, end)]),
                trace.expert_ids[tokens, demand.layer].astype(np.int64),
                trace.gate_weights[tokens, demand.layer],
                num_experts=E,
            )
            assert demand.context.rows == expected.context.rows
            for name in ("topk_ids", "gate_weights", "expert_ids", "num_tokens"):
                found, wanted = getattr(demand, name), getattr(expected, name)
                np.testing.assert_array_equal(found, wanted)
                assert found.dtype == wanted.dtype
            assert demand.gate_scores is not None and trace.gate_scores is not None
            np.testing.assert_array_equal(
                demand.gate_scores, trace.gate_scores[tokens, demand.layer].astype(np.float32)
            )


def test_layer_time_confidence() -> None:
    trace = small_trace()
    conf = trace.token_confidence
    known = trace.layer_time_confidence()
    # Row 1 has a fresh mask behind the prompt; row 3 knows row 2's confidence; row 5 is fresh.
    expected = [1, 1, 1, 0.5, 0.5, 0.5, 1, conf[5], 1, 1, 0.5, 0.5]
    np.testing.assert_array_equal(known, np.array(expected, dtype=np.float32))


def test_a_position_without_logits_keeps_its_older_confidence() -> None:
    trace = small_trace()
    confidence = trace.token_confidence.copy()
    confidence[7] = np.nan
    state = trace.token_state.copy()
    state[9] = 2
    changed = replace(trace, token_confidence=confidence, token_state=state)
    assert changed.layer_time_confidence()[9] == confidence[5]


def test_previous_token() -> None:
    expected = [-1, -1, -1, -1, -1, -1, 4, 5, 6, 7, -1, -1]
    assert small_trace().previous_token().tolist() == expected


def test_future_is_what_forwards_demand() -> None:
    trace = small_trace()
    future = trace.future()
    assert future.num_forwards == 4
    for forward in trace.forwards():
        demanded = {demand.layer: demand.expert_ids for demand in forward.demands}
        for layer in range(L):
            found = future.active[forward.context.forward_id][layer]
            if layer in demanded:
                np.testing.assert_array_equal(found, demanded[layer])
            else:
                assert found is None


@pytest.mark.parametrize("name", ["gate_scores", "input_embedding", "token_ids"])
def test_needs(name: str) -> None:
    trace = small_trace()
    trace.check_needs([name])
    with pytest.raises(TraceError, match=f"needs {name}.*record it again with"):
        replace(trace, **{name: None}).check_needs([name])
    with pytest.raises(TraceError, match="never holds thoughts"):
        trace.forwards(["thoughts"])


def test_select_requests() -> None:
    trace = small_trace()
    one = trace.select_requests([1])
    assert [request.id for request in one.requests] == ["b"]
    assert one.row_forward.tolist() == [4, 7, 8, 8] and one.row_request.tolist() == [0] * 4
    np.testing.assert_array_equal(one.expert_ids, trace.expert_ids[4:])
    assert same(trace.select_requests([0, 1]), trace)
    for wrong, message in (([2], "no request 2"), ([0, 0], "twice")):
        with pytest.raises(TraceError, match=message):
            trace.select_requests(wrong)


def test_concatenate_and_mix() -> None:
    trace = small_trace()
    both = concatenate_traces([trace, replace(trace, token_ids=None)])
    assert both.num_forwards == 8 and both.token_ids is None and both.gate_scores is not None
    assert [request.id for request in both.requests] == ["a", "b", "a", "b"]
    np.testing.assert_array_equal(both.select_requests([2, 3]).expert_ids, trace.expert_ids)
    mixed = mix_traces([trace, trace], 3, seed=1)
    assert len(mixed.requests) == 3
    assert mixed.row_request.tolist() == sorted(mixed.row_request.tolist())
    assert same(mixed, mix_traces([trace, trace], 3, seed=1))
    with pytest.raises(TraceError, match="allowed: 1 to 4"):
        mix_traces([trace, trace], 5, seed=0)
    with pytest.raises(TraceError, match="threshold differs"):
        concatenate_traces([trace, replace(trace, threshold=0.5)])
    with pytest.raises(TraceError, match="model_type differs"):
        concatenate_traces([trace, replace(trace, model_type="other")])


# Recorder


def test_recorder_keeps_what_it_was_shown() -> None:
    trace = small_trace()
    recorder = TraceRecorder(
        trace.shape, include=("gate_scores", "input_embedding", "token_ids", "hidden_cosine")
    )
    for forward in trace.forwards(["gate_scores", "input_embedding"]):
        for demand in forward.demands:
            recorder.observe_demand(demand, None)
        recorder.observe_outcome(forward.outcome)
    assert recorder.num_forwards == 4
    built = recorder.build(
        dict(enumerate(trace.requests)),
        model_type=trace.model_type,
        model_name=trace.model_name,
        block_length=2,
        threshold=0.9,
        extra=trace.extra,
    )
    # Scores of layers that were not demanded are not known to it.
    scores = trace.gate_scores.copy() if trace.gate_scores is not None else np.empty(0)
    scores[[0, 1, 8, 9], 1] = 0
    dense = np.array([0, 1, 1, 2, 3, 3], dtype=np.int32)
    assert same(built, replace(trace, row_forward=dense, gate_scores=scores))


def test_recorder_drops_forwards_that_never_ended() -> None:
    trace = small_trace()
    recorder = TraceRecorder(trace.shape)
    first, second, *_ = trace.forwards()
    for demand in second.demands:
        recorder.observe_demand(demand)
    recorder.observe_outcome(first.outcome)
    built = recorder.build(
        dict(enumerate(trace.requests)), model_type="m", model_name="m", block_length=2, threshold=1
    )
    assert (built.expert_ids == -1).all()


def test_recorder_refuses_what_it_cannot_record() -> None:
    shape = MoeShape(L, E, K, 1)
    with pytest.raises(TraceError, match="include"):
        TraceRecorder(shape, include=["thoughts"])
    context = ForwardContext(
        0,
        2,
        (ForwardRow(0, 0, 0, Phase.PREFILL, 1),),
        np.ones(1, dtype=np.float32),
        np.zeros(1, dtype=np.uint8),
    )
    with pytest.raises(TraceError, match="token positions"):
        TraceRecorder(shape).observe_outcome(ForwardOutcome.without_logits(context))
    placed = replace(context, token_position=np.zeros(1, dtype=np.int64))
    with pytest.raises(TraceError, match="does not say token_ids"):
        TraceRecorder(shape, include=["token_ids"]).observe_outcome(
            ForwardOutcome.without_logits(placed)
        )
    with pytest.raises(TraceError, match="nothing was recorded"):
        TraceRecorder(shape).build({}, model_type="m", model_name="m", block_length=2, threshold=1)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_refused_wherever_they_stand(number: str) -> None:
    from oled_moe.traces import _parse_header

    with pytest.raises(TraceError, match="is no JSON"):
        _parse_header({"oled_moe_trace": '{"version": 1, "someone_elses": ' + number + "}"})
