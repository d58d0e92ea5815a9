"""What figures 14 to 18 share: short mixed traces, and means over their seeds.

The sweeps have many cells, so their requests are shorter than the paper's 1024 tokens: what a
cache does settles within a few blocks, and requests end more often than in the paper.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.paper.common import Row, mixed, select
from oled_moe.traces import RoutingTrace

# One request of each workload is measured per seed, after one of each to warm up.
NUM_REQUESTS = 3
ANSWER_TOKENS = 64


def short_mixed(model: str, seed: int, **changes: Any) -> RoutingTrace:
    """The mixed workload, three requests to warm up and three measured."""
    options: dict[str, Any] = {"num_requests": NUM_REQUESTS, "answer_tokens": ANSWER_TOKENS}
    return mixed(model, seed=seed, **(options | changes))


def over_seeds(values: Sequence[float], *, scale: float = 1.0, digits: int = 1) -> str:
    """Mean, and how far the seeds lie from it at most."""
    mean = statistics.fmean(values)
    text = f"{scale * mean:.{digits}f}"
    if len(values) == 1:
        return text
    away = max(abs(value - mean) for value in values)
    return f"{text} ± {scale * away:.{digits}f}"


def cell(rows: Sequence[Row], name: str, *, scale: float = 1.0, digits: int = 1) -> str:
    """One number of all rows, which differ by seed alone."""
    return over_seeds([row[name] for row in rows], scale=scale, digits=digits)


def changes(rows: Sequence[Row], base: Sequence[Row], name: str = "tpot_s") -> list[float]:
    """What each row has more than the base row of the same seed, as a share of it."""
    return [row[name] / select(base, seed=row["seed"])[0][name] - 1 for row in rows]


def signed(value: float, digits: int = 1) -> str:
    """A share as a percentage with its sign."""
    return f"{100 * value:+.{digits}f}"
