"""What int8 and int4 experts are worth where everything fits: the whole forward against bfloat16.

The same forwards (LLaDA2-mini's shape, block 32, random weights, replayed routing) run with the
experts in each form by turns: attention, shared experts, norms and the head stay bfloat16 and are
part of the time. Quantised experts are all alike and one layer's worth of memory serves all layers,
which no cache can tell from others: a layer's are hundreds of megabytes. `ratio`: least of each
forward's repetitions over the same of bfloat16, the median over forwards.

With few MoE layers the head's share is larger than in the whole model, and the ratio nearer to 1:
`routed_s`, seconds of the routed experts alone, says by how much. 19 layers take 36 GB.

    python benchmarks/quantized.py --output results/raw/quantized.jsonl
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from kernels import quantised_arena
from overhead import layer_arenas
from peers import ArenaExperts
from provenance import provenance

from oled_moe import Engine, EngineConfig
from oled_moe.bench import median_interval
from oled_moe.experts import OffloadedExperts, PendingLayer
from oled_moe.kernels import KERNELS
from oled_moe.kernels.native import native_kernels
from oled_moe.quantization import QuantSpec
from oled_moe.random_checkpoint import default_directory, make_random_checkpoint
from oled_moe.replay import Replayer, load_replay
from oled_moe.shapes import find_shape
from oled_moe.types import ForwardContext, ForwardOutcome, Phase


class TurnsOfForms:
    """Experts of one form in a forward, of the next form in the next; who begins can be set.

    `routed_s`: seconds of the last forward between `start` and the end of `finish`.
    """

    def __init__(self, cached: OffloadedExperts, forms: list[ArenaExperts]) -> None:
        self._cached = cached
        self._forms = forms
        self.first = 0
        self.form = 0
        self.routed_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cached, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "routing":
            self._cached.routing = value
        else:
            object.__setattr__(self, name, value)

    def start_forward(self, context: ForwardContext) -> None:
        self.form = (context.forward_id + self.first) % len(self._forms)
        self.routed_s.append(0.0)

    def start(self, *args: Any) -> PendingLayer:
        return self._timed(self._forms[self.form].start, *args)

    def finish(self, *args: Any) -> torch.Tensor:
        return self._timed(self._forms[self.form].finish, *args)

    def _timed(self, call: Any, *args: Any) -> Any:
        start_s = time.perf_counter()
        result = call(*args)
        self.routed_s[-1] += time.perf_counter() - start_s
        return result

    def end_forward(self, outcome: ForwardOutcome) -> None:
        pass


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    path = make_random_checkpoint(
        find_shape("llada2-mini").config_with(args.moe_layers),
        default_directory() / f"llada2-mini-{args.moe_layers}layers",
    )
    names = ["bf16", *args.forms.split(",")]
    specs = [QuantSpec.parse(name) for name in names[1:]]
    config = EngineConfig(device="cpu", experts_per_layer=256, max_model_len=1024)
    # Least seconds by form and forward, of the whole and of the routed experts.
    least: list[dict[int, tuple[float, float]]] = [{} for _ in names]
    with Engine(path, config) as engine, torch.inference_mode():
        num_wanted = args.warmup + args.forwards
        replay = load_replay(args.replay, engine.memory_plan.shape, num_forwards=num_wanted)
        num_layers = engine.memory_plan.shape.num_layers
        arenas = [layer_arenas(engine)]
        arenas += [[quantised_arena(spec, 256)] * num_layers for spec in specs]
        kernel = KERNELS["cpu"](torch.get_num_threads())
        turns = TurnsOfForms(
            engine.experts, [ArenaExperts(engine.experts, each, kernel) for each in arenas]
        )
        engine.model._experts = turns  # type: ignore[attr-defined]
        engine._tiers.experts = turns  # type: ignore[assignment]
        for repetition in range(args.repetitions * len(names)):
            turns.first, turns.routed_s = repetition, []
            done = Replayer(engine, replay.trace).run(num_wanted)
            num_denoise = 0
            for index, (each, routed_s) in enumerate(zip(done, turns.routed_s, strict=True)):
                num_denoise += each.phase == Phase.DENOISE
                if each.phase == Phase.DENOISE and num_denoise > args.warmup:
                    form = (index + repetition) % len(names)
                    before = least[form].get(index, (float("inf"), 0.0))
                    least[form][index] = min(before, (each.seconds, routed_s))
    rows = []
    for name, times in zip(names, least, strict=True):
        shared = [index for index in times if index in least[0]]
        ratios = [times[index][0] / least[0][index][0] for index in shared]
        routed = [times[index][1] / least[0][index][1] for index in shared]
        interval = median_interval(ratios)
        rows.append(
            {
                "form": name,
                "forward_s": statistics.median(total for total, _ in times.values()),
                "routed_s": statistics.median(routed for _, routed in times.values()),
                "ratio": interval.median,
                "ratio_low": interval.low,
                "ratio_high": interval.high,
                "routed_ratio": statistics.median(routed),
                "num_forwards": len(shared),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moe-layers", type=int, default=5)
    parser.add_argument("--forms", default="int8,int4", help="such as int8-g128,int4-g64-asym")
    parser.add_argument("--replay", default="synth:llada2-mini:block=32")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--forwards", type=int, default=30)
    parser.add_argument("--repetitions", type=int, default=4, help="of each form")
    parser.add_argument("--output", type=Path, help="append one JSON row per form")
    args = parser.parse_args()
    native = native_kernels()
    base = {
        "benchmark": "quantized",
        "shape": "llada2-mini, random weights, routing replayed",
        "moe_layers": args.moe_layers,
        "replay": args.replay,
        "repetitions": args.repetitions,
        "isa": None if native is None else native.isa,
        "threads": torch.get_num_threads(),
        **provenance(),
    }
    for row in measure(args):
        print(json.dumps(row))
        if args.output:
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(base | row) + "\n")


if __name__ == "__main__":
    main()
