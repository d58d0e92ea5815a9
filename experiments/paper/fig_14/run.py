"""Figure 14: prompt length against time to the first token, OLED-MoE and FineMoE.

python -m experiments.paper.fig_14.run
"""

import statistics
from collections.abc import Iterator

from experiments.paper.common import (
    HARDWARE,
    MODELS,
    POLICIES,
    SEEDS,
    Row,
    Table,
    mean_of,
    mixed,
    num_warmup,
    policy_rows,
    run_figure,
    select,
    simulate_row,
    without_warmup,
)
from experiments.paper.paper_numbers import FIG_14
from experiments.paper.sweeps import cell
from oled_moe.trace_stats import TraceRows, activation
from oled_moe.traces import RoutingTrace

FIGURE = "14"
# The paper's lengths are not known to us; these cover its activation.
LENGTHS = (32, 64, 128, 256, 512, 1024)
CAPACITY = 100
# By the paper's names; the LRU is there to see what prefill costs without any policy.
LABELS = ("OLED", "FineMoE", "naive (LRU)")
assert set(LABELS) <= set(POLICIES)
# The same without the CPU's help, in prefill and in the first block alike.
COPIES_ALONE = "OLED, copies alone"


def make_rows(is_quick: bool) -> Iterator[Row]:
    for seed in SEEDS[:1] if is_quick else SEEDS:
        for model in MODELS:
            for length in LENGTHS[:2] if is_quick else LENGTHS:
                trace = mixed(
                    model, seed=seed, num_requests=3, prompt_tokens=length, answer_tokens=16
                )
                share = activation(TraceRows(without_warmup(trace))).prefill_ratio
                labels = {"prompt_tokens": length, "mean_prompt_tokens": mean_prompt(trace)}
                for row in policy_rows(FIGURE, trace, model, CAPACITY, LABELS, **labels):
                    yield row | {"prefill_active_share": share}
                row = simulate_row(
                    FIGURE, trace, POLICIES["OLED"], CAPACITY, HARDWARE[model],
                    options={"has_cpu_experts": False}, label=COPIES_ALONE, model=model, **labels,
                )  # fmt: skip
                yield row | {"prefill_active_share": share}


def mean_prompt(trace: RoutingTrace) -> float:
    """Of the measured requests."""
    measured = trace.requests[num_warmup(trace) :]
    return statistics.fmean(request.num_prompt_tokens for request in measured)


def tables(rows: list[Row]) -> list[Table]:
    lines = []
    shown = (*LABELS, COPIES_ALONE)
    for model in MODELS:
        here = select(rows, model=model)
        for length in sorted({row["prompt_tokens"] for row in here}):
            by = {label: select(here, prompt_tokens=length, label=label) for label in shown}
            oled, finemoe = by["OLED"], by["FineMoE"]
            copies = by[COPIES_ALONE]
            over = mean_of(oled, "ttft_s") / mean_of(finemoe, "ttft_s")
            lines.append(
                (
                    model,
                    str(length),
                    f"{mean_of(oled, 'mean_prompt_tokens'):.0f}",
                    cell(oled, "prefill_active_share", scale=100),
                    *(cell(mine, "ttft_s", scale=1e3, digits=0) for mine in by.values()),
                    f"{over:.2f}",
                    f"{mean_of(copies, 'ttft_s') / mean_of(finemoe, 'ttft_s'):.2f}",
                    f"{cell(oled, 'hit_rate', scale=100)} / "
                    f"{cell(oled, 'expert_cache_utilization', scale=100)}",
                )
            )
    header = (
        "model", "prompt, set", "mean", "active in prefill, %", *(f"TTFT {n}, ms" for n in shown),
        "OLED over FineMoE", "copies alone over it", "OLED, first block: hit rate / utilisation, %",
    )  # fmt: skip
    ours = Table("Mixed prompts at C=100, mean of three seeds.", header, tuple(lines))
    shares, times = FIG_14["active_share"].value, FIG_14["ttft_s"].value
    paper = tuple(
        (
            model,
            " / ".join(f"{100 * share:.2f}" for share in shares[model]),
            " to ".join(f"{1e3 * seconds:.0f}" for seconds in times[model]),
        )
        for model in MODELS
    )
    header = ("model", "active, %, by length", "TTFT, ms, over all lengths and both systems")
    return [ours, Table("What the paper says.", header, paper)]


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
