"""What a user may set: engine and sampling parameters, sizes; parsed and validated once.

All values are frozen. A wrong one raises ConfigError naming the field, the value and what is
allowed. Nothing here reads the environment or a file.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from oled_moe.errors import ConfigError
from oled_moe.reference_arguments import sampling_values

DEVICES = ("cpu", "cuda", "emulated")
DTYPES = ("bfloat16", "float16", "float32")
# What `bf16` means wherever a dtype may be given, and how all are listed.
BF16 = "bf16"
DTYPE_WORDS = ", ".join(("bfloat16 or bf16", *DTYPES[1:]))
# More than any machine has cores; far more threads than that cannot even be started.
_MAX_THREADS = 1024
ALGORITHMS = (
    "low_confidence",
    "joint_threshold",
    "levenshtein",
    "sequential",
    "low_confidence_static",
    "low_confidence_dynamic",
    "entropy_bounded",
    "threshold",
    "hierarchy",
    "hierarchy_remasking",
    "credit",
    "factor",
    "lowest_entropy",
    "renoising",
)
DEFAULT_ALGORITHM = "low_confidence"
# Those that may change or take back tokens that they have accepted.
EDITING_ALGORITHMS = ("joint_threshold", "levenshtein", "hierarchy_remasking")
# Those that fill the whole answer as one block.
ONE_BLOCK_ALGORITHMS = ("lowest_entropy",)
# Those for models without a mask, whose canvases begin as random tokens.
RANDOM_ALGORITHMS = ("renoising",)
DEFAULT_RENOISING_STEPS = 48
# Those for models whose answers are made of blocks of masks.
BLOCK_ALGORITHMS = tuple(
    name for name in ALGORITHMS if name not in (*ONE_BLOCK_ALGORITHMS, *RANDOM_ALGORITHMS)
)
# Those that ask a model to have been trained for editing tokens, and the ones that do not.
TRAINED_ALGORITHMS = ("joint_threshold", "levenshtein")
UNTRAINED_ALGORITHMS = tuple(name for name in BLOCK_ALGORITHMS if name not in TRAINED_ALGORITHMS)
# Those that a schedule of steps drives.
_SCHEDULED = (
    *("low_confidence", "sequential", "low_confidence_static", "low_confidence_dynamic"),
    *("lowest_entropy", "renoising"),
)
# Those that accept what is surer than a threshold of their own.
_THRESHOLDED = (
    *("low_confidence", "low_confidence_dynamic"),
    *("threshold", "hierarchy", "hierarchy_remasking", "credit"),
)
_MASKED = tuple(name for name in ALGORITHMS if name not in RANDOM_ALGORITHMS)
_EXTENDED_STEPS = (*_SCHEDULED, "levenshtein")
# The algorithms that look at a field; fields that are not here are looked at by all of them, or
# are a family's business. Given with any other, a field is refused (`check_looked_at`).
_LOOKED_AT_BY: Mapping[str, tuple[str, ...]] = {
    "steps": _EXTENDED_STEPS,
    "minimal_topk": tuple(name for name in BLOCK_ALGORITHMS if name in _EXTENDED_STEPS),
    "threshold": (*_THRESHOLDED, *TRAINED_ALGORITHMS),
    "threshold_decay": _THRESHOLDED,
    **dict.fromkeys(("edit_threshold", "max_post_edit_steps"), TRAINED_ALGORITHMS),
    "num_to_transfer": ("joint_threshold",),
    "low_threshold": ("hierarchy", "hierarchy_remasking"),
    "remask_threshold": ("hierarchy_remasking",),
    **dict.fromkeys(("credit_alpha", "credit_gamma", "credit_beta"), ("credit",)),
    "factor": ("factor",),
    "eb_threshold": ("entropy_bounded", *RANDOM_ALGORITHMS),
    "eb_gamma": ("lowest_entropy",),
    **dict.fromkeys(("mask_token_id", "delete_token_id", "split_token_id"), _MASKED),
    "pad_token_id": ("lowest_entropy",),
    **dict.fromkeys(
        ("t_min", "t_max", "stability_threshold", "confidence_threshold"), RANDOM_ALGORITHMS
    ),
}
# What a grammar makes of every algorithm but joint_threshold (constrained.py).
_LOOKED_AT_UNDER_GRAMMARS = ("threshold", "steps", "minimal_topk")
# Stands in for the id of the mask where a model has none.
NO_MASK_ID = -1
# Keys and values that models which see a whole canvas may keep while they work on a block, though
# they are out of date then: those before the block, those behind it too, or of these those that are
# not near it.
CANVAS_CACHES = ("none", "prefix", "dual", "vicinity")
# What a token's confidence is its probability under: the model's own distribution, that after
# temperature, or that after temperature, top-k and top-p.
CONFIDENCES = ("raw", "tempered", "filtered")
# As the reference of each algorithm has it, where it is not "raw".
_CONFIDENCE_OF = {
    **dict.fromkeys(
        ("low_confidence", "joint_threshold", "levenshtein", "lowest_entropy"), "filtered"
    ),
    "renoising": "tempered",
    **dict.fromkeys(
        ("sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded"),
        "tempered",
    ),
}
_GRAMMAR_TITLES = {
    "json_object": "the JSON object",
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "lark": "the Lark grammar",
}
GRAMMAR_KINDS = tuple(_GRAMMAR_TITLES)

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*")


def looks_at(algorithm: str, field: str, *, has_grammar: bool = False) -> bool:
    """Whether an algorithm looks at a field of SamplingParams."""
    if has_grammar and algorithm != "joint_threshold" and field in _LOOKED_AT_UNDER_GRAMMARS:
        return True
    return algorithm in _LOOKED_AT_BY.get(field, ALGORITHMS)


def parse_size(field: str, value: int | str, *, whole_bytes: int | None = None) -> int:
    """Bytes in `8GiB`, `512MiB`, `1000000`, or, where `whole_bytes` is known, `50%` of it.

    Raises: ConfigError for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        if value.strip().endswith("%") and whole_bytes is not None:
            try:
                share = float(value.strip()[:-1])
            except ValueError:
                share = math.nan
            if 0 <= share <= 100:
                return int(whole_bytes * share / 100)
        match = _SIZE.fullmatch(value)
        if match and match[2].upper() in _UNITS:
            return int(Fraction(match[1]) * _UNITS[match[2].upper()])
    raise ConfigError(f"{field} is {value!r}; write a size such as 8GiB, 512MiB or 50%")


def format_size(num_bytes: float) -> str:
    """`num_bytes` in the largest binary unit that leaves at least one whole unit."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def size_to_type(num_bytes: int, *, is_most: bool = False) -> str:
    """A size as flags take it, `278MiB`: at least `num_bytes` and less than 1 % more, or with
    `is_most` at most that and less than 1 % less."""
    for unit in ("TIB", "GIB", "MIB", "KIB"):
        count = num_bytes // _UNITS[unit] if is_most else -(-num_bytes // _UNITS[unit])
        if num_bytes >= 100 * _UNITS[unit]:
            return f"{count}{unit.replace('IB', 'iB')}"
    return f"{num_bytes}B"


def exact_size(num_bytes: int) -> str:
    """A size as flags take it, in the largest binary unit that says it exactly."""
    for unit in ("TIB", "GIB", "MIB", "KIB"):
        if num_bytes and num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit.replace('IB', 'iB')}"
    return f"{num_bytes}B"


def check_int(
    field: str, value: object, *, minimum: int, maximum: int | None = None, hint: str = ""
) -> None:
    """Raise ConfigError unless `value` is an int (no bool) within the bounds."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and value >= minimum and (maximum is None or value <= maximum):  # type: ignore[operator]  # is_int narrows at run time only
        return
    upper = f" to {maximum}" if maximum is not None else " or more"
    raise ConfigError(f"{field} is {value!r}; allowed: a whole number, {minimum}{upper}{hint}")


def check_real(field: str, value: object, *, minimum: float, maximum: float = math.inf) -> None:
    """Raise ConfigError unless `value` is a finite number within the bounds."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    # An int of any size compares with a float; NaN is within no bounds.
    if is_real and minimum <= value <= min(maximum, sys.float_info.max):  # type: ignore[operator]  # is_real narrows at run time only
        return
    upper = f" to {maximum:g}" if math.isfinite(maximum) else " or more"
    raise ConfigError(f"{field} is {value!r}; allowed: a number, {minimum:g}{upper}")


def check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{field} is {value!r}; allowed: {', '.join(choices)}")


def dtype_name(value: object) -> str:
    """A name of `DTYPES`, of what may be `bf16` too. Raises: ConfigError."""
    if not isinstance(value, str) or value not in (BF16, *DTYPES):
        raise ConfigError(f"dtype is {value!r}; allowed: {DTYPE_WORDS}")
    return DTYPES[0] if value == BF16 else value


def check_flag(field: str, value: object) -> None:
    """Raise ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{field} is {value!r}; allowed: True, False")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is run.

    At most one of `experts_per_layer` (slots for routed experts, mean over the MoE layers; staging
    slots come on top), `expert_memory` (bytes for slots and staging together) and `memory` (bytes
    for everything: weights, K/V, activations, slots) may be given; without any, the engine takes
    what the machine has to spare. `policy` is `NAME[:key=value,...]`, an `OffloadPolicy`, or None
    for what suits the model's family, most often `oled`; `hardware` a `HardwareProfile`, the path
    of one, or None for what `doctor` stored, else a built-in guess. `dtype` is one of
    `DTYPES` or `bf16`; None keeps the stored one. `cpu_experts` False turns CPU execution of
    missing experts off. `threads` None is torch's own number, or 1 where experts are so small that
    more would only wait. `force` loads even where the memory plan exceeds what is free.
    `cuda_graphs`, on `cuda` alone, records the parts of layers between attention and experts where
    that is measured to be faster. `lossy`, `NAME[:key=value,...]`, is a rule by which the tokens of
    a block share experts, or, `mixed`, by which missing experts that matter little come from
    `low_precision`, a pack of the same model in int8 or int4: answers are no longer the model's own
    (lossy.py), and by `resident` and `mixed` they depend on what is in memory.

    Raises: ConfigError for a field outside its range.
    """

    device: str = "cpu"
    experts_per_layer: float | None = None
    expert_memory: int | str | None = None
    memory: int | str | None = None
    policy: object = None
    cpu_experts: bool = True
    dtype: str | None = None
    hardware: object = None
    max_model_len: int | None = None
    max_num_seqs: int = 1
    threads: int | None = None
    seed: int = 0
    force: bool = False
    cuda_graphs: bool = False
    lossy: str | None = None
    low_precision: str | None = None

    def __post_init__(self) -> None:
        check_choice("device", self.device, DEVICES)
        budgets = ("experts_per_layer", "expert_memory", "memory")
        given = [name for name in budgets if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are both given; give one of them")
        if self.experts_per_layer is not None:
            check_real("experts_per_layer", self.experts_per_layer, minimum=0)
        for name in ("expert_memory", "memory"):
            value = getattr(self, name)
            if value is not None:
                parse_size(name, value, whole_bytes=0)
        check_flag("cpu_experts", self.cpu_experts)
        check_flag("force", self.force)
        check_flag("cuda_graphs", self.cuda_graphs)
        if self.cuda_graphs and self.device != "cuda":
            raise ConfigError(
                f"cuda_graphs is True and device is {self.device!r}; allowed: with device cuda"
            )
        if self.lossy is not None and not isinstance(self.lossy, str):
            raise ConfigError(f"lossy is {self.lossy!r}; allowed: NAME[:key=value,...], None")
        if self.lossy is not None and self.cuda_graphs:
            raise ConfigError("lossy and cuda_graphs are both given; they do not go together")
        self._check_low_precision()
        if isinstance(self.dtype, str) and self.dtype.startswith("int"):
            raise ConfigError(
                f"dtype is {self.dtype!r}; allowed: {DTYPE_WORDS}; experts become whole "
                f"numbers when they are packed: oled-moe pack MODEL OUT --dtype {self.dtype}, then "
                "name OUT as the model"
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, minimum=1)
        check_int("max_num_seqs", self.max_num_seqs, minimum=1)
        if self.threads is not None:
            check_int("threads", self.threads, minimum=1, maximum=_MAX_THREADS)
        check_int("seed", self.seed, minimum=0, maximum=2**63 - 1)

    def _check_low_precision(self) -> None:
        """The rule and its pack need each other."""
        is_mixed = self.lossy is not None and self.lossy.partition(":")[0] == "mixed"
        if self.low_precision is None:
            if is_mixed:
                raise ConfigError(
                    f"lossy is {self.lossy!r} and low_precision is not given; name a pack of the "
                    "same model in int8 or int4, which oled-moe pack MODEL OUT --dtype int4 makes"
                )
            return
        if not isinstance(self.low_precision, str):
            raise ConfigError(
                f"low_precision is {self.low_precision!r}; allowed: the name of a model, None"
            )
        if not is_mixed:
            raise ConfigError(
                f"low_precision is {self.low_precision!r} and lossy is {self.lossy!r}; it "
                "goes with lossy mixed"
            )
        if self.device == "cuda":
            raise ConfigError(
                f"lossy is {self.lossy!r} and device is 'cuda', whose copies know one precision; "
                "allowed: with devices cpu and emulated"
            )


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer's text must be: any JSON object, JSON of a schema, a regular expression, or a
    grammar in llguidance's variant of Lark.

    `text`: the schema as JSON, the expression or the grammar; empty for `json_object`. `name`: the
    field that gave it, for messages.
    Raises: ConfigError for an unknown kind, or a text that must or must not be there.
    """

    kind: str
    text: str = ""
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_choice("grammar kind", self.kind, GRAMMAR_KINDS)
        if not isinstance(self.text, str):
            raise ConfigError(f"grammar text is {self.text!r}; allowed: a string")
        if bool(self.text) == (self.kind == "json_object"):
            needs = "none" if self.kind == "json_object" else "one that is not empty"
            raise ConfigError(
                f"grammar text for {self.kind} is {self.text[:50]!r}; allowed: {needs}"
            )

    @property
    def title(self) -> str:
        """What messages call it: the field that gave it, else what it is."""
        return self.name or _GRAMMAR_TITLES[self.kind]

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], name: str = "") -> "Grammar":
        """JSON that a schema describes. Raises: ConfigError where the schema is no JSON."""
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False), name)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the JSON schema cannot be written as JSON: {error}") from None


_SHARES = (
    *("threshold", "edit_threshold", "low_threshold", "remask_threshold"),
    *("credit_beta", "top_p"),
    *("cont_weight", "cont_weight_init", "cont_weight_growth", "threshold_decay"),
)
_ENTROPIES = ("eb_threshold", "eb_gamma", "confidence_threshold")
_WEIGHTS = ("temperature", "credit_alpha", "credit_gamma", "factor", "t_min", "t_max")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is decoded. A field left None takes the checkpoint's value, else the default.

    An engine refuses fields that the request's algorithm does not look at (`check_looked_at`).
    Defaults: algorithm low_confidence, max_tokens 256, block_length 32, steps = block_length,
    threshold 0.95, edit_threshold 0.9, max_post_edit_steps 16, num_to_transfer 1, minimal_topk 1,
    temperature 0 (argmax), no top_k, no top_p, no eos_early_stop; low_threshold 0.4,
    remask_threshold 0.4, credit_alpha 0.7, credit_gamma 0.2, credit_beta 0.8, factor 1,
    eb_threshold 0.35, no eb_gamma. Families bring algorithms of their own.
    `steps` is the schedule of low_confidence, sequential, low_confidence_static and _dynamic, which
    accept so many a step at least, and the number of steps of lowest_entropy. `entropy_bounded`,
    the thresholds, hierarchies, credit and factor do not look at it: they accept one token a step
    at least, and a block ends when it is full, after `block_length` steps at most. (Of SDAR's
    references one leaves a block after `denoising_steps` with masks in it, which are no answer.)
    `delete_token_id` and `split_token_id` are control tokens of checkpoints trained for
    `levenshtein`, which is these checkpoints' default (EDITING_DEFAULTS); no answer holds them.
    `renoising` takes `steps` at most (default 48), accepts by `eb_threshold` (0.1), and stops early
    once the likeliest tokens have been the same for `stability_threshold` (1) steps more and their
    mean entropy is below `confidence_threshold` (0.005). Its temperature falls step by step from
    `t_max` (0.8) to `t_min` (0.4), times `temperature` (1; 0 takes the likeliest tokens).
    `ignore_eos` decodes on past eos and stop ids alike. `stop` are strings that end the answer and
    are not part of it; `stop_token_ids` end it like eos does.
    `greedy` takes each position's likeliest token, so that temperature shapes confidences alone;
    `confidence`, one of CONFIDENCES, is by default what the algorithm's reference has.
    For models that denoise prompt and answer as one canvas, `canvas_length` are the positions of
    all of it, in place of max_tokens, and `eos_at_end` puts eos into the last; `canvas_cache`, one
    of CANVAS_CACHES, saves work by an approximation: answers may differ. With it the answer's first
    `warmup_steps` forwards keep nothing (vicinity: 4, else 0), every `cache_update_freq`-th is a
    whole one as each block's first is (default: these alone), and vicinity's others take
    `prefix_look` and `after_look` (16 each) positions around the block. `cont_weight` above 0 is
    iteration smoothing, an approximation too: to a mask's embedding those of all tokens are added,
    each by its probability, times `cont_weight_init` (0.15) and `cont_weight_growth` (0.02) for
    each forward before, `cont_weight` at most, while the threshold falls from 1 by
    `threshold_decay` (0.02) a forward to its own value.

    Source: released LLaDA2.0 and LLaDA2.1 `generate` (architecture.md 5, models.md 4 and 5); SDAR,
    dInfer, Fast-dLLM and RND1 (models.md 6 to 8); Transformers,
    models/diffusion_gemma/generation_diffusion_gemma.py.
    Raises: ConfigError for a field outside its range.
    """

    algorithm: str | None = None
    max_tokens: int | None = None
    block_length: int | None = None
    steps: int | None = None
    threshold: float | None = None
    edit_threshold: float | None = None
    max_post_edit_steps: int | None = None
    num_to_transfer: int | None = None
    minimal_topk: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    eos_early_stop: bool | None = None
    ignore_eos: bool | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None
    grammar: Grammar | None = None
    greedy: bool | None = None
    confidence: str | None = None
    low_threshold: float | None = None
    remask_threshold: float | None = None
    credit_alpha: float | None = None
    credit_gamma: float | None = None
    credit_beta: float | None = None
    factor: float | None = None
    eb_threshold: float | None = None
    eb_gamma: float | None = None
    canvas_length: int | None = None
    eos_at_end: bool | None = None
    canvas_cache: str | None = None
    prefix_look: int | None = None
    after_look: int | None = None
    warmup_steps: int | None = None
    cache_update_freq: int | None = None
    cont_weight: float | None = None
    cont_weight_init: float | None = None
    cont_weight_growth: float | None = None
    threshold_decay: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ConfigError(f"grammar is {self.grammar!r}; allowed: a Grammar, None")
        if self.algorithm is not None:
            check_choice("algorithm", self.algorithm, ALGORITHMS)
        if self.confidence is not None:
            check_choice("confidence", self.confidence, CONFIDENCES)
        if self.canvas_cache is not None:
            check_choice("canvas_cache", self.canvas_cache, CANVAS_CACHES)
        minima = {
            "max_tokens": 1,
            "block_length": 1,
            "steps": 1,
            "max_post_edit_steps": 0,
            "num_to_transfer": 1,
            "minimal_topk": 1,
            "top_k": 1,
            "seed": 0,
            "mask_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "delete_token_id": 0,
            "split_token_id": 0,
            "canvas_length": 1,
            "prefix_look": 0,
            "after_look": 0,
            "warmup_steps": 0,
            "cache_update_freq": 1,
            "stability_threshold": 0,
        }
        maxima = {
            "max_tokens": 2**31,
            "canvas_length": 2**31,
            "block_length": 2**20,
            "max_post_edit_steps": 1000,
            "stability_threshold": 1000,
        }
        for name, minimum in minima.items():
            if getattr(self, name) is not None:
                maximum = maxima.get(name, 2**63 - 1)
                check_int(name, getattr(self, name), minimum=minimum, maximum=maximum)
        for name in _SHARES:
            if getattr(self, name) is not None:
                check_real(name, getattr(self, name), minimum=0, maximum=1)
        for name in (*_WEIGHTS, *_ENTROPIES):
            if getattr(self, name) is not None:
                check_real(name, getattr(self, name), minimum=0)
        for name in ("eos_early_stop", "ignore_eos", "greedy", "eos_at_end"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        if self.stop is not None:
            stop = (self.stop,) if isinstance(self.stop, str) else self.stop
            if not _is_list(stop) or not all(isinstance(text, str) and text for text in stop):
                raise ConfigError(f"stop is {self.stop!r}; allowed: strings that are not empty")
            object.__setattr__(self, "stop", tuple(stop))
        if self.stop_token_ids is not None:
            if not _is_list(self.stop_token_ids):
                raise ConfigError(
                    f"stop_token_ids is {self.stop_token_ids!r}; allowed: a list of whole numbers"
                )
            for token_id in self.stop_token_ids:
                check_int("stop_token_ids", token_id, minimum=0)
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @classmethod
    def from_reference(cls, family: str, args: Mapping[str, Any]) -> "SamplingParams":
        """What the arguments of a family's reference `generate` mean here.

        Left-out arguments are the reference's defaults; what its loop takes and does not look at
        is left out. Raises: ConfigError for a family or a name that is not known, and for values
        that the reference or this class refuses.
        """
        found = cls(**sampling_values(family, args))
        return found.looked_at_by(found.algorithm)

    def looked_at_by(self, algorithm: str | None) -> "SamplingParams":
        """This, without what an algorithm (None: the default one) does not look at."""
        return replace(self, **dict.fromkeys(self.not_looked_at_by(algorithm)))

    def not_looked_at_by(self, algorithm: str | None) -> list[str]:
        """The fields that are set and that an algorithm (None: the default one) ignores."""
        name = _default(algorithm, DEFAULT_ALGORITHM)
        return [
            field
            for field in _LOOKED_AT_BY
            if getattr(self, field) is not None
            and not looks_at(name, field, has_grammar=self.grammar is not None)
        ]

    def with_defaults(self, defaults: "SamplingParams") -> "SamplingParams":
        """This, with every field that is None taken from `defaults`."""
        missing = {
            field.name: getattr(defaults, field.name)
            for field in fields(self)
            if getattr(self, field.name) is None
        }
        return replace(self, **missing)


# How checkpoints that have control tokens are decoded, as their own `generate` has it.
EDITING_DEFAULTS = SamplingParams(algorithm="levenshtein", threshold=0.5, edit_threshold=0.0)


@dataclass(frozen=True, slots=True)
class DecodingParams:
    """SamplingParams with nothing left open: what the decoding loop works from."""

    algorithm: str
    max_tokens: int
    block_length: int
    steps: int
    threshold: float
    edit_threshold: float
    max_post_edit_steps: int
    num_to_transfer: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    eos_early_stop: bool
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    mask_token_id: int
    eos_token_id: int | None
    pad_token_id: int | None
    delete_token_id: int | None
    split_token_id: int | None
    grammar: Grammar | None
    greedy: bool
    confidence: str
    low_threshold: float
    remask_threshold: float
    credit_alpha: float
    credit_gamma: float
    credit_beta: float
    factor: float
    eb_threshold: float
    eb_gamma: float | None
    eos_at_end: bool
    canvas_cache: str
    prefix_look: int
    after_look: int
    warmup_steps: int
    cache_update_freq: int | None
    cont_weight: float
    cont_weight_init: float
    cont_weight_growth: float
    threshold_decay: float
    t_min: float
    t_max: float
    stability_threshold: int
    confidence_threshold: float

    @property
    def is_greedy(self) -> bool:
        """Whether each position's token is the likeliest one, without a draw."""
        return self.greedy or self.temperature == 0

    @property
    def control_ids(self) -> tuple[int, ...]:
        """Tokens that are instructions to the decoding loop and never part of an answer."""
        ids = (self.delete_token_id, self.split_token_id)
        return tuple(token_id for token_id in ids if token_id is not None)

    @property
    def max_steps(self) -> int:
        """Most forwards that one block takes."""
        if self.algorithm == "joint_threshold":
            return self.block_length + self.max_post_edit_steps
        if self.algorithm == "levenshtein":
            return self.steps + self.max_post_edit_steps
        return self.steps if self.algorithm in _SCHEDULED else self.block_length

    @classmethod
    def resolve(cls, params: SamplingParams) -> "DecodingParams":
        """Fill what is still None from the built-in defaults and apply the step rule.

        Raises: ConfigError where no mask id is known, or minimal_topk leaves no step.
        Source: released LLaDA2.0 `generate`: steps = min(steps, gen_length // minimal_topk), here
        with gen_length = max(max_tokens, block_length), so that a small max_tokens does not accept
        a whole block at once (architecture.md 5); not for lowest_entropy and renoising, whose
        references may take more steps than there are tokens.
        """
        is_random = params.algorithm in RANDOM_ALGORITHMS
        if params.mask_token_id is None and not is_random:
            raise ConfigError(
                "mask_token_id is in neither the parameters, config.json, generation_config.json "
                "nor the tokenizer; give it as a sampling parameter"
            )
        max_tokens = _default(params.max_tokens, 256)
        algorithm = _default(params.algorithm, DEFAULT_ALGORITHM)
        _check_control_ids(params, algorithm)
        is_vicinity = params.canvas_cache == "vicinity"
        is_one_block = algorithm in ONE_BLOCK_ALGORITHMS
        if is_one_block and params.block_length not in (None, max_tokens):
            raise ConfigError(
                f"block_length is {params.block_length}; algorithm {algorithm} fills the whole "
                "answer as one block: leave block_length out"
            )
        block_length = max_tokens if is_one_block else _default(params.block_length, 32)
        steps = _default(params.steps, DEFAULT_RENOISING_STEPS if is_random else block_length)
        minimal_topk = _default(params.minimal_topk, 1)
        length = max(max_tokens, block_length)
        if minimal_topk > length:
            raise ConfigError(
                f"minimal_topk is {minimal_topk}; allowed: 1 to {length}, "
                "the larger of max_tokens and block_length"
            )
        if not is_one_block and not is_random:
            steps = min(steps, length // minimal_topk)
        t_min, t_max = _default(params.t_min, 0.4), _default(params.t_max, 0.8)
        if not 0 < t_max >= t_min:
            raise ConfigError(f"t_max is {t_max:g}; allowed: above 0, and t_min {t_min:g} or more")
        return cls(
            algorithm=algorithm,
            max_tokens=max_tokens,
            block_length=block_length,
            steps=steps,
            threshold=_default(params.threshold, 0.95),
            edit_threshold=_default(params.edit_threshold, 0.9),
            max_post_edit_steps=_default(params.max_post_edit_steps, 16),
            num_to_transfer=_default(params.num_to_transfer, 1),
            temperature=_default(params.temperature, 1.0 if is_random else 0.0),
            top_k=params.top_k,
            top_p=params.top_p,
            seed=_default(params.seed, 0),
            eos_early_stop=bool(params.eos_early_stop),
            ignore_eos=bool(params.ignore_eos),
            stop=tuple(params.stop or ()),
            stop_token_ids=tuple(params.stop_token_ids or ()),
            mask_token_id=NO_MASK_ID if is_random else _default(params.mask_token_id, NO_MASK_ID),
            eos_token_id=params.eos_token_id,
            pad_token_id=params.pad_token_id,
            delete_token_id=params.delete_token_id,
            split_token_id=params.split_token_id,
            grammar=params.grammar,
            greedy=bool(params.greedy),
            confidence=_default(params.confidence, _CONFIDENCE_OF.get(algorithm, "raw")),
            low_threshold=_default(params.low_threshold, 0.4),
            remask_threshold=_default(params.remask_threshold, 0.4),
            credit_alpha=_default(params.credit_alpha, 0.7),
            credit_gamma=_default(params.credit_gamma, 0.2),
            credit_beta=_default(params.credit_beta, 0.8),
            factor=_default(params.factor, 1.0),
            eb_threshold=_default(params.eb_threshold, 0.1 if is_random else 0.35),
            eb_gamma=params.eb_gamma,
            eos_at_end=bool(params.eos_at_end),
            canvas_cache=_default(params.canvas_cache, "none"),
            prefix_look=_default(params.prefix_look, 16),
            after_look=_default(params.after_look, 16),
            warmup_steps=_default(params.warmup_steps, 4 if is_vicinity else 0),
            cache_update_freq=params.cache_update_freq,
            cont_weight=_default(params.cont_weight, 0.0),
            cont_weight_init=_default(params.cont_weight_init, 0.15),
            cont_weight_growth=_default(params.cont_weight_growth, 0.02),
            threshold_decay=_default(params.threshold_decay, 0.02),
            t_min=t_min,
            t_max=t_max,
            stability_threshold=_default(params.stability_threshold, 1),
            confidence_threshold=_default(params.confidence_threshold, 0.005),
        )


@dataclass(frozen=True, slots=True)
class FamilyDecoding:
    """How the models of a family denoise; each model's config has one.

    `algorithms`: those that its models may be decoded by; `defaults`: what holds where neither a
    request nor the checkpoint says. With `is_whole` every forward takes prompt, answer and all
    masks, and each position sees all others; else it takes a block, which sees those before it.
    `shift`: a position's token is told by the logits so many positions before. `num_reserved`:
    slots behind the answer that hold pad. `fills_behind_eos`: with eos_early_stop all positions
    behind the first eos become eos at once. `block_length`: the only one that the model is meant
    for, None where any will do. `expert_capacity`: most experts of a layer that the tokens of one
    block choose among, None where nothing bounds them. `canvas_length`: not 0 for models without a
    mask, which denoise one canvas of so many random tokens after another, each seeing those before
    it as they were read in order. `policy`: what offloads their experts where nobody says.
    """

    algorithms: tuple[str, ...]
    defaults: SamplingParams = SamplingParams()
    is_whole: bool = False
    shift: int = 0
    num_reserved: int = 0
    fills_behind_eos: bool = False
    block_length: int | None = None
    expert_capacity: int | None = None
    canvas_length: int = 0
    policy: str = "oled"


def check_looked_at(
    given: SamplingParams, filled: SamplingParams, algorithms: Sequence[str]
) -> None:
    """Refuse what a request says and nothing will look at. `filled`: with the checkpoint's own
    values where it says nothing; `algorithms`: those of the model.

    Raises: ConfigError naming the field, and what it goes with.
    """
    algorithm = _default(filled.algorithm, DEFAULT_ALGORITHM)
    for name in given.not_looked_at_by(algorithm):
        readers = _LOOKED_AT_BY[name]
        remedy = "which this model is not decoded by: leave it out"
        if not set(readers).isdisjoint(algorithms):
            readers = tuple(each for each in readers if each in algorithms)
            remedy = f"and algorithm is {algorithm}: leave it out, or change the algorithm"
        plural = "s" if len(readers) > 1 else ""
        raise ConfigError(
            f"{name} is {getattr(given, name)!r}; it goes with algorithm{plural} "
            f"{', '.join(readers)}, {remedy}"
        )
    has_cache = filled.canvas_cache not in (None, "none")
    is_near = filled.canvas_cache == "vicinity"
    needs = {
        **dict.fromkeys(("prefix_look", "after_look"), (is_near, "canvas_cache vicinity")),
        **dict.fromkeys(
            ("warmup_steps", "cache_update_freq"),
            (has_cache, f"canvas_cache {', '.join(CANVAS_CACHES[1:])}"),
        ),
        **dict.fromkeys(
            ("cont_weight_init", "cont_weight_growth", "threshold_decay"),
            (bool(filled.cont_weight), "a cont_weight above 0"),
        ),
    }
    for name, (is_met, needed) in needs.items():
        if getattr(given, name) is not None and not is_met:
            raise ConfigError(
                f"{name} is {getattr(given, name)!r}; it goes with {needed}: leave it out, or give "
                "that too"
            )


def block_routing_words(expert_capacity: int, num_experts: int) -> str:
    """What block routing means for a cache, for people."""
    return (
        f"a block admits {expert_capacity} of {num_experts} experts of a layer, so that "
        f"{expert_capacity} slots per layer are all it needs in a forward"
    )


def _check_control_ids(params: SamplingParams, algorithm: str) -> None:
    """Raise ConfigError where a loop lacks its control tokens, or one of them means two things."""
    ids = (params.delete_token_id, params.split_token_id)
    if algorithm == "levenshtein" and None in ids:
        raise ConfigError(
            "algorithm levenshtein needs delete_token_id and split_token_id, which config.json "
            "of a checkpoint trained for it declares; give another algorithm"
        )
    if algorithm == "levenshtein" and params.grammar is not None:
        raise ConfigError(
            f"{params.grammar.title} cannot hold while tokens are deleted and inserted by "
            "algorithm levenshtein; give another algorithm, joint_threshold for one"
        )
    given = [token_id for token_id in ids if token_id is not None]
    taken = (params.mask_token_id, params.eos_token_id, *(params.stop_token_ids or ()))
    for place, token_id in enumerate(given):
        if token_id in taken or token_id in given[:place]:
            raise ConfigError(
                f"token {token_id} is given as delete_token_id or split_token_id and as another "
                "special token; each must be a token of its own"
            )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


# Names that generation_config.json files use for what SamplingParams calls otherwise.
_GENERATION_ALIASES = {
    "max_new_tokens": "max_tokens",
    "gen_length": "max_tokens",
    "editing_threshold": "edit_threshold",
    "max_post_steps": "max_post_edit_steps",
    "mask_id": "mask_token_id",
    "eos_id": "eos_token_id",
    "max_denoising_steps": "steps",
}


def sampling_from_generation_config(values: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters that a generation_config.json sets; keys of others are ignored.

    A list of eos ids becomes one eos and further stop ids; `do_sample: false` is temperature 0.
    Raises: ConfigError naming the field where a value is not allowed.
    """
    known = {field.name for field in fields(SamplingParams)}
    chosen: dict[str, Any] = {}
    for key, value in values.items():
        name = _GENERATION_ALIASES.get(key, key)
        if name in known and value is not None:
            chosen[name] = value
    sampler = values.get("sampler_config")
    if isinstance(sampler, Mapping) and sampler.get("entropy_bound") is not None:
        chosen["eb_threshold"] = sampler["entropy_bound"]
    eos = chosen.get("eos_token_id")
    if isinstance(eos, list) and eos:
        chosen["eos_token_id"] = eos[0]
        stops = chosen.get("stop_token_ids", [])
        chosen["stop_token_ids"] = [*eos[1:], *stops] if isinstance(stops, list) else stops
    if values.get("do_sample") is False:
        chosen["temperature"] = 0.0
    # The file format writes "no top-k" as 0.
    if chosen.get("top_k") == 0 and chosen["top_k"] is not False:
        del chosen["top_k"]
    try:
        return SamplingParams(**chosen)
    except ConfigError as error:
        raise ConfigError(f"generation_config.json: {error}") from None
