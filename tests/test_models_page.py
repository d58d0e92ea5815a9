"""docs/models.md: its tables are those of the committed rows, and rows are what code computes."""

import sys
from pathlib import Path
from typing import Any

import pytest

from oled_moe.hardware import load_hardware
from oled_moe.models import find_family
from oled_moe.shapes import SHAPES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def page() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import models
    finally:
        sys.path.pop(0)
    return models


def test_the_page_shows_the_rows(page: Any) -> None:
    text = page.DOC.read_text(encoding="utf-8")
    assert page.with_tables(text, page.tables(page.read(page.ROWS))) == text


def test_sizes_are_computed_as_written(page: Any) -> None:
    rows = {row["name"]: row for row in page.read(page.ROWS) if row["part"] == "sizes"}
    made = {row["name"]: row for row in page.sizes_rows()}
    assert set(made) == set(rows) == set(SHAPES)
    for name, row in made.items():
        assert row.items() <= rows[name].items()


def test_bytes_of_an_expert(page: Any) -> None:
    """By hand, at LLaDA2-mini's: 3 matrices of 2048 × 512; rows, and groups of 64 along a row."""
    values, rows = 3 * 2048 * 512, 512 + 512 + 2048
    shape = SHAPES["llada2-mini"].config
    assert page.expert_bytes(find_family(shape).config(shape)) == {
        "bf16": 2 * values,
        # Whole pages.
        "int8": -(-(values + 2 * rows) // 4096) * 4096,
        "int4": values // 2 + 2 * (values // 64),
    }


def test_plans_are_computed_as_written(page: Any) -> None:
    hardware = load_hardware(page.HARDWARE)
    models = {name: page.forms_of(name) for name in SHAPES}
    rows = [row for row in page.read(page.ROWS) if row["part"] == "fits"]
    assert len(rows) == 2 * len(page.MEMORIES_GIB) * len(SHAPES)
    for row in rows:
        place = (models[row["name"]], row["device"], row["memory_gib"])
        made = page.fit_row(*place, hardware, predicts=False)
        assert made["does_fit"] == row["does_fit"]
        for form, share in made["resident_share"].items():
            written = row["resident_share"][form]
            assert share == (None if written is None else pytest.approx(written, rel=0.01))
        if row["does_fit"]:
            assert made["slots_per_layer"] == pytest.approx(row["slots_per_layer"], rel=0.01)
            assert made["has_experts_on_disk"] == row["has_experts_on_disk"]


def test_a_prediction_is_computed_as_written(page: Any) -> None:
    row = next(
        row
        for row in page.read(page.ROWS)
        if row["part"] == "fits" and row["name"] == "sdar-30b" and row["memory_gib"] == 16
    )
    made = page.fit_row(page.forms_of("sdar-30b"), "cuda", 16, load_hardware(page.HARDWARE))
    for name in ("forward_low_s", "forward_likely_s", "forward_high_s", "active_per_layer"):
        assert made[name] == pytest.approx(row[name], rel=0.02)
