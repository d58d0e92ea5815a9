"""How much work the measurements of a machine are worth, and what repetitions of one come to."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_MIB = 2**20
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work a measurement is worth.

    `min_working_set_bytes` is read in one go where memory allows. `step_budget_s` ends the
    repetitions of one step early on a slow machine (each is done at least once), `write_budget_s`
    the writing of the scratch file.
    """

    max_working_set_bytes: int
    max_matrix_size: int
    max_scratch_bytes: int
    num_repetitions: int
    num_expert_calls: int
    step_budget_s: float
    write_budget_s: float
    min_working_set_bytes: int = 0


QUICK = Effort(1 * _GIB, 1024, 128 * _MIB, 3, 24, 0.25, 1.5)
FULL = Effort(5 * _GIB, 4096, 1 * _GIB, 9, 200, 2.0, 10.0, 4 * _GIB)


@dataclass(frozen=True, slots=True)
class Figure:
    """Median and extremes of repeated measurements, in the unit of the field that holds it."""

    median: float
    minimum: float
    maximum: float
    num_repetitions: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        return cls(statistics.median(values), min(values), max(values), len(values))
