"""What figures 5 and 12 share: every policy of common.POLICIES on one cell, side by side."""

from collections.abc import Iterable, Sequence

from experiments.paper.common import POLICIES, Row, mean_of, ms, percent, select

# Published systems, whose TPOT the paper compares with; naive LRU is its own baseline.
PRIOR = ("KTransformers", "KTransformers (frequency)", "MoE-Infinity", "FineMoE")


def cell_lines(rows: Sequence[Row]) -> Iterable[tuple[str, ...]]:
    """One line per policy of one cell: TPOT, that over the ideal's, utilisation, hit rate."""
    ideal = mean_of(select(rows, label="ideal"), "tpot_s")
    for label in POLICIES:
        here = select(rows, label=label)
        times = [row["tpot_s"] for row in here]
        mean = sum(times) / len(times)
        away = max(abs(time - mean) for time in times)
        yield (
            label,
            ms(mean) + (f" ± {1e3 * away:.1f}" if len(times) > 1 else ""),
            f"{mean / ideal:.2f}",
            percent(mean_of(here, "expert_cache_utilization")),
            percent(mean_of(here, "hit_rate")),
        )


CELL_HEADER = ("policy", "TPOT, ms", "over ideal's", "utilisation, %", "hit rate, %")


def value(rows: Sequence[Row], label: str, name: str) -> float:
    """Mean over a cell's seeds."""
    return mean_of(select(rows, label=label), name)


def span(values: Iterable[float], digits: int = 2, scale: float = 1) -> str:
    found = [scale * each for each in values]
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def bare_tpot(rows: Sequence[Row], label: str) -> float:
    """TPOT less the software time that the profile adds to every layer of every policy alike.

    The layer's own, before its demand is known; copies ahead may run beside it, so that for systems
    which prefetch this is what is left and not what a run without it would take.
    """
    found = []
    for row in select(rows, label=label):
        # All but the prefills, of which each request has one: TPOT is counted from their end.
        num_forwards = row["num_forwards"] - row["num_requests"]
        software_s = row["hardware"]["layer_overhead_s"] * row["trace"]["num_layers"]
        found.append(row["tpot_s"] - num_forwards * software_s / row["num_tokens"])
    return sum(found) / len(found)
