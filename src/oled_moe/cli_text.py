"""What the command line says: values turned into rows of words and numbers. Prints nothing."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oled_moe.config import (
    RANDOM_ALGORITHMS,
    DecodingParams,
    block_routing_words,
    format_size,
    looks_at,
)

if TYPE_CHECKING:
    from oled_moe.engine import Engine, GenerationResult
    from oled_moe.inspection import CheckpointSummary

Rows = list[tuple[str, str]]
# What a loop goes by, where it looks at it.
_NAMED_FIELDS = (
    "threshold",
    "edit_threshold",
    "low_threshold",
    "factor",
    "eb_threshold",
    "eb_gamma",
)
_COPIES = {"cpu": "disk to RAM", "cuda": "pinned RAM to GPU"}


def seconds(value: float) -> str:
    """With three or four digits and the unit that suits."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def count(number: int, what: str) -> str:
    """`1 file`, `3 files`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def device_name(device: str) -> str:
    """An emulated device is called that wherever it is named."""
    return "emulated (a device simulated on this CPU)" if device == "emulated" else device


def plan_rows(model: str, engine: "Engine", decoding: DecodingParams) -> Rows:
    """Everything that decides how an answer is made."""

    config, plan = engine.config, engine.memory_plan
    experts = (
        f"{count(plan.num_slots, 'slot')} and {plan.num_staging} staging for "
        f"{plan.shape.num_experts_total} experts, {plan.shape.num_layers} MoE layers of "
        f"{plan.shape.num_experts}, top {plan.shape.top_k}"
    )
    gpu = engine.gpu_plan
    has_host_experts = config.device == "emulated" or (gpu is not None and gpu.num_pinned > 0)
    runs_on_cpu = config.cpu_experts and has_host_experts and not plan.holds_all_experts
    rows = [
        ("model", f"{model}, {engine.dtype_words}"),
        ("device", device_name(config.device)),
        ("threads", str(engine.num_threads)),
        ("policy", engine.policy.name),
        ("experts", experts),
        ("CPU experts", "on" if runs_on_cpu else "off"),
        ("hardware", f"{engine.hardware.name} ({engine.hardware_source})"),
        ("decoding", _decoding_words(decoding)),
    ]
    capacity = engine.model_config.decoding.expert_capacity
    if capacity is not None:
        rows.append(("block routing", block_routing_words(capacity, plan.shape.num_experts)))
    if engine.lossy is not None:
        words = f"{config.lossy}: {engine.lossy.words}, answers are not the model's own"
        if engine.lossy.depends_on_cache:
            words += " and depend on what is in memory"
        rows.append(("lossy", words))
    if engine.low_form is not None:
        unused = "" if plan.low else "; all experts fit in full, so none is taken from there"
        rows.append(("low precision", f"{config.low_precision}, {engine.low_form}{unused}"))
    if gpu is None:
        return rows + memory_rows(plan.lines())
    return rows + memory_rows(gpu.gpu_lines()) + memory_rows(gpu.ram_lines())


def _decoding_words(decoding: DecodingParams) -> str:
    """The loop that makes an answer, and what it goes by."""
    answer = f"at most {decoding.max_tokens} tokens"
    if decoding.algorithm in RANDOM_ALGORITHMS:
        heat = "the likeliest tokens"
        if not decoding.is_greedy:
            first, last = (decoding.temperature * t for t in (decoding.t_max, decoding.t_min))
            heat = f"temperature {first:g} falling to {last:g}"
        return (
            f"{decoding.algorithm}, canvases of {decoding.block_length} tokens in at most "
            f"{count(decoding.steps, 'step')}, entropy bound {decoding.eb_threshold:g}, {heat}, "
            f"{answer}"
        )
    loop = f"{decoding.algorithm}, block length {decoding.block_length}"
    for name in _NAMED_FIELDS:
        value, has_grammar = getattr(decoding, name), decoding.grammar is not None
        if value is not None and looks_at(decoding.algorithm, name, has_grammar=has_grammar):
            loop += f", {name.replace('_', ' ')} {value:g}"
    if decoding.canvas_cache != "none":
        loop += f", canvas cache {decoding.canvas_cache} (approximate)"
    if decoding.cont_weight:
        loop += f", smoothing up to {decoding.cont_weight:g} (approximate)"
    return f"{loop}, temperature {decoding.temperature:g}, {answer}"


def memory_rows(lines: Sequence[tuple[str, int]]) -> Rows:
    """The memory plan, sizes at one edge."""
    sizes = [format_size(size) for _, size in lines]
    width = max(map(len, sizes))
    return [
        ("memory" if not i else "", f"{size:>{width}}  {what}")
        for i, ((what, _), size) in enumerate(zip(lines, sizes, strict=True))
    ]


def stats_rows(engine: "Engine", result: "GenerationResult") -> Rows:
    """What one answer took."""
    stats = result.stats
    is_emulated = engine.config.device == "emulated"
    speed = (
        f"first token after {seconds(stats.ttft_s)}; "
        f"{seconds(stats.tpot_s)} per token from the end of prefill on"
    )
    rows = [
        ("answer", f"{count(len(result.token_ids), 'token')}, ended by {result.finish_reason}"),
        ("speed", speed + (" (emulated device)" if is_emulated else "")),
        (
            "forwards",
            f"{stats.num_prefill_forwards} prefill, {stats.num_denoise_forwards} denoising, "
            f"{stats.num_commit_forwards} commit; {stats.tokens_per_forward:.2f} tokens per "
            "forward",
        ),
        (
            "experts",
            f"hit rate {percent(stats.hit_rate)}, utilisation "
            f"{percent(stats.expert_cache_utilization)}, {stats.expert_loads} loads "
            f"({format_size(stats.bytes_loaded)}), {stats.cpu_expert_runs} run on the CPU",
        ),
        (
            "memory",
            f"{stats.max_resident_experts} experts held at most, "
            f"{format_size(stats.expert_memory_bytes)} of slots",
        ),
        ("policy", f"deciding took {percent(stats.policy_overhead)} of the time"),
    ]
    if engine.lossy is not None:
        rows.append(
            (
                "lossy",
                f"{engine.lossy.spec}: {stats.choices_replaced} expert choices replaced "
                f"({percent(stats.replaced_share)}, {percent(stats.replaced_weight_share)} of "
                "their weight)",
            )
        )
    if engine.low_form is not None:
        rows.append(
            (
                engine.low_form,
                f"{stats.low_expert_runs} experts run in it, {stats.low_expert_loads} of the loads "
                f"({format_size(stats.low_bytes_loaded)})",
            )
        )
    return rows


def comparison_rows(
    offloaded: Mapping[str, Any], resident: Mapping[str, Any], num_experts: int
) -> list[tuple[str, str, str]]:
    """Statistics of the two runs of the demo, side by side."""

    def row(label: str, say: Any) -> tuple[str, str, str]:
        return label, say(offloaded), say(resident)

    return [
        row("expert memory", lambda s: format_size(s["expert_memory_bytes"])),
        row("experts held at most", lambda s: f"{s['max_resident_experts']} of {num_experts}"),
        row("hit rate", lambda s: percent(s["hit_rate"])),
        row("utilisation", lambda s: percent(s["expert_cache_utilization"])),
        row("expert loads", lambda s: str(s["expert_loads"])),
        row("bytes loaded", lambda s: format_size(s["bytes_loaded"])),
        row("denoising forwards", lambda s: str(s["num_denoise_forwards"])),
        row("commit forwards", lambda s: str(s["num_commit_forwards"])),
        row("tokens per forward", lambda s: f"{s['tokens_per_forward']:.2f}"),
        row("first token after", lambda s: seconds(s["ttft_s"])),
        row("time per token", lambda s: seconds(s["tpot_s"])),
        row("time spent deciding", lambda s: percent(s["policy_overhead"])),
    ]


def checkpoint_rows(summary: "CheckpointSummary", num_verified: int | None = None) -> Rows:
    """What `inspect` says. `num_verified`: bytes of a pack that are as they were packed."""
    stored = ", ".join(f"{name} {format_size(size)}" for name, size in summary.dtypes.items())
    total_bytes = summary.routed_bytes + summary.rest_bytes
    num_rest = summary.num_parameters - summary.num_routed_parameters
    rows = [
        ("path", str(summary.path)),
        ("family", summary.family),
        ("layers", f"{summary.num_layers}, of which {summary.num_moe_layers} with experts"),
        (
            "experts",
            f"{summary.num_experts} per layer, top {summary.top_k}; "
            f"{summary.num_experts_total} in all",
        ),
        (
            "sizes",
            f"hidden {summary.hidden_size}, expert {summary.moe_intermediate_size}, vocabulary "
            f"{summary.vocab_size}, at most {summary.max_positions} positions",
        ),
        ("stored as", stored),
        *([("quantised", f"{summary.encoding}; read as bfloat16")] if summary.encoding else []),
        ("parameters", f"{number(summary.num_parameters)}, {format_size(total_bytes)}"),
        (
            "  experts",
            f"{number(summary.num_routed_parameters)}, {format_size(summary.routed_bytes)} "
            f"({percent(summary.routed_bytes / total_bytes)})",
        ),
        ("  the rest", f"{number(num_rest)}, {format_size(summary.rest_bytes)}"),
        ("one expert", f"{format_size(summary.expert_bytes)}, {summary.expert_dtype}"),
        ("K/V cache", f"{format_size(summary.kv_bytes_per_token)} per token"),
        ("files", f"{summary.num_files}: {summary.convention}"),
        *([("checked", _checked(num_verified))] if summary.is_pack else []),
        ("tokenizer", "yes" if summary.has_tokenizer else "no: prompts must be token ids"),
        ("chat template", "yes" if summary.has_chat_template else "no"),
        ("defaults", _defaults(summary.sampling_defaults)),
    ]
    if summary.expert_capacity is not None:
        words = block_routing_words(summary.expert_capacity, summary.num_experts)
        rows.append(("block routing", words))
    if summary.num_unused_tensors:
        rows.append(("unused", count(summary.num_unused_tensors, "tensor")))
    return rows


def _checked(num_verified: int | None) -> str:
    if num_verified is None:
        return "small files and headers are as they were packed; weights were not read"
    return f"all {format_size(num_verified)} of weights and every other file are as packed"


def _defaults(values: Mapping[str, Any]) -> str:
    given = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
    return given or "none of its own: block length 32, threshold 0.95"


def number(value: int) -> str:
    """`7.9 million`, `16.3 billion`."""
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:,}"


def machine_rows(facts: Mapping[str, Any]) -> Rows:
    """Cores, memory and instruction sets."""
    quota = facts["cpu_quota_cores"]
    limit = facts["memory_limit_bytes"]
    return [
        ("CPU", facts["cpu_model"] or "unknown"),
        (
            "cores",
            f"{facts['usable_cores']} usable, {facts['physical_cores']} physical, "
            f"{facts['logical_cores']} logical" + (f", quota {quota:g}" if quota else ""),
        ),
        ("instructions", ", ".join(facts["cpu_flags"]) or "none of the fast ones"),
        (
            "memory",
            f"{format_size(facts['memory_total_bytes'])}, "
            f"{format_size(facts['usable_memory_bytes'])} free to use"
            + (f", limit {format_size(limit)}" if limit else ""),
        ),
        ("platform", facts["platform"]),
    ]


def checkup_rows(checkup: Mapping[str, Any]) -> Rows:
    """What `doctor` measured, but for disk reads and warnings."""
    measured = checkup["measurements"]
    expert = (
        f"{measured['hidden_size']} x {measured['intermediate_size']} {measured['dtype']}, "
        f"{format_size(measured['expert_bytes'])}"
    )
    rows = [
        *machine_rows(measured["machine"]),
        ("memory reads", _rate(measured["memory_read_bytes_per_s"])),
        ("memory copies", _rate(measured["memory_copy_bytes_per_s"])),
        ("matrix products", f"{measured['matrix_flops_per_s']['median'] / 1e9:.1f} GFLOP/s"),
        ("", ""),
        ("expert measured", expert),
    ]
    for device, times in checkup["devices"].items():
        source = _COPIES.get(device, "RAM to RAM")
        words = f"{seconds(times['t_h2d_s'])} for one expert, {source} (the paper's T_H2D)"
        rows.append((f"copying, {device}", words))
        # On `cpu` no second place computes: every miss is read from disk.
        if device != "cpu":
            words = f"{percent(times['copy_share'])} of misses copied, the rest computed on the CPU"
            rows.append((f"split, {device}", f"{words} (the paper's rho)"))
    rows += [
        (
            "CPU experts",
            f"{seconds(checkup['tau_s'])} for each token of a missed expert (the paper's tau)",
        ),
        (
            "tokens per miss",
            f"{checkup['mean_tokens_per_miss']:.2f} tokens for each missed expert "
            f"({checkup['mean_tokens_per_miss_source']})",
        ),
    ]
    return rows


def _rate(figure: Mapping[str, Any]) -> str:
    low, high = (gigabytes_per_s(figure[name]) for name in ("minimum", "maximum"))
    return f"{gigabytes_per_s(figure['median'])} ({low} to {high})"


def gigabytes_per_s(bytes_per_s: float) -> str:
    """`5.65 GB/s`: rates are decimal, as data sheets have them, however fast or slow."""
    rate = bytes_per_s / 1e9
    digits = 0 if rate >= 100 else 1 if rate >= 10 else 2
    return f"{rate:.{digits}f} GB/s"


def disk_rows(reads: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Cold reads: a line for each depth, a column for each method."""
    methods = sorted({read["method"] for read in reads})
    rates = {(r["method"], r["queue_depth"]): r["bytes_per_s"]["median"] for r in reads}
    return [
        (
            str(depth),
            *(
                gigabytes_per_s(rates[method, depth]) if (method, depth) in rates else "-"
                for method in methods
            ),
        )
        for depth in sorted({read["queue_depth"] for read in reads})
    ]
