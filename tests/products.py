"""Products of cases, of which the default run takes a part and `--full` takes all.

The rule: the longest axis is gone through once, and the number of the value there, modulo the
length of each other axis, says which value of that goes with it. So every value of every axis
occurs, those of the shorter axes about equally often and, where lengths differ, in changing
company. All other cells are marked `full`, as are single cases that a test sets aside itself;
conftest.py leaves them out. Where a test goes through a long list, the axis says where it starts
and its length how far it steps. Examples that are drawn know no cells: `--full` draws
FULL_EXAMPLES times as many.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

FULL_EXAMPLES = 4


def num_examples(by_default: int) -> int:
    """How many examples a test draws in this run, whose profile conftest.py chose."""
    return by_default * settings.default.max_examples // settings.get_profile("part").max_examples


def product(*axes: Sequence[Any]) -> list[Any]:
    """All cells, as values for `parametrize`, those beyond the default run marked `full`."""
    longest = max(range(len(axes)), key=lambda axis: len(axes[axis]))
    cells = []
    for cell in itertools.product(*(range(len(values)) for values in axes)):
        pairs = list(zip(axes, cell, strict=True))
        is_default = all(index == cell[longest] % len(values) for values, index in pairs)
        marks = () if is_default else pytest.mark.full
        cells.append(pytest.param(*(values[index] for values, index in pairs), marks=marks))
    return cells
