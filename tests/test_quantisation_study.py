"""What the experiment on quantised experts measures is what it says, and its tables are those of
its rows."""

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oled_moe.engine import Engine

ROOT = Path(__file__).parents[1]
STUDY = "10_quantisation"
sys.path.insert(0, str(ROOT))
try:
    measures = importlib.import_module(f"experiments.{STUDY}.measures")
    study = importlib.import_module(f"experiments.{STUDY}.run")
finally:
    sys.path.pop(0)


def rows() -> list[dict[str, Any]]:
    text = (ROOT / "results" / "raw" / f"{STUDY}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_tables_are_those_of_the_rows() -> None:
    readme = (ROOT / "experiments" / STUDY / "README.md").read_text("utf-8")
    found = study.tables(rows(), study.read_speed(ROOT / "results" / "raw"))
    assert all(table.markdown() in readme for table in found)


def test_every_row_is_a_cell_of_its_own_with_where_it_comes_from() -> None:
    found = [study.Cell(*(row[name] for name in study.Cell._fields)) for row in rows()]
    assert len(set(found)) == len(found) and set(found) <= set(study.cells())
    assert all(row.keys() >= {"experiment", "commit", "versions", "num_cores"} for row in rows())
    for row in rows():
        for shape in study.SHAPES:
            assert row[f"{shape}_expert_bytes"] == study.slot_bytes(shape, row["form"])


def test_the_demo_model_keeps_its_accuracy() -> None:
    """At most 1 point lost in int8 and 3 in int4, over all held-out questions."""
    right = {(row["form"], row["method"]): row for row in rows() if row["part"] == "demo"}
    base = right[None, None]
    assert base["num_questions"] == len(measures.held_out()) == 440
    for form, most in (("int8-row", 0.01), ("int4-g64", 0.03)):
        row = right[form, "searched"]
        assert row["num_questions"] == 440 == len(row["is_right"])
        assert base["right"] - row["right"] <= most * 440


@pytest.fixture(scope="module")
def engine() -> Any:
    with measures.open_engine("demo") as opened:
        yield opened


def test_canvases_are_what_decoding_sees_first(engine: Engine) -> None:
    """The tokens that the first pass over a block commits are the best of the canvas's logits."""
    records = measures.held_out()[:120:60]
    with torch.inference_mode():
        answers = measures.answer_all(engine, records)
        shown = list(measures.canvases(engine, records, answers))
        logits_NV = measures.logits_of(engine, shown)
    best = iter(logits_NV.argmax(-1).tolist())
    predicted = {(c.question, position): next(best) for c in shown for position in c.masked}
    num_compared = 0
    for number, (record, answer) in enumerate(zip(records, answers, strict=True)):
        prompt = measures.prompt_ids(engine, record)
        for event in engine.stream(prompt, measures.PARAMS):
            for change in event.changes if event.step_id == 0 else ():
                if (number, change.position) in predicted:
                    num_compared += 1
                    assert predicted[number, change.position] == change.to_id
        assert tuple(event.result.token_ids) == answer.token_ids
    assert num_compared > 10


def test_layers_are_computed_as_in_the_model(engine: Engine) -> None:
    shown = [measures.Canvas(0, tuple(range(5, 45)), (39,))]
    probe, routed = measures.LayerInputs(), []

    def see(name: str, value: torch.Tensor) -> None:
        probe(name, value)
        if name.endswith("routed_out"):
            routed.append(value)

    with torch.inference_mode():
        measures.logits_of(engine, shown, see)
        outputs = measures.layer_outputs(engine, probe.joined())
    assert len(outputs) == len(routed) == engine.model_config.num_moe_layers
    for found, expected in zip(outputs, routed, strict=True):
        assert torch.equal(found.to(expected.dtype), expected)
    assert measures.output_error(outputs, outputs, probe.joined()) == 0
    doubled = [2 * each for each in outputs]
    assert measures.output_error(doubled, outputs, probe.joined()) > 0.01


def test_divergence_is_that_of_the_distributions() -> None:
    expected = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    found = torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    kl_N = measures.divergences(found.log(), expected.log())
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl_N.tolist() == pytest.approx([by_hand, 0], abs=1e-7)
    shown = [measures.Canvas(0, (), (3,)), measures.Canvas(1, (), (4,))]
    assert measures.by_question(kl_N, shown) == kl_N.tolist()


def test_agreement_counts_what_is_missing_as_other() -> None:
    def answer(*token_ids: int) -> Any:
        return measures.Answer(token_ids, True)

    found = [answer(1, 2, 3), answer(7, 7)]
    assert measures.agreement(found, [answer(1, 9, 3, 4), answer(7, 7)]) == 4 / 6
