"""How fast the CPU reads weights while it computes, beside a plain read of the same memory.

One call in turn of a plain read, of native code and of torch, over memory of more than 1 GiB, so
that nothing is found in a cache and whatever disturbs the machine disturbs all three. Experts have
the shape of LLaDA2-mini (16 in a call), `qkv` and `head` are its dense matrices; all in bfloat16.
`int8` and `int4` are the same experts quantised, beside the same calls of bfloat16 ones in place of
torch: `time_ratio` is the median of the ratios of neighbouring calls.
Rates are bytes of weights per second; `share_of_read` is the median of the ratios of neighbouring
calls. The table of kernels/cpu.py is made from such rows.

    python benchmarks/kernels.py [--part experts|int8|int4|qkv|head] [--threads 1,2] [--output FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from provenance import provenance
from torch import Tensor

from oled_moe.kernels.cpu import CpuExpertKernel
from oled_moe.kernels.native import NativeKernels
from oled_moe.quantization import DEFAULT_SPECS, QuantSpec, default_spec, quantize
from oled_moe.store import ExpertLayout, SlotArena

HIDDEN, WIDTH = 2048, 512
MATRICES = {"qkv": (3072, HIDDEN), "head": (157184, HIDDEN)}
# Two heads' worth of memory.
NUM_SLOTS = 206
GROUP = 16
ROWS = {
    "experts": (1, 2, 4, 8, 16, 24, 32, 64, 96, 128),
    "int8": (1, 2, 4, 8, 16, 32),
    "int4": (1, 2, 4, 8, 16, 32),
    "qkv": (1, 2, 4, 8, 16, 24, 32),
    "head": (1, 8, 16, 32),
}
NUM_REPETITIONS = {"experts": 15, "int8": 15, "int4": 15, "qkv": 15, "head": 5}

Call = Callable[[], None]


def cycle(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def expert_calls(
    arena: SlotArena, native: NativeKernels, num_rows: int, threads: int
) -> tuple[int, dict[str, Call]]:
    """Bytes of weights in a call, and the calls: one group of experts after another."""
    rows_ND = torch.randn(GROUP * num_rows, HIDDEN).to(torch.bfloat16)
    out_ND, starts = torch.empty_like(rows_ND), np.arange(GROUP) * num_rows
    groups = cycle(len(arena) // GROUP)

    def next_slots() -> np.ndarray:
        return np.arange(GROUP) + next(groups) * GROUP

    def run(kernel: Callable[..., None], *more: int) -> None:
        kernel(arena, rows_ND, out_ND, next_slots(), starts, starts + num_rows, *more)

    through_torch = CpuExpertKernel(native=None)
    memory = arena.memory[: len(arena) // GROUP * GROUP].view(-1, GROUP * arena.layout.slot_bytes)
    return GROUP * arena.layout.weight_bytes, {
        "read": lambda: native.read(memory[next(groups)], threads),
        "native": lambda: run(native.experts, threads),
        "torch": lambda: run(through_torch),
    }


def quantised_arena(spec: QuantSpec, num_slots: int) -> SlotArena:
    """Experts that are all alike."""
    layout = ExpertLayout(HIDDEN, WIDTH, torch.bfloat16, quant=spec)
    arena = SlotArena.empty(layout, num_slots)
    for index, packed in enumerate(layout.packed_views(arena.slot(0))):
        shape = (HIDDEN, WIDTH) if index == 2 else (WIDTH, HIDDEN)
        packed.copy_(quantize(torch.randn(shape) / 45, spec))
    arena.memory[1:] = arena.memory[0]
    return arena


def quantised_calls(
    arena: SlotArena, plain: SlotArena, native: NativeKernels, num_rows: int, threads: int
) -> tuple[int, dict[str, Call]]:
    """The same experts in two forms."""
    num_bytes, calls = expert_calls(arena, native, num_rows, threads)
    _, others = expert_calls(plain, native, num_rows, threads)
    return num_bytes, {"read": calls["read"], "native": calls["native"], "bf16": others["native"]}


def matrix_calls(
    arena: SlotArena, native: NativeKernels, shape: tuple[int, int], num_rows: int, threads: int
) -> tuple[int, dict[str, Call]]:
    """The same for one matrix after another."""
    memory = arena.memory.view(-1).view(torch.bfloat16)
    count = memory.numel() // (shape[0] * shape[1])
    matrices: list[Tensor] = list(memory[: count * shape[0] * shape[1]].view(count, *shape))
    # Short calls in one measurement, or the clock and the waking of threads are what is measured.
    num_calls = min(8, count // 2)
    x = torch.randn(num_rows, shape[1]).to(torch.bfloat16)
    out = torch.empty(num_rows, shape[0], dtype=torch.float32 if count < 8 else torch.bfloat16)
    places = cycle(count)

    def repeat(call: Callable[[Tensor], object]) -> None:
        for _ in range(num_calls):
            call(matrices[next(places)])

    return num_calls * matrices[0].nbytes, {
        "read": lambda: repeat(lambda matrix: native.read(matrix, threads)),
        "native": lambda: repeat(lambda matrix: native.linear(x, matrix, None, out, threads)),
        "torch": lambda: repeat(lambda matrix: F.linear(x, matrix).to(out.dtype)),
    }


def measure(num_bytes: int, calls: dict[str, Call], num_repetitions: int) -> dict[str, object]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(num_repetitions + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            # The first warms up.
            if repetition:
                times[name].append(time.perf_counter() - start)
    row: dict[str, object] = {"num_repetitions": num_repetitions}
    for name, seconds in times.items():
        row[f"{name}_gb_per_s"] = round(num_bytes / statistics.median(seconds) / 1e9, 1)
        row[f"{name}_best_gb_per_s"] = round(num_bytes / min(seconds) / 1e9, 1)
    ratios = [read / native for read, native in zip(times["read"], times["native"], strict=True)]
    row["share_of_read"] = round(statistics.median(ratios), 3)
    if "bf16" in times:
        ratios = [own / bf16 for own, bf16 in zip(times["native"], times["bf16"], strict=True)]
        row["time_ratio"] = round(statistics.median(ratios), 3)
        row["time_ratio_of_best"] = round(min(times["native"]) / min(times["bf16"]), 3)
        # Its bytes are others.
        del row["bf16_gb_per_s"], row["bf16_best_gb_per_s"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=ROWS, action="append", help="only this; may be repeated")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--isa", help="avx512-bf16, avx2 or generic; default: the best here")
    parser.add_argument("--rows", help="other numbers of rows, as 1,2,4")
    parser.add_argument("--output", type=Path, help="file to append the rows to, as JSON lines")
    options = parser.parse_args()
    native = NativeKernels(options.isa)
    arena = SlotArena.empty(ExpertLayout(HIDDEN, WIDTH, torch.bfloat16), NUM_SLOTS)
    # A pattern of bits that is a small number.
    arena.memory.view(-1).view(torch.int16).fill_(0x3C00)
    base = provenance()
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        for part in options.part or ROWS:
            form = default_spec(part) if part in DEFAULT_SPECS else None
            quantised = None if form is None else quantised_arena(form, 2 * NUM_SLOTS)
            rows = tuple(map(int, options.rows.split(","))) if options.rows else ROWS[part]
            for num_rows in rows:
                if quantised is not None:
                    num_bytes, calls = quantised_calls(quantised, arena, native, num_rows, threads)
                elif part == "experts":
                    num_bytes, calls = expert_calls(arena, native, num_rows, threads)
                else:
                    num_bytes, calls = matrix_calls(
                        arena, native, MATRICES[part], num_rows, threads
                    )
                row = {
                    "benchmark": "kernels",
                    "part": part,
                    "isa": native.isa,
                    "threads": threads,
                    "num_rows": num_rows,
                    "form": "bf16" if form is None else str(form),
                }
                with torch.inference_mode():
                    row |= measure(num_bytes, calls, NUM_REPETITIONS[part])
                line = json.dumps(row | base)
                print(line, flush=True)
                if options.output is not None:
                    with options.output.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
