"""Figure 16b: block length against cache size.

python -m experiments.paper.fig_16b.run
"""

from collections.abc import Iterator

from experiments.paper.common import (
    HARDWARE,
    MODELS,
    Row,
    Table,
    percent,
    run_figure,
    select,
    simulate_row,
    without_warmup,
)
from experiments.paper.sweeps import ANSWER_TOKENS, short_mixed
from oled_moe.trace_stats import TraceRows, activation
from oled_moe.types import Phase

FIGURE = "16b"
LENGTHS = (1, 2, 4, 8, 16, 32, 64)
SIZES = (10, 20, 40, 80, 120, 160, 200)
POLICY = "oled"
# Steps of these are set against a step of the paper's default.
BASE, COMPARED = 16, (1, 4, 32, 64)


def make_rows(is_quick: bool) -> Iterator[Row]:
    for model in MODELS:
        for length in LENGTHS:
            size = 16 if is_quick else ANSWER_TOKENS
            trace = short_mixed(model, 0, block_length=length, answer_tokens=size)
            measured = without_warmup(trace)
            steps = int((measured.row_phase == Phase.DENOISE).sum())
            tokens = sum(request.num_generated_tokens for request in measured.requests)
            found = {
                "active": activation(TraceRows(measured)).mean,
                "tokens_per_step": tokens / steps,
            }
            for capacity in SIZES:
                row = simulate_row(
                    FIGURE, trace, POLICY, capacity, HARDWARE[model], model=model,
                    block_length=length,
                )  # fmt: skip
                yield row | found


def best(rows: list[Row], model: str, capacity: int) -> int:
    """The block length at which a token takes least time."""
    here = select(rows, model=model, capacity=capacity)
    return int(min(here, key=lambda row: row["tpot_s"])["block_length"])


def tables(rows: list[Row]) -> list[Table]:
    return [_times(rows, model) for model in MODELS] + [_steps(rows), _traces(rows)]


def _times(rows: list[Row], model: str) -> Table:
    lines = []
    for capacity in SIZES:
        texts = []
        for length in LENGTHS:
            row = select(rows, model=model, capacity=capacity, block_length=length)[0]
            mark = "**" if length == best(rows, model, capacity) else ""
            texts.append(f"{mark}{1e3 * row['tpot_s']:.0f}{mark}")
        lines.append((str(capacity), *texts))
    header = ("C", *(f"B={length}" for length in LENGTHS))
    return Table(
        f"TPOT of oled on {model}, ms, by block length; best in bold.", header, tuple(lines)
    )


def _steps(rows: list[Row]) -> Table:
    lines = []
    for capacity in SIZES:
        texts = []
        for model in MODELS:
            here = select(rows, model=model, capacity=capacity)
            base = select(here, block_length=BASE)[0]["forward_s"]
            for length in COMPARED:
                step = select(here, block_length=length)[0]["forward_s"]
                texts.append(f"{step / base:.2f}")
        lines.append((str(capacity), *texts))
    header = ("C", *(f"{model}, B={length}" for model in MODELS for length in COMPARED))
    title = (
        f"Time of a step over a block of {BASE}'s: how many times its tokens a step of another"
        " length must yield to pay."
    )
    return Table(title, header, tuple(lines))


def _traces(rows: list[Row]) -> Table:
    lines = []
    for length in LENGTHS:
        texts = []
        for model in MODELS:
            here = select(rows, model=model, block_length=length)
            at_40, at_120 = (select(here, capacity=size)[0] for size in (40, 120))
            texts += [
                f"{here[0]['active']:.0f}",
                " / ".join(percent(row["hit_rate"]) for row in (at_40, at_120)),
                " / ".join(percent(row["expert_cache_utilization"]) for row in (at_40, at_120)),
            ]
        mini = select(rows, model="mini", block_length=length)[0]
        lines.append((str(length), f"{mini['tokens_per_step']:.2f}", *texts))
    header = (
        "B", "tokens a step (generator)",
        *(f"{model}: {what}" for model in MODELS
          for what in ("active", "hit rate C=40 / 120, %", "utilisation C=40 / 120, %")),
    )  # fmt: skip
    return Table("What the traces are like.", header, tuple(lines))


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
