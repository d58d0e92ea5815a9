"""The arguments of each family's reference `generate`, as sampling parameters of this package.

One function a family, in FAMILY_ARGUMENTS; adding a family here is one line and one function.
Source: models.md 4 to 8.
"""

from collections.abc import Callable, Mapping
from typing import Any

from oled_moe.errors import ConfigError

Values = dict[str, Any]


def sampling_values(family: str, args: Mapping[str, Any]) -> Values:
    """Fields of SamplingParams for a family's reference arguments.

    Raises: ConfigError for a family or an argument that is not known, or a value that the
    reference refuses.
    """
    if family not in FAMILY_ARGUMENTS:
        raise ConfigError(
            f"family is {family!r}; allowed: {', '.join(sorted(FAMILY_ARGUMENTS))}, which are "
            "the model_type of config.json"
        )
    return {
        name: value
        for name, value in FAMILY_ARGUMENTS[family](dict(args)).items()
        if value is not None
    }


class _Arguments:
    """Arguments that are asked for by name; those that nobody asks for are refused."""

    def __init__(self, family: str, args: Values) -> None:
        self._family = family
        self._args = args
        self._known: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """An argument's value, the default where it is left out or None."""
        self._known.add(name)
        value = self._args.get(name)
        return default if value is None else value

    def take_whole(self, name: str, default: int) -> int:
        """A whole number of 1 or more."""
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; allowed: a whole number, 1 or more")
        return value

    def take_choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """One of some names."""
        value = self.take(name, default)
        if value not in choices:
            raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(choices)}")
        return str(value)

    def has(self, *names: str) -> bool:
        return any(self._args.get(name) is not None for name in names)

    def check_names(self) -> None:
        """Raises: ConfigError naming the arguments that are not known."""
        strangers = sorted(repr(name) for name in set(self._args) - self._known)
        if strangers:
            raise ConfigError(
                f"{', '.join(strangers)} is no argument of the reference of {self._family}; "
                f"known: {', '.join(sorted(self._known))}"
            )

    def limit(self, name: str) -> Any:
        """A top-k, which references switch off with 0."""
        value = self.take(name)
        return None if value == 0 and value is not False else value


def _llada2(args: Values) -> Values:
    """LLaDA2.0's `generate`, or LLaDA2.1's or 2.2's where one of its own arguments is given."""
    known = _Arguments("llada2_moe", args)
    if known.has("decoder"):
        values = {**_llada2_common(known), **_dinfer(known)}
        known.check_names()
        return values
    if known.has("delete_token_id", "split_token_id", "max_steps_per_block"):
        return _llada2_levenshtein(known)
    edits = known.has("editing_threshold", "max_post_steps", "num_to_transfer")
    values = {
        "algorithm": "joint_threshold" if edits else "low_confidence",
        **_llada2_common(known),
        "threshold": known.take("threshold", 0.95),
        "edit_threshold": known.take("editing_threshold", 0.9),
        "num_to_transfer": known.take("num_to_transfer", 1),
    }
    num_tokens = known.take_whole("gen_length", 2048)
    least = known.take_whole("minimal_topk", 1)
    if least > num_tokens:
        raise ConfigError(f"minimal_topk is {least}; allowed: 1 to {num_tokens}, gen_length")
    # In place of minimal_topk, which here leaves a block's tokens time where gen_length is less.
    values["steps"] = min(known.take_whole("steps", 32), num_tokens // least)
    known.check_names()
    return values


# What dInfer's decoders are made with; algorithms have the same names here. Fast-dLLM's `generate`
# takes a threshold beside the factor, and does not look at it.
_DINFER = {
    "threshold": ("threshold",),
    "hierarchy": ("threshold", "low_threshold"),
    "hierarchy_remasking": ("threshold", "low_threshold", "remask_threshold"),
    "credit": ("threshold", "credit_alpha", "boost_gamma", "decay_beta"),
    "factor": ("factor", "threshold"),
}


def _dinfer(known: "_Arguments") -> Values:
    """What dInfer's parallel decoders are made with; `decoder` says which of them."""
    decoder = known.take_choice("decoder", "threshold", tuple(_DINFER))
    for name in sorted(set().union(*_DINFER.values()) - set(_DINFER[decoder])):
        if known.has(name):
            raise ConfigError(
                f"{name} is {known.take(name)!r}; decoder {decoder} has no such argument; known: "
                f"{', '.join(_DINFER[decoder])}"
            )
    return {
        "algorithm": decoder,
        "threshold": known.take("threshold", 0.9),
        "low_threshold": known.take("low_threshold"),
        "remask_threshold": known.take("remask_threshold"),
        "credit_alpha": known.take("credit_alpha"),
        "credit_gamma": known.take("boost_gamma"),
        "credit_beta": known.take("decay_beta"),
        "factor": known.take("factor"),
        "confidence": "raw",
    }


def _llada2_levenshtein(known: "_Arguments") -> Values:
    """LLaDA2.2's `generate`, whose limit of a block's steps must leave room for ours."""
    values = {
        "algorithm": "levenshtein",
        **_llada2_common(known),
        "threshold": known.take("threshold", 0.5),
        "edit_threshold": known.take("editing_threshold", 0.0),
        "delete_token_id": known.take("delete_token_id"),
        "split_token_id": known.take("split_token_id"),
    }
    most, needed = known.take_whole("max_steps_per_block", 1000), 0
    if all(isinstance(values[name], int) for name in ("steps", "max_post_edit_steps")):
        needed = values["steps"] + values["max_post_edit_steps"]
    if most < needed:
        raise ConfigError(
            f"max_steps_per_block is {most}; allowed: {needed} or more, steps and max_post_steps "
            "together, which no block takes more of here"
        )
    known.check_names()
    return values


def _llada2_common(known: "_Arguments") -> Values:
    """What all versions of LLaDA2's `generate` take."""
    return {
        "max_tokens": known.take("gen_length", 2048),
        "temperature": known.take("temperature", 0.0),
        "block_length": known.take("block_length", 32),
        "steps": known.take("steps", 32),
        "max_post_edit_steps": known.take("max_post_steps", 16),
        "top_k": known.limit("top_k"),
        "top_p": known.take("top_p"),
        "eos_early_stop": known.take("eos_early_stop", False),
        "mask_token_id": known.take("mask_id"),
        "eos_token_id": known.take("eos_id"),
    }


def _sdar(args: Values) -> Values:
    """SDAR's `block_diffusion_generate`: confidences are read behind the filters, and nothing but
    `stopping_criteria_idx` ends an answer. With `entropy_bounded` a block is finished whatever
    `denoising_steps` is; `generate.py` cannot run it, and JetEngine would leave masks in the block.

    `sampling`, of golden runs: "multinomial", or that the likeliest token stands in for the draw.
    """
    known = _Arguments("sdar_moe", args)
    argmax = "argmax in place of multinomial"
    samplings = ("multinomial", "argmax", argmax)
    sampling = known.take_choice("sampling", "multinomial", samplings)
    stops = known.take("stopping_criteria_idx") or [None]
    if not isinstance(stops, list | tuple):
        raise ConfigError(f"stopping_criteria_idx is {stops!r}; allowed: a list of token ids")
    values = {
        "algorithm": known.take_choice(
            "remasking_strategy",
            "low_confidence_dynamic",
            ("sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded"),
        ),
        "max_tokens": known.take("gen_length", 128),
        "block_length": known.take("block_length", 8),
        "steps": known.take("denoising_steps", 8),
        "temperature": known.take("temperature", 1.0),
        "top_k": known.limit("top_k"),
        "top_p": known.take("top_p", 1.0),
        "threshold": known.take("confidence_threshold", 0.85),
        "eb_threshold": known.take("eb_threshold"),
        "confidence": "filtered",
        "greedy": sampling != "multinomial",
        "eos_token_id": stops[0],
        "stop_token_ids": list(stops[1:]),
        "ignore_eos": stops[0] is None,
        "mask_token_id": known.take("mask_id"),
    }
    known.check_names()
    return values


def _llada(args: Values) -> Values:
    """LLaDA-MoE's `generate`, whose steps are those of all blocks together, and what dInfer's
    caches and iteration smoothing are made with (`cont_weight` given means that it is)."""
    known = _Arguments("llada", args)
    known.take_choice("remasking", "low_confidence", ("low_confidence",))
    num_tokens = known.take_whole("gen_length", 128)
    block_length = known.take_whole("block_length", 128)
    steps = known.take_whole("steps", 128)
    num_blocks, rest = divmod(num_tokens, block_length)
    if rest or not num_blocks:
        raise ConfigError(
            f"gen_length is {num_tokens}; allowed: a multiple of block_length {block_length}"
        )
    if steps % num_blocks:
        raise ConfigError(f"steps is {steps}; allowed: a multiple of the {num_blocks} blocks")
    looks = ("prefix_look", "after_look", "warmup_steps")
    cache = "none"
    if known.has("cache_type"):
        cache = known.take_choice("cache_type", "prefix", ("prefix", "dual"))
    if known.has(*looks):
        # Whatever the cache's type, dInfer's class for it replaces what is in the window.
        cache = "vicinity"
    algorithm = "low_confidence_static"
    if known.has("threshold"):
        algorithm = "threshold"
    if known.has("factor"):
        algorithm = "factor"
    values = {
        "algorithm": algorithm,
        "max_tokens": num_tokens,
        "block_length": block_length,
        "steps": steps // num_blocks,
        "temperature": known.take("temperature", 0.0),
        "threshold": known.take("threshold"),
        "factor": known.take("factor"),
        "confidence": "raw",
        "canvas_cache": cache,
        **{name: known.take(name, 0 if cache == "vicinity" else None) for name in looks},
        "cache_update_freq": known.take("cache_update_freq"),
        **{
            name: known.take(name)
            for name in ("cont_weight", "cont_weight_init", "cont_weight_growth", "threshold_decay")
        },
        "eos_early_stop": known.take("early_stop", False),
        "mask_token_id": known.take("mask_id"),
        "eos_token_id": known.take("eos_id"),
        **(_dinfer(known) if known.has("decoder") else {}),
    }
    known.check_names()
    return values


def _rnd1(args: Values) -> Values:
    """RND1's `diffusion_sample` and the names of its generation config.

    The canvas holds one slot behind the masks, which `max_new_tokens` counts too.
    """
    known = _Arguments("rnd1", args)
    temperature = known.take("temperature", 0.1)
    max_new_tokens = known.take("max_new_tokens")
    length = known.take("seq_len", known.take("max_length"))
    if max_new_tokens is None and length is None:
        length = 256
    if max_new_tokens is not None:
        max_new_tokens = known.take_whole("max_new_tokens", 256) - 1
    bos = known.take("bos_token_id")
    if bos is not None:
        raise ConfigError(f"bos_token_id is {bos!r}; allowed: None; put it before the prompt")
    values = {
        "algorithm": "lowest_entropy",
        "canvas_length": length,
        "max_tokens": max_new_tokens,
        "steps": known.take("num_steps", known.take("num_diffusion_steps", 256)),
        # The reference divides by no less.
        "temperature": 1e-8 if temperature == 0 else temperature,
        "greedy": known.take("greedy", False),
        "top_k": known.limit("top_k"),
        "top_p": known.take("top_p"),
        "eb_gamma": known.take("eb_gamma"),
        "eos_at_end": known.take("add_eos_at_end", False),
        "mask_token_id": known.take("mask_token_id"),
        "eos_token_id": known.take("eos_token_id"),
        "pad_token_id": known.take("pad_token_id"),
    }
    known.check_names()
    return values


def _diffusion_gemma(args: Values) -> Values:
    """DiffusionGemma's `generate`: the fields of its generation config.

    `sampler_config` is its dataclass or what that looks like in generation_config.json. Where
    eos_token_id is left out it is the checkpoint's. Source: Transformers,
    models/diffusion_gemma/generation_diffusion_gemma.py.
    """
    known = _Arguments("diffusion_gemma", args)
    sampler = known.take("sampler_config", {"entropy_bound": 0.1})
    sampler = sampler if isinstance(sampler, Mapping) else getattr(sampler, "__dict__", {})
    if "entropy_bound" not in sampler:
        raise ConfigError(f"sampler_config is {sampler!r}; allowed: an object with entropy_bound")
    eos = known.take("eos_token_id", [])
    ends = list(eos) if isinstance(eos, list | tuple) else [eos]
    # Answers are cut where the reference begins to pad.
    known.take("pad_token_id")
    values = {
        "algorithm": "renoising",
        "max_tokens": known.take("max_new_tokens", 256),
        "steps": known.take("max_denoising_steps", 48),
        "eb_threshold": sampler["entropy_bound"],
        "t_min": known.take("t_min", 0.4),
        "t_max": known.take("t_max", 0.8),
        "stability_threshold": known.take("stability_threshold", 1),
        "confidence_threshold": known.take("confidence_threshold", 0.005),
        "eos_token_id": ends[0] if ends else None,
        "stop_token_ids": ends[1:],
    }
    known.check_names()
    return values


FAMILY_ARGUMENTS: dict[str, Callable[[Values], Values]] = {
    "llada2_moe": _llada2,
    "llada2_moe_veomni": _llada2,
    "sdar_moe": _sdar,
    "llada": _llada,
    # As its golden set and its paper call it.
    "llada_moe": _llada,
    "rnd1": _rnd1,
    "diffusion_gemma": _diffusion_gemma,
}
