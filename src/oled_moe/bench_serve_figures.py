"""What a load on a server came to: one plain dict under the names that vLLM and SGLang use.

What a server does not tell is None, never a guess. Lists keep the order of the prompts.
"""

import math
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import numpy as np

from oled_moe.bench_serve import Outcome, Samples, ServeRun
from oled_moe.environment import git_revision

# Name in the output, what of an outcome it is. Units there: milliseconds.
TIMES: dict[str, Callable[[Outcome], Sequence[float]]] = {
    "ttft": lambda each: each.chunk_s[:1],
    "tpot": lambda each: _maybe(tpot_s(each)),
    "itl": lambda each: _gaps(each.chunk_s),
    "e2el": lambda each: [each.end_s],
    "tpot_after_first_block": lambda each: _maybe(tpot_after_first_block_s(each)),
    "time_to_first_block": lambda each: each.block_end_s[:1],
    "time_to_first_frame": lambda each: each.frame_s[:1],
    "inter_block_latency": lambda each: _gaps(each.block_end_s),
}
PERCENTILES = (50, 90, 95, 99)
# Above this many tokens in one piece of text the gaps between pieces say nothing about tokens.
_MOST_TOKENS_PER_CHUNK = 1.5
NOTES = {
    "tpot": "(end to end - TTFT) / (tokens - 1), as vLLM has it; an answer that came in one piece "
    "(single_chunk_answers) has next to none, which says nothing about its speed",
    "tpot_after_first_block": "(last text - end of the first block) / (tokens - those of the first "
    "block); only answers of several blocks have one",
    "itl": "time between two pieces of text; where a piece is a block or a part of one, this is no "
    "time between tokens (is_itl_degenerate)",
    "nfe": "forwards that answers took part in, counted for each answer; several may share one",
    "canvas_tokens": "positions computed, those behind the end of an answer too; output tokens are "
    "the useful ones",
    "server": "what the server counted between start and end of the run, for whomever",
}


def tpot_s(outcome: Outcome) -> float | None:
    """vLLM's time per output token. Units: seconds."""
    if not outcome.chunk_s or outcome.output_tokens is None or outcome.output_tokens < 2:
        return None
    return (outcome.end_s - outcome.chunk_s[0]) / (outcome.output_tokens - 1)


def tpot_after_first_block_s(outcome: Outcome) -> float | None:
    """Time per token behind the first block. Units: seconds."""
    if len(outcome.block_end_s) < 2 or outcome.output_tokens is None:
        return None
    num_tokens = outcome.output_tokens - outcome.block_tokens[0]
    if num_tokens < 1:
        return None
    return (outcome.chunk_s[-1] - outcome.block_end_s[0]) / num_tokens


def serve_figures(run: ServeRun) -> dict[str, Any]:
    """Everything that `bench-serve --json` promises but the environment."""
    load, done = run.load, [each for each in run.outcomes if each.is_ok]
    errors = [each.error for each in run.outcomes]
    return {
        "endpoint_type": f"openai-{load.endpoint}",
        "url": load.url,
        "model_id": run.model,
        "is_oled_moe": run.is_ours,
        "num_prompts": len(load.prompts),
        "request_rate": "inf" if load.request_rate == math.inf else load.request_rate,
        "max_concurrency": load.max_concurrency,
        "num_warmups": load.num_warmups,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "ignore_eos": load.ignores_eos,
        "seed": load.seed,
        "completed": len(done),
        "failed": len(errors) - len(done),
        "failure_reasons": dict(Counter(error for error in errors if error)),
        "duration": run.duration_s,
        **_rates(done, run.duration_s),
        **_diffusion(done, run.duration_s),
        **_chunks(done),
        **{key: value for name in TIMES for key, value in _spread(name, done).items()},
        "server": _server(run.before, run.after),
        **_arrays(run.outcomes),
        "notes": NOTES,
    }


def environment() -> dict[str, Any]:
    """Where the client ran. The server may be another machine."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "versions": {name: version(name) for name in ("oled-moe", "httpx2", "numpy")},
        },
    }


def _rates(done: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    num_in = _total([each.prompt_tokens for each in done])
    num_out = _total([each.output_tokens for each in done])
    num_all = None if num_in is None or num_out is None else num_in + num_out
    return {
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(done) / duration_s,
        "output_throughput": _per(num_out, duration_s),
        "total_token_throughput": _per(num_all, duration_s),
    }


def _diffusion(done: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """Forwards and positions, where the server tells of them."""

    def total(name: str) -> Any:
        return _total([(each.diffusion or {}).get(name) for each in done])

    num_out, nfe = _total([each.output_tokens for each in done]), total("nfe")
    canvas = _total([each.canvas_tokens for each in done])
    return {
        "nfe": nfe,
        "tpf": _per(num_out, nfe),
        "fps": _per(nfe, duration_s),
        "tps": _per(num_out, duration_s),
        "blocks": total("blocks"),
        "edited_tokens": total("edited_tokens"),
        "useful_tokens": num_out,
        "useful_token_throughput": _per(num_out, duration_s),
        "canvas_tokens": canvas,
        "canvas_token_throughput": _per(canvas, duration_s),
        "useful_share": _per(num_out, canvas),
    }


def _chunks(done: Sequence[Outcome]) -> dict[str, Any]:
    """Whether gaps between pieces of text say anything about tokens."""
    num_out = _total([each.output_tokens for each in done])
    num_chunks = sum(len(each.chunk_s) for each in done)
    per_chunk = _per(num_out, num_chunks)
    return {
        "tokens_per_chunk": per_chunk,
        "is_itl_degenerate": None if per_chunk is None else per_chunk > _MOST_TOKENS_PER_CHUNK,
        "single_chunk_answers": sum(len(each.chunk_s) == 1 for each in done),
    }


def _spread(name: str, done: Sequence[Outcome]) -> dict[str, float | None]:
    """mean_NAME_ms and its like over all completed requests; None where there is no value."""
    values_ms = [1e3 * value for each in done for value in TIMES[name](each)]
    statistics: dict[str, Callable[[Any], Any]] = {
        "mean": np.mean, "median": np.median, "std": np.std, "min": np.min, "max": np.max,
    }  # fmt: skip
    spread = {
        f"{label}_{name}_ms": float(of(values_ms)) if values_ms else None
        for label, of in statistics.items()
    }
    for percentile in PERCENTILES:
        value = float(np.percentile(values_ms, percentile)) if values_ms else None
        spread[f"p{percentile}_{name}_ms"] = value
    return spread


def _arrays(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One entry a request, failed ones included. Units: seconds."""
    return {
        "start_times": [each.start_s for each in outcomes],
        "input_lens": [each.prompt_tokens for each in outcomes],
        "output_lens": [each.output_tokens for each in outcomes],
        "ttfts": [each.chunk_s[0] if each.chunk_s else None for each in outcomes],
        "itls": [_gaps(each.chunk_s) for each in outcomes],
        "e2els": [each.end_s for each in outcomes],
        "block_ends": [each.block_end_s for each in outcomes],
        "finish_reasons": [each.finish_reason for each in outcomes],
        "generated_texts": [each.text for each in outcomes],
        "diffusion": [each.diffusion for each in outcomes],
        "errors": [each.error for each in outcomes],
    }


def _server(before: Samples | None, after: Samples | None) -> dict[str, Any] | None:
    """What our server counted in between, and the memory it held at the end."""
    if before is None or after is None:
        return None

    def grown(name: str) -> dict[tuple[tuple[str, str], ...], float]:
        return {
            labels: value - before.get((sample, labels), 0.0)
            for (sample, labels), value in after.items()
            if sample == f"oled_moe:{name}"
        }

    hits, misses = (sum(grown(f"expert_cache_{n}_total").values()) for n in ("hits", "misses"))
    num_bytes = grown("expert_bytes_total")
    return {
        "expert_hit_rate": _per(hits, hits + misses),
        "denoise_steps": sum(grown("denoise_steps_total").values()),
        "expert_bytes": {_route(dict(labels)): value for labels, value in num_bytes.items()},
        "tier_bytes": {
            dict(labels).get("tier", ""): value
            for (sample, labels), value in after.items()
            if sample == "oled_moe:tier_bytes"
        },
    }


def _route(labels: Mapping[str, str]) -> str:
    return f"{labels.get('src', '')}->{labels.get('dst', '')}"


def _total(values: Sequence[Any]) -> Any:
    """The sum, or None where anything is unknown or nothing is there."""
    if not values or any(value is None for value in values):
        return None
    return sum(values)


def _per(amount: float | None, of: float | None) -> float | None:
    return None if amount is None or not of else amount / of


def _gaps(times_s: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(times_s, times_s[1:], strict=False)]


def _maybe(value: float | None) -> list[float]:
    return [] if value is None else [value]
