"""What the cache costs where everything fits: our engine against the same model without it.

Both compute with the same kernel on the same resident weights; without the cache there is no
planning, no table, no lane, no event: rows are sorted by expert and one call computes them. The
same forwards (LLaDA2-mini's shape, random weights, replayed routing) run both ways, in alternating
order, and are compared pair by pair: the median of the ratios and an interval that holds it.

    python benchmarks/overhead.py --output results/raw/overhead.jsonl
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from peers import ArenaExperts
from provenance import provenance

from oled_moe import Engine, EngineConfig
from oled_moe.bench import median_interval
from oled_moe.experts import OffloadedExperts, PendingLayer
from oled_moe.kernels import KERNELS
from oled_moe.random_checkpoint import default_directory, make_random_checkpoint
from oled_moe.replay import Replayer, load_replay
from oled_moe.shapes import find_shape
from oled_moe.store import SlotArena
from oled_moe.types import ForwardContext, ForwardOutcome, Phase


class AlternatingExperts:
    """The cached experts in one forward, plain ones in the next; which begins can be set."""

    def __init__(self, cached: OffloadedExperts, plain: ArenaExperts) -> None:
        self._cached = cached
        self._plain = plain
        self.starts_plain = False
        self.is_plain = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cached, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "routing":
            self._cached.routing = value
        else:
            object.__setattr__(self, name, value)

    def start_forward(self, context: ForwardContext) -> None:
        self.is_plain = (context.forward_id % 2 == 0) == self.starts_plain
        if not self.is_plain:
            self._cached.start_forward(context)

    def start(self, *args: Any) -> PendingLayer:
        return self._plain.start(*args) if self.is_plain else self._cached.start(*args)

    def finish(self, *args: Any) -> torch.Tensor:
        return self._plain.finish(*args) if self.is_plain else self._cached.finish(*args)

    def end_forward(self, outcome: ForwardOutcome) -> None:
        if not self.is_plain:
            self._cached.end_forward(outcome)


def layer_arenas(engine: Engine) -> list[SlotArena]:
    """Each layer's experts as an arena of its own: where everything fits they lie in order."""
    shape, arena = engine.memory_plan.shape, engine.experts.pool.arena
    size = shape.num_experts
    for layer in range(shape.num_layers):
        slots = [engine.cache.slot_of(layer, expert) for expert in range(size)]
        assert slots == list(range(layer * size, (layer + 1) * size))
    return [
        SlotArena(arena.layout, arena.memory[layer * size : (layer + 1) * size])
        for layer in range(shape.num_layers)
    ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    path = make_random_checkpoint(
        find_shape("llada2-mini").config_with(args.moe_layers),
        default_directory() / f"llada2-mini-{args.moe_layers}layers",
    )
    config = EngineConfig(
        device="cpu", policy=args.policy, experts_per_layer=256, max_model_len=1024
    )
    with Engine(path, config) as engine, torch.inference_mode():
        num_wanted = args.warmup + args.forwards
        replay = load_replay(args.replay, engine.memory_plan.shape, num_forwards=num_wanted)
        kernel = KERNELS["cpu"](torch.get_num_threads())
        plain = ArenaExperts(engine.experts, layer_arenas(engine), kernel)
        both = AlternatingExperts(engine.experts, plain)
        engine.model._experts = both  # type: ignore[attr-defined]
        engine._tiers.experts = both  # type: ignore[assignment]
        seconds: dict[bool, dict[int, list[float]]] = {True: {}, False: {}}
        planning_s, total_s = 0.0, 0.0
        for repetition in range(args.repetitions):
            both.starts_plain = repetition % 2 == 1
            done = Replayer(engine, replay.trace).run(num_wanted)
            num_denoise = 0
            for index, each in enumerate(done):
                num_denoise += each.phase == Phase.DENOISE
                if each.phase != Phase.DENOISE or num_denoise <= args.warmup:
                    continue
                is_plain = (index % 2 == 0) == both.starts_plain
                seconds[is_plain].setdefault(index, []).append(each.seconds)
                if not is_plain:
                    planning_s += each.planning_s
                    total_s += each.seconds
    # Least of each forward's repetitions: whatever else ran on the machine only adds time.
    ratios = [
        min(cached) / min(seconds[True][index])
        for index, cached in seconds[False].items()
        if index in seconds[True]
    ]
    interval = median_interval(ratios)
    return {
        "policy": args.policy,
        "shape": "llada2-mini, random weights, routing replayed",
        "moe_layers": args.moe_layers,
        "replay": args.replay,
        "repetitions": args.repetitions,
        "num_pairs": len(ratios),
        "cached_forward_s": statistics.median(min(each) for each in seconds[False].values()),
        "plain_forward_s": statistics.median(min(each) for each in seconds[True].values()),
        "ratio_median": interval.median,
        "ratio_low": interval.low,
        "ratio_high": interval.high,
        "interval_level": interval.level,
        "planning_share": planning_s / total_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moe-layers", type=int, default=5)
    parser.add_argument("--policy", default="oled")
    parser.add_argument("--replay", default="synth:llada2-mini:block=32")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--forwards", type=int, default=30)
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--output", type=Path, help="append one JSON row")
    args = parser.parse_args()
    row = {"benchmark": "overhead", **provenance(), **measure(args)}
    print(json.dumps(row, indent=2))
    if args.output:
        with args.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
