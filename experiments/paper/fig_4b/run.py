"""Figure 4b: work of a block of 16 against one token's.

python -m experiments.paper.fig_4b.run
"""

from collections.abc import Iterator

from experiments.paper.common import DEMO_FAMILIES, WORKLOADS, Row, Table, run_figure, select
from experiments.paper.fig_4a.run import rows_of
from experiments.paper.paper_numbers import FIG_4B

FIGURE = "4b"


def make_rows(is_quick: bool) -> Iterator[Row]:
    for row in rows_of(FIGURE, is_quick):
        experts_flops = 2 * row["trace"]["expert_bytes"] / 2 * row["trace"]["top_k"]
        yield row | {
            "token_flops": experts_flops,
            "block_flops": experts_flops * row["flops_over_one_token"],
        }


def tables(rows: list[Row]) -> list[Table]:
    lines = []
    for kind, names in (("synthetic", tuple(WORKLOADS)), ("demo", DEMO_FAMILIES)):
        for name in names:
            row = select(rows, kind=kind, workload=name)[0]
            is_mini = kind == "synthetic"
            lines.append(
                (
                    f"{name}, {'synthetic mini' if is_mini else 'demo'}",
                    f"{row['flops_over_one_token']:.1f}",
                    f"{FIG_4B['flops_over_one_token'].value:.0f}" if is_mini else "-",
                    f"{row['block_flops'] / 1e6:.2f}",
                    f"{FIG_4B['block_flops'].value / 1e6:.2f}" if is_mini else "-",
                )
            )
    header = ("requests", "over one token's", "paper", "block, MFLOPs a layer", "paper")
    title = "Work of a block's routed experts, 2 FLOPs per weight and token."
    return [Table(title, header, tuple(lines))]


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
