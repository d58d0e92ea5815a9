"""Engine: opens a checkpoint, plans memory, builds the tiers, generates.

Devices are told apart in `devices.py`; nothing here knows which one it runs on.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from oled_moe.cache import ExpertCache
from oled_moe.canvas import new_sequence_of
from oled_moe.checkpoint import Checkpoint, read_weights
from oled_moe.config import (
    EDITING_DEFAULTS,
    DecodingParams,
    EngineConfig,
    FamilyDecoding,
    SamplingParams,
    check_int,
    check_looked_at,
    sampling_from_generation_config,
)
from oled_moe.constrained import HONOURED_ALGORITHMS
from oled_moe.costs import (
    DEFAULT_PROFILES,
    CostModel,
    HardwareProfile,
    load_profile,
)
from oled_moe.counters import ExpertCounters
from oled_moe.cuda import MOST_AHEAD, cuda_errors
from oled_moe.cuda_graphs import RecordedPieces
from oled_moe.decoding import (
    MAX_PREFILL_TOKENS,
    BlockDiffusionDecoder,
    DecodingSequence,
    DecodingStep,
    TokenChange,
    never_stop,
)
from oled_moe.devices import Gpu, LowStore, Progress, build_tiers, open_gpu
from oled_moe.encodings import EncodedRecord
from oled_moe.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    OledMoeError,
)
from oled_moe.experts import OffloadedExperts
from oled_moe.grammar import GrammarCompiler
from oled_moe.hardware import load_hardware
from oled_moe.kernels.cpu import max_native_rows
from oled_moe.kernels.native import native_kernels
from oled_moe.lanes import check_process
from oled_moe.layers import ATTENTION_SLICE, LOGIT_ROWS
from oled_moe.lossy import LossyRule, build_lossy
from oled_moe.low_precision import LowPrecisionPack
from oled_moe.machine import usable_memory_bytes
from oled_moe.memory import (
    SYSTEM_RESERVE_BYTES,
    GpuMemoryPlan,
    LowSlots,
    MemoryPlan,
    ModelMemory,
    plan_gpu_memory,
    plan_memory,
    process_memory_bytes,
)
from oled_moe.metrics import GenerationStats, generation_stats
from oled_moe.model_paths import find_model
from oled_moe.models import Family, ModelConfig, find_family
from oled_moe.packs import expert_dtype_name
from oled_moe.policies import OffloadPolicy, build_policy
from oled_moe.profiler import SMALL_EXPERT_BYTES, default_profile_path
from oled_moe.sampling import SAMPLING_SLICE
from oled_moe.store import ExpertLayout, ExpertPart
from oled_moe.tokenization import Tokenizer
from oled_moe.types import (
    CopyPlan,
    ForwardContext,
    ForwardOutcome,
    LayerDemand,
    LayerPlan,
    MoeShape,
)
from oled_moe.unmasking import Constraint

logger = logging.getLogger(__name__)

# Context that keys and values are planned for where nothing else is asked.
DEFAULT_MODEL_LEN = 4096
# The longest block that memory is planned for.
PLANNED_BLOCK_LENGTH = 64
# What sampling makes per logit of the rows it takes at a time: sorted, summed, and ids of each.
_SAMPLING_BYTES = 72
# Rows of a forward from which native code is worth further threads even for the smallest experts.
_WIDE_ROWS = 96
# Slots' worth of memory that reading one expert takes where it is decoded.
_DECODED_SLOTS = 5
# What kernels on the CPU keep for rows in their own order.
_KERNEL_BYTES = 9 * 2**20
# The family's ids, for checkpoints that name none (models.md 1.1).
_DEFAULT_MASK_ID = 156895
_DEFAULT_EOS_ID = 156892


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One answer. `token_ids`: without the prompt, up to and including eos. `finish_reason`: stop
    (eos, a stop id or string, the end of a grammar) or length. `text`: without special tokens and
    stop string; None where the checkpoint has no tokenizer. `probabilities`: one for each token,
    what the model gave it when it was committed."""

    text: str | None
    token_ids: list[int]
    finish_reason: str
    stats: GenerationStats
    probabilities: list[float]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One denoising step as seen from outside.

    `token_ids` and `is_masked` are the block at work, whose first position is `block_start`
    counted from the start of the prompt; `changes` what this step did. `text` is the answer so
    far: it only grows, and no later step changes it; `answer_ids` are the tokens it comes from,
    `answer_probabilities` what the model gave each when it was committed (1 where a grammar left no
    choice). `result` is set on the last event.
    """

    block_id: int
    step_id: int
    block_start: int
    token_ids: tuple[int, ...]
    is_masked: tuple[bool, ...]
    changes: tuple[TokenChange, ...]
    is_block_done: bool
    text: str | None
    answer_ids: tuple[int, ...]
    answer_probabilities: tuple[float, ...]
    result: GenerationResult | None

    @property
    def num_masked(self) -> int:
        return sum(self.is_masked)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Everything about an engine that is settled before a weight is read.

    `gpu`: the one that experts go to, None where there is none; `gpu_plan` goes with it.
    `low_pack`: the second model of `lossy mixed`.
    """

    config: EngineConfig
    path: Path
    checkpoint: Checkpoint
    family: Family
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    sampling_defaults: SamplingParams
    max_model_len: int
    hardware: HardwareProfile
    hardware_source: str
    sizes: "WeightSizes"
    gpu: Gpu | None
    memory_plan: MemoryPlan
    gpu_plan: GpuMemoryPlan | None
    policy: OffloadPolicy
    lossy: LossyRule | None
    low_pack: LowPrecisionPack | None

    def resolve(self, params: SamplingParams, num_prompt_tokens: int) -> DecodingParams:
        """What a request for so many tokens behind a prompt is decoded by.

        Raises: ConfigError, InputError for what this model cannot do.
        """
        given = params
        params = _with_canvas(self.model_config.decoding, params, num_prompt_tokens).with_defaults(
            self.sampling_defaults
        )
        algorithms = self.model_config.decoding.algorithms
        if params.algorithm is not None and params.algorithm not in algorithms:
            raise ConfigError(
                f"algorithm is {params.algorithm!r}; allowed for this model: "
                f"{', '.join(algorithms)}"
            )
        check_looked_at(given, params, algorithms)
        resolved = DecodingParams.resolve(params)
        _check_canvas(self.model_config.decoding, resolved, num_prompt_tokens)
        vocab_size = self.model_config.vocab_size
        if not self.model_config.decoding.canvas_length:
            check_int("mask_token_id", resolved.mask_token_id, minimum=0, maximum=vocab_size - 1)
        for control_id in resolved.control_ids:
            check_int("control token id", control_id, minimum=0, maximum=vocab_size - 1)
        if resolved.pad_token_id is not None:
            check_int("pad_token_id", resolved.pad_token_id, minimum=0, maximum=vocab_size - 1)
        for token_id in (resolved.eos_token_id, *resolved.stop_token_ids):
            if token_id is not None:
                name = "eos_token_id" if token_id == resolved.eos_token_id else "stop_token_ids"
                check_int(name, token_id, minimum=0, maximum=vocab_size - 1)
            if token_id == resolved.mask_token_id:
                raise ConfigError(f"token {token_id} is given as the mask and as an end token")
        num_tokens = num_prompt_tokens + resolved.max_tokens
        if num_tokens > self.max_model_len:
            raise InputError(
                f"max_tokens is {resolved.max_tokens}, which with {num_prompt_tokens} prompt "
                f"tokens makes {num_tokens}; allowed: max_model_len {self.max_model_len}; shorten "
                "the prompt, lower max_tokens or raise max_model_len"
            )
        check_int("block_length", resolved.block_length, minimum=1, maximum=self.max_model_len)
        only = self.model_config.decoding.block_length
        if only is not None and resolved.block_length != only:
            raise ConfigError(
                f"block_length is {resolved.block_length}; allowed for this model: {only}, its "
                "block_size, for it routes by blocks"
            )
        if resolved.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, which this checkpoint lacks")
        return resolved


def plan_engine(
    model: str | Path, config: EngineConfig, *, hub_cache: Path | None = None
) -> EnginePlan:
    """Find a model, read its small files and headers, and settle how it is run.

    Raises: all that `Engine` raises but for weights that cannot be read.
    """
    path = find_model(model, hub_cache=hub_cache)
    checkpoint = Checkpoint.open(path)
    family = find_family(checkpoint.config)
    model_config = family.config(checkpoint.config)
    tokenizer = Tokenizer.load(path)
    max_model_len = config.max_model_len or min(model_config.max_positions, DEFAULT_MODEL_LEN)
    if max_model_len > model_config.max_positions:
        raise ConfigError(
            f"max_model_len is {max_model_len}; allowed: 1 to "
            f"{model_config.max_positions}, the model's max_position_embeddings"
        )
    hardware, hardware_source = _find_hardware(config)
    sizes = WeightSizes.of(checkpoint, family, model_config, config)
    gpu = open_gpu() if config.device == "cuda" else None
    lossy = lossy_of(config, model_config)
    low_pack = open_low_precision(config, model_config, sizes.layout, hub_cache)
    low_slots = low_slots_of(lossy, low_pack, model_config)
    memory_plan, gpu_plan = _plan_here(
        config, model_config, sizes, max_model_len, hardware, gpu, low_slots
    )
    shape, costs = memory_plan.shape, CostModel.from_profile(hardware, sizes.layout.weight_bytes)
    return EnginePlan(
        config=config,
        path=path,
        checkpoint=checkpoint,
        family=family,
        model_config=model_config,
        tokenizer=tokenizer,
        sampling_defaults=sampling_defaults_of(checkpoint, model_config, tokenizer),
        max_model_len=max_model_len,
        hardware=hardware,
        hardware_source=hardware_source,
        sizes=sizes,
        gpu=gpu,
        memory_plan=memory_plan,
        gpu_plan=gpu_plan,
        policy=_policy_of(config, shape, costs, model_config.decoding.policy),
        lossy=lossy,
        low_pack=low_pack,
    )


class Engine:
    """A loaded model with its experts offloaded.

    `model`: `demo`, a directory, or a hub id in the local cache. Several threads may call
    `generate` and `stream`; their answers are made one after another. A `Scheduler` has requests
    share forwards. `progress(what, done, total)` is told of long loading.

    Raises: ModelNotFoundError, CheckpointError, ConfigError, DoesNotFitError; nothing stays loaded
    then.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        hub_cache: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config is {config!r}; allowed: EngineConfig, None")
        self.plan = plan = plan_engine(model, config or EngineConfig(), hub_cache=hub_cache)
        checkpoint, family, sizes, gpu = plan.checkpoint, plan.family, plan.sizes, plan.gpu
        self.config = config = plan.config
        self.path, self.model_config = plan.path, plan.model_config
        self.tokenizer, self.sampling_defaults = plan.tokenizer, plan.sampling_defaults
        self.max_model_len = plan.max_model_len
        self.hardware, self.hardware_source = plan.hardware, plan.hardware_source
        self.memory_plan, self.gpu_plan = plan.memory_plan, plan.gpu_plan
        self.policy, self.lossy = plan.policy, plan.lossy
        self._grammars = GrammarCompiler(self.tokenizer, self.model_config.vocab_size)
        low_pack = plan.low_pack
        self.low_form = None if low_pack is None else expert_dtype_name(low_pack.layout)
        if low_pack is not None:
            low_pack.check_source(checkpoint, family, self.model_config)
        weights, store = read_weights(
            checkpoint,
            map_weight=family.weight_map(self.model_config),
            shapes=family.parameter_shapes(self.model_config),
            num_moe_layers=self.model_config.num_moe_layers,
            num_experts=self.model_config.num_experts,
            hidden_size=self.model_config.hidden_size,
            intermediate_size=self.model_config.moe_intermediate_size,
            dtype=sizes.layout.dtype,
            keep_dtype=family.kept_dtypes(self.model_config),
            method=self.hardware.disk_method,
            activation=self.model_config.activation,
        )
        if gpu is not None:
            _move(weights, gpu.device)
        low = None
        if low_pack is not None and self.memory_plan.low is not None:
            assert self.lossy is not None and self.lossy.precision is not None
            low_store = low_pack.open_store(self.model_config, self.hardware.disk_method)
            low = LowStore(self.lossy.precision, low_store, self.memory_plan.low)
        outer_threads = _torch_threads.before_engines()
        is_small = sizes.layout.weight_bytes < SMALL_EXPERT_BYTES
        num_threads = config.threads or (1 if is_small else outer_threads)
        self._wide_threads = config.threads or outer_threads
        self._tiers = build_tiers(
            config,
            self.memory_plan,
            self.policy,
            store,
            self.hardware,
            num_threads=num_threads,
            progress=progress,
            gpu=gpu,
            num_pinned=self.gpu_plan.num_pinned if self.gpu_plan else 0,
            low=low,
        )
        self._tiers.experts.lossy = self.lossy
        self._low_expert_bytes = 0 if low_pack is None else low_pack.layout.weight_bytes
        # An engine that fails here or is dropped unclosed must not leave its threads behind.
        _torch_threads.enter()
        self._release = weakref.finalize(self, _release, self._tiers.close)
        try:
            self.model = family.build(
                self.model_config,
                weights,
                self._tiers.experts,
                dtype=sizes.layout.dtype,
                # A request's last block may run past the context; blocks are no longer than it.
                num_positions=2 * self.max_model_len,
            )
        except BaseException:
            self._release()
            raise
        if gpu is not None and config.cuda_graphs:
            self.model.run_piece = RecordedPieces(gpu.make_graphs())
        self.dtype = sizes.layout.dtype
        self.outcome_observers: list[Callable[[ForwardOutcome], None]] = []
        self._decoder = BlockDiffusionDecoder(
            self.model,
            start_forward=self.start_forward,
            end_forward=self._end_forward,
            new_sequence=new_sequence_of(self.model_config.decoding, self.model),
        )
        self.wants_input_embedding = "input_embedding" in self.policy.needs
        self._turn = threading.Lock()
        self._turn_owner: threading.Thread | None = None
        self._process_id = os.getpid()
        self._num_requests = 0
        self._warned_of: set[str] = set()
        self._running: set[int] = set()
        self.num_threads = num_threads
        torch.set_num_threads(num_threads)
        self._native = native_kernels() if self.dtype == torch.bfloat16 else None
        if self._native is not None:
            self._native.num_threads = num_threads

    @property
    def cache(self) -> ExpertCache:
        """Who is resident; for looking at."""
        return self._tiers.experts.cache

    @property
    def dtype_words(self) -> str:
        """What weights are held in: `bfloat16`, or `experts int4-g64, the rest bfloat16`."""
        return dtype_words(self.experts.pool.arena.layout)

    @property
    def wants_input_embedding(self) -> bool:
        """Whether contexts carry the embeddings of their tokens."""
        return self._decoder.wants_input_embedding

    @wants_input_embedding.setter
    def wants_input_embedding(self, is_wanted: bool) -> None:
        self._decoder.wants_input_embedding = is_wanted

    @property
    def wants_all_logits(self) -> bool:
        """Whether confidences are computed for all positions of a block, not just those needed."""
        return self._decoder.wants_all_logits

    @wants_all_logits.setter
    def wants_all_logits(self, is_wanted: bool) -> None:
        self._decoder.wants_all_logits = is_wanted

    @property
    def experts(self) -> OffloadedExperts:
        """The offloaded experts; observers of demands and plans are added here."""
        return self._tiers.experts

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> GenerationResult:
        """Answer one prompt. A string is taken as it is, without a chat template.

        Raises: InputError for a prompt that cannot be run, ConfigError for parameters.
        """
        result = None
        for event in self.stream(prompt, params):
            result = event.result
        assert result is not None
        return result

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[StepEvent]:
        """Answer one prompt, one event per denoising step; the last carries the result.

        The prompt is checked at once; the engine is busy from the first event until the last, or
        until the iterator is closed. Raises: as `generate`.
        """
        return self._run(self.check(prompt, params))

    def close(self) -> None:
        """Release memory, files and threads."""
        if self._release.alive:
            self._release()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, prepared: "PreparedRequest") -> Iterator[StepEvent]:
        self._check_turn()
        # `with`, so that an interrupt finds no moment at which the turn is nobody's to give back.
        with self._turn:
            try:
                self._turn_owner = threading.current_thread()
                yield from self._decode(prepared)
            finally:
                self._turn_owner = None

    def _decode(self, prepared: "PreparedRequest") -> Iterator[StepEvent]:
        request = self._begin(prepared)
        try:
            while request.num_to_prefill:
                self._prefill([request])
            is_last = False
            while not is_last:
                (event,) = self._denoise([request])
                if request.sequence.error is not None:
                    raise request.sequence.error
                is_last = event.result is not None
                yield event
        finally:
            self._end(request)

    # Several requests at a time, for whoever decides which go together

    def check(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> "PreparedRequest":
        """A prompt and parameters as they will be run, once. Raises: as `generate`."""
        if params is not None and not isinstance(params, SamplingParams):
            raise ConfigError(f"params is {params!r}; allowed: SamplingParams, None")
        self._check_open()
        prompt_ids = self._prompt_ids(prompt)
        resolved = self.plan.resolve(params or SamplingParams(), len(prompt_ids))
        constraint = None
        if resolved.grammar is not None:
            constraint = self._grammars.constraint(resolved)
            self._say_what_rules(resolved.algorithm)
        return PreparedRequest(prompt_ids, resolved, constraint)

    def _say_what_rules(self, algorithm: str) -> None:
        """Warn once of a rule that does not hold under a grammar."""
        if algorithm not in HONOURED_ALGORITHMS and algorithm not in self._warned_of:
            self._warned_of.add(algorithm)
            logger.warning(
                "under a grammar tokens are accepted by threshold and steps, not by the rule of %s",
                algorithm,
            )

    def begin(self, prepared: "PreparedRequest") -> "RunningRequest":
        """Give a request its keys and values. It is `end`ed whatever becomes of it."""
        with self._own_turn():
            return self._begin(prepared)

    def prefill(self, requests: "Sequence[RunningRequest]") -> None:
        """One forward over the next part of each request's prompt (`num_to_prefill` tokens)."""
        with self._own_turn():
            self._prefill(requests)

    def denoise(self, requests: "Sequence[RunningRequest]") -> list[StepEvent]:
        """One step of each request in one forward; their blocks are equally long.

        A prompt of which one prefill forward's tokens are left rides along.
        """
        with self._own_turn():
            return self._denoise(requests)

    def end(self, request: "RunningRequest") -> None:
        """A request has its result or is given up: nothing of it is left. May be called again."""
        with self._own_turn():
            self._end(request)

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        self._check_turn()
        with self._turn:
            yield

    def _begin(self, prepared: "PreparedRequest") -> "RunningRequest":
        text = _TextStream(self.tokenizer, prepared.params.stop)
        request_id = self._num_requests
        self._num_requests += 1
        with cuda_errors("while generating"):
            sequence = self._decoder.begin(
                prepared.prompt_ids,
                prepared.params,
                request_id=request_id,
                stop_rule=text.stop_rule if prepared.params.stop else never_stop,
                constraint=prepared.constraint,
            )
        self._running.add(request_id)
        return RunningRequest(request_id, sequence, text, ExpertCounters())

    def _prefill(self, requests: "Sequence[RunningRequest]") -> None:
        with self._counting(requests), cuda_errors("while generating"):
            self._decoder.prefill([request.sequence for request in requests])

    def _denoise(self, requests: "Sequence[RunningRequest]") -> list[StepEvent]:
        with self._counting(requests), cuda_errors("while generating"):
            steps = self._decoder.denoise([request.sequence for request in requests])
        return [self._event(*pair) for pair in zip(requests, steps, strict=True)]

    def _end(self, request: "RunningRequest") -> None:
        if request.request_id in self._running:
            self._running.remove(request.request_id)
            self.cache.end_request(request.request_id)
            if self.lossy is not None:
                self.lossy.end_request(request.request_id)
            if not self._running:
                # A fifth of a millisecond, for which nobody should wait.
                self.cache.check()

    @contextmanager
    def _counting(self, requests: "Sequence[RunningRequest]") -> Iterator[None]:
        """Whatever happens meanwhile counts for each of the requests."""
        pool, experts = self._tiers.pool, self.experts
        planning_start_s, num_cancelled = experts.planning_s, pool.num_cancelled

        def observe(demand: LayerDemand, plan: LayerPlan) -> None:
            num_ready = pool.num_staged_ready
            for request in requests:
                request.experts(demand, plan, num_ready)

        def copied_ahead(copies: CopyPlan) -> None:
            for request in requests:
                request.experts.copied_ahead(copies)

        experts.observers.append(observe)
        experts.copy_observers.append(copied_ahead)
        try:
            yield
        finally:
            experts.observers.remove(observe)
            experts.copy_observers.remove(copied_ahead)
            for request in requests:
                request.planning_s += experts.planning_s - planning_start_s
                request.experts.cancelled(pool.num_cancelled - num_cancelled)

    def _event(self, request: "RunningRequest", step: DecodingStep) -> StepEvent:
        request.num_answer_tokens = len(step.answer_ids)
        text, result = request.text.so_far(step.answer_ids), None
        if step.is_last:
            stats = generation_stats(
                request.sequence.counters,
                request.experts,
                num_tokens=len(step.answer_ids),
                expert_bytes=self._tiers.layout.weight_bytes,
                max_resident_experts=self._tiers.pool.num_filled,
                expert_memory_bytes=self.memory_plan.expert_memory_bytes,
                planning_s=request.planning_s,
                choices=None if self.lossy is None else self.lossy.counts_of(request.request_id),
                low_expert_bytes=self._low_expert_bytes,
            )
            text = request.text.final(step.answer_ids)
            result = GenerationResult(
                text,
                list(step.answer_ids),
                step.finish_reason or "length",
                stats,
                list(step.answer_probabilities),
            )
        return StepEvent(
            step.block_id,
            step.step_id,
            step.block_start,
            step.token_ids,
            step.is_masked,
            step.changes,
            step.is_block_done,
            text,
            step.answer_ids,
            step.answer_probabilities,
            result,
        )

    def start_forward(self, context: ForwardContext) -> None:
        """Before each forward, whoever drives the model: sets copies going and threads right."""
        # Native code brings threads of its own. Those of torch would wait for their next work
        # busily, on the cores that it needs: with few rows torch has little to do that is worth it.
        is_native = context.num_tokens <= max_native_rows(self._native, self.dtype)
        torch.set_num_threads(1 if is_native else self.num_threads)
        if self._native is not None:
            is_wide = context.num_tokens >= _WIDE_ROWS
            self._native.num_threads = self._wide_threads if is_wide else self.num_threads
        self.experts.start_forward(context)

    def _end_forward(self, outcome: ForwardOutcome) -> None:
        self.experts.end_forward(outcome)
        for observer in self.outcome_observers:
            observer(outcome)

    def _check_open(self) -> None:
        if not self._release.alive:
            raise OledMoeError("the engine is closed; make a new one")
        check_process(self._process_id, "made the engine", "make the engine after the fork")

    def _check_turn(self) -> None:
        self._check_open()
        if self._turn_owner is threading.current_thread():
            raise OledMoeError(
                "this thread is still streaming an answer from this engine; finish or close that "
                "iterator first"
            )

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError(
                    f"{self.path} has no tokenizer.json; give the prompt as a list of token ids"
                )
            prompt = self.tokenizer.encode(prompt)
        vocab_size = self.model_config.vocab_size
        try:
            prompt_ids = [index(token_id) for token_id in prompt]
        except TypeError:
            raise InputError("the prompt must be a string or a list of whole numbers") from None
        for position, token_id in enumerate(prompt_ids):
            if not 0 <= token_id < vocab_size:
                raise InputError(
                    f"prompt token {position} is {token_id}; allowed: 0 to {vocab_size - 1}"
                )
        return prompt_ids


class _TorchThreads:
    """How many threads torch had before the engines of this process.

    Each sets the number for its forwards, so what torch says while another lives is that one's.
    The last to end gives back what was.
    """

    def __init__(self) -> None:
        # One that may be taken again: an engine can be found unused while another enters.
        self._lock = threading.RLock()
        self._num_engines = 0
        self._before = 0

    def before_engines(self) -> int:
        with self._lock:
            return self._before if self._num_engines else torch.get_num_threads()

    def enter(self) -> None:
        with self._lock:
            self._before = self.before_engines()
            self._num_engines += 1

    def leave(self) -> None:
        with self._lock:
            self._num_engines -= 1
            if not self._num_engines:
                torch.set_num_threads(self._before)


_torch_threads = _TorchThreads()


def _release(close_tiers: Callable[[], None]) -> None:
    """End an engine, closed or dropped; without a reference to it."""
    try:
        close_tiers()
    finally:
        _torch_threads.leave()


def _with_canvas(
    family: FamilyDecoding, params: SamplingParams, num_prompt_tokens: int
) -> SamplingParams:
    """A request for so many positions as one for so many tokens."""
    length = params.canvas_length
    if length is None:
        return params
    if not family.is_whole:
        raise ConfigError(
            f"canvas_length is {length}; this model denoises block after block: give max_tokens"
        )
    if params.max_tokens is not None:
        raise ConfigError("canvas_length and max_tokens are both given; give one of them")
    num_taken = num_prompt_tokens + family.num_reserved
    if length <= num_taken:
        raise InputError(
            f"canvas_length is {length}; allowed: more than {num_taken}, the prompt's "
            f"{num_prompt_tokens} tokens and what is reserved; shorten the prompt"
        )
    return replace(params, max_tokens=length - num_taken, canvas_length=None)


def _check_canvas(family: FamilyDecoding, params: DecodingParams, num_prompt_tokens: int) -> None:
    """Refuse what has no canvas with this family's models."""
    if num_prompt_tokens < family.shift:
        raise InputError(
            "the prompt is empty; this model tells each token from the one before it: give "
            "one at least"
        )
    if params.eos_at_end and not family.num_reserved:
        raise ConfigError(
            "eos_at_end is True; allowed: with models that reserve a last slot (RND1)"
        )
    if params.canvas_cache != "none" and (not family.is_whole or family.shift):
        raise ConfigError(
            f"canvas_cache is {params.canvas_cache!r}; allowed for this model: none; it is for "
            "models that see a whole canvas and fill it block after block (LLaDA-MoE)"
        )
    if params.cont_weight and (not family.is_whole or family.shift):
        raise ConfigError(
            f"cont_weight is {params.cont_weight:g}; allowed for this model: 0; it is for "
            "models that see a whole canvas and fill it block after block (LLaDA-MoE)"
        )
    if family.canvas_length:
        _check_random_canvas(family, params)
    last = "eos_token_id" if params.eos_at_end else "pad_token_id"
    if family.num_reserved and getattr(params, last) is None:
        raise ConfigError(
            f"{last} is in neither the parameters, config.json, generation_config.json nor "
            "the tokenizer, and this model's last slot needs it; give it as a parameter"
        )


def _check_random_canvas(family: FamilyDecoding, params: DecodingParams) -> None:
    """Refuse what means nothing for a canvas of random tokens."""
    if params.block_length != family.canvas_length:
        raise ConfigError(
            f"block_length is {params.block_length}; allowed: {family.canvas_length}, this model's "
            "canvas; leave it out"
        )
    if params.confidence != "tempered":
        raise ConfigError(
            f"confidence is {params.confidence!r}; allowed with this model: tempered; leave it out"
        )
    if params.top_k is not None or params.top_p not in (None, 1):
        raise ConfigError(
            "top_k or top_p is given; this model's tokens are drawn from all of its vocabulary: "
            "leave them out"
        )
    if params.grammar is not None:
        raise ConfigError(
            f"{params.grammar.title} is given; this model replaces tokens until the last step, "
            "which no grammar here can follow: leave it out, or take a model with masks"
        )


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A prompt and parameters that the engine can run, once: the constraint keeps its place."""

    prompt_ids: list[int]
    params: DecodingParams
    constraint: Constraint | None = None


@dataclass(slots=True)
class RunningRequest:
    """A request that has its keys and values. `experts` counts the forwards it took part in, those
    that it shared with others included; `planning_s` is the time that deciding took in them;
    `num_answer_tokens` are final."""

    request_id: int
    sequence: DecodingSequence
    text: "_TextStream"
    experts: ExpertCounters
    planning_s: float = 0.0
    num_answer_tokens: int = 0

    @property
    def num_to_prefill(self) -> int:
        """Prompt tokens of its next prefill forward; 0 once it can be denoised."""
        return self.sequence.num_to_prefill

    @property
    def num_left_to_prefill(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return self.sequence.num_left_to_prefill

    @property
    def block_length(self) -> int:
        """Requests of the same share forwards; 0 for canvases, whatever their blocks."""
        return self.sequence.block_length

    @property
    def num_step_tokens(self) -> int:
        """Tokens that one step of it feeds to the model."""
        return self.sequence.num_step_tokens

    @property
    def num_positions(self) -> int:
        """Positions that its keys and values have room for."""
        return self.sequence.kv.capacity


class _TextStream:
    """Text of the finished part of one answer, held back where later tokens could change it."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._decoded: tuple[int, str] = (0, "")

    def stop_rule(self, answer_ids: Sequence[int]) -> int | None:
        """How many tokens hold the first stop string to its end; None where there is none."""
        assert self._tokenizer is not None
        if self._stop_start(self._tokenizer.decode(answer_ids)) is None:
            return None
        num_kept = len(answer_ids)
        for length in range(len(answer_ids), 0, -1):
            if self._stop_start(self._tokenizer.decode(answer_ids[:length])) is None:
                break
            num_kept = length
        return num_kept

    def so_far(self, answer_ids: Sequence[int]) -> str | None:
        """Text that stays: no half character, no stop string nor what may become one."""
        if self._tokenizer is None:
            return None
        if self._decoded[0] != len(answer_ids):
            text = self._tokenizer.decode(answer_ids).rstrip("\ufffd")
            start = self._stop_start(text)
            end = len(text) - self._held_back(text) if start is None else start
            self._decoded = (len(answer_ids), text[:end])
        return self._decoded[1]

    def final(self, answer_ids: Sequence[int]) -> str | None:
        """Text of the whole answer without the stop string."""
        if self._tokenizer is None:
            return None
        text = self._tokenizer.decode(answer_ids)
        start = self._stop_start(text)
        return text if start is None else text[:start]

    def _stop_start(self, text: str) -> int | None:
        starts = [start for start in (text.find(stop) for stop in self._stop) if start >= 0]
        return min(starts, default=None)

    def _held_back(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, len(stop))
                if text.endswith(stop[:length])
            ),
            default=0,
        )


def sampling_defaults_of(
    checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer | None
) -> SamplingParams:
    """What the checkpoint says: ids from config.json first, then generation_config.json."""
    from_config: dict[str, Any] = {}
    names = ("mask_token_id", "eos_token_id", "pad_token_id", "delete_token_id", "split_token_id")
    for name in names:
        value = checkpoint.config.get(name)
        if isinstance(value, int | list) and not isinstance(value, bool):
            from_config[name] = value
    try:
        ids = sampling_from_generation_config(from_config)
        rest = sampling_from_generation_config(checkpoint.generation_config)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    found = ids.with_defaults(rest)
    # Chats of SDAR end with the eos of generation_config.json, which config.json has another than.
    if rest.eos_token_id not in (None, found.eos_token_id, *(found.stop_token_ids or ())):
        stops = (*(found.stop_token_ids or ()), rest.eos_token_id)
        found = replace(found, stop_token_ids=[end for end in stops if end is not None])
    if None not in (found.delete_token_id, found.split_token_id):
        found = found.with_defaults(EDITING_DEFAULTS)
    found = found.with_defaults(config.decoding.defaults)
    if tokenizer is not None:
        found = found.with_defaults(
            SamplingParams(
                mask_token_id=tokenizer.mask_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    if config.vocab_size > _DEFAULT_MASK_ID and not config.decoding.canvas_length:
        family = SamplingParams(mask_token_id=_DEFAULT_MASK_ID, eos_token_id=_DEFAULT_EOS_ID)
        found = found.with_defaults(family)
    return found


def _find_hardware(config: EngineConfig) -> tuple[HardwareProfile, str]:
    """The profile to decide by, and where it comes from."""
    if isinstance(config.hardware, HardwareProfile):
        return config.hardware, "given"
    if isinstance(config.hardware, str | Path):
        return load_hardware(config.hardware), str(config.hardware)
    if config.hardware is not None:
        raise ConfigError(
            f"hardware is {config.hardware!r}; allowed: a HardwareProfile, the path of one, None"
        )
    path = default_profile_path(config.device)
    if path.is_file():
        return load_profile(path), str(path)
    return DEFAULT_PROFILES[config.device], "not measured: run `oled-moe doctor`"


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """What the headers say about sizes, before anything is read. Units: bytes.

    `read_slots`: how many slots' worth of memory a thread takes that reads one expert.
    """

    layout: ExpertLayout
    dense_bytes: int
    read_slots: int = 1

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, family: Family, config: ModelConfig, wanted: EngineConfig
    ) -> "WeightSizes":
        weight_map, kept = family.weight_map(config), family.kept_dtypes(config)
        pack = checkpoint.pack
        stored, dense = torch.bfloat16 if pack is None else pack.layout.dtype, []
        is_encoded = False
        for record in checkpoint.tensors.values():
            try:
                target = weight_map(record.name)
            except KeyError:
                continue
            if isinstance(target, ExpertPart):
                stored = record.dtype
                is_encoded = is_encoded or isinstance(record, EncodedRecord)
            elif target is not None:
                dense.append((target, record))
        dtype: torch.dtype = getattr(torch, wanted.dtype) if wanted.dtype else stored
        dense_bytes = sum(
            record.num_bytes
            if target in kept
            else record.num_bytes // record.dtype.itemsize * dtype.itemsize
            for target, record in dense
        )
        quant = None if pack is None else pack.layout.quant
        layout = ExpertLayout(
            config.hidden_size, config.moe_intermediate_size, dtype, config.activation, quant
        )
        is_converted = dtype != stored and quant is None
        # What is decoded passes through whole numbers and float32, one matrix at a time.
        read_slots = _DECODED_SLOTS if is_encoded else 2 if is_converted else 1
        return cls(layout, dense_bytes, read_slots)


def dtype_words(layout: ExpertLayout) -> str:
    """What a model's weights are held in, given how its experts lie in slots."""
    rest, experts = str(layout.dtype).removeprefix("torch."), expert_dtype_name(layout)
    return rest if layout.quant is None else f"experts {experts}, the rest {rest}"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """RAM that this process holds, and that it may still take, at one moment. Units: bytes."""

    process_bytes: int
    usable_bytes: int

    @classmethod
    def now(cls) -> "ProcessMemory":
        return cls(process_memory_bytes(), usable_memory_bytes())


def plan_model(
    config: EngineConfig,
    model: ModelConfig,
    sizes: WeightSizes,
    max_model_len: int,
    hardware: HardwareProfile,
    low: LowSlots | None = None,
    *,
    found: ProcessMemory | None = None,
) -> MemoryPlan:
    """The memory plan of a model, from its config and headers alone, in RAM; `low` are slots for
    its experts in a lower precision; `found`: None for what this process has and may take now.

    Raises: ConfigError, DoesNotFitError (see `plan_memory`).
    """
    found = found or ProcessMemory.now()
    shape, memory = _needs(config, model, sizes, max_model_len, hardware, found, low)
    plan = plan_memory(config, shape, memory, usable_bytes=found.usable_bytes, low=low)
    if low is not None and plan.low is None:
        # Nothing is read from the second model, which the emulated device would hold in RAM.
        return plan_model(config, model, sizes, max_model_len, hardware, found=found)
    return plan


def plan_on_gpu(
    config: EngineConfig,
    model: ModelConfig,
    sizes: WeightSizes,
    max_model_len: int,
    hardware: HardwareProfile,
    *,
    gpu_bytes: int,
    found: ProcessMemory | None = None,
) -> GpuMemoryPlan:
    """The memory plan of a model on a GPU of which `gpu_bytes` are free, and the RAM behind it;
    `found` as in `plan_model`.

    Raises: as `plan_model`.
    """
    found = found or ProcessMemory.now()
    shape, memory = _needs(config, model, sizes, max_model_len, hardware, found)
    # Buffers that threads read through, one each, and one more where bytes are converted.
    num_copies = MOST_AHEAD + 1 + hardware.disk_queue_depth
    bounce_bytes = num_copies * shape.expert_bytes * sizes.read_slots
    memory = replace(memory, buffer_bytes=bounce_bytes)
    usable_bytes = found.usable_bytes
    # Pinned memory is nobody else's, and the system cannot take it back.
    ram_bytes = usable_bytes - min(SYSTEM_RESERVE_BYTES, usable_bytes // 10)
    ram_bytes += memory.process_bytes
    return plan_gpu_memory(config, shape, memory, gpu_bytes=gpu_bytes, ram_bytes=ram_bytes)


def _plan_here(
    config: EngineConfig,
    model: ModelConfig,
    sizes: WeightSizes,
    max_model_len: int,
    hardware: HardwareProfile,
    gpu: Gpu | None,
    low: LowSlots | None,
) -> tuple[MemoryPlan, GpuMemoryPlan | None]:
    """The plan of the memory that slots are in, and where that is a GPU's the whole plan."""
    if gpu is None:
        return plan_model(config, model, sizes, max_model_len, hardware, low), None
    plan = plan_on_gpu(config, model, sizes, max_model_len, hardware, gpu_bytes=gpu.free_bytes)
    return plan.gpu, plan


def _move(weights: dict[str, torch.Tensor], device: torch.device) -> None:
    """Bring weights to a GPU one by one, so that they are never there twice. Mutates: weights."""
    with cuda_errors("while loading non-expert weights"):
        for name in list(weights):
            weights[name] = weights[name].to(device)


def _needs(
    config: EngineConfig,
    model: ModelConfig,
    sizes: WeightSizes,
    max_model_len: int,
    hardware: HardwareProfile,
    found: ProcessMemory,
    low: LowSlots | None = None,
) -> tuple[MoeShape, ModelMemory]:
    """Sizes of the experts, and what a model needs besides their slots."""
    layout, itemsize = sizes.layout, sizes.layout.dtype.itemsize
    shape = MoeShape(model.num_moe_layers, model.num_experts, model.top_k, layout.slot_bytes)
    kv_per_token = model.kv_size * itemsize
    # A forward holds, per token, the routed rows and their outputs, a few hidden vectors and a
    # mask; a step holds the logits of every sequence's block, and what sampling makes of a few
    # rows. A canvas is one forward, whose logits are read a few rows at a time.
    num_rows = max(128 * config.max_num_seqs, min(max_model_len, MAX_PREFILL_TOKENS))
    num_logit_rows = PLANNED_BLOCK_LENGTH * config.max_num_seqs
    if model.decoding.is_whole:
        num_rows, num_logit_rows = max_model_len * config.max_num_seqs, LOGIT_ROWS
    num_positions = max_model_len
    if canvas := model.decoding.canvas_length:
        # Canvases, each with the one before it that is read, and a prompt that rides along.
        num_logit_rows = canvas * config.max_num_seqs
        num_rows = 2 * num_logit_rows + min(max_model_len, MAX_PREFILL_TOKENS)
        num_positions += canvas
    rows_bytes = num_rows * model.hidden_size * (2 * model.top_k * itemsize + 6 * itemsize + 8)
    rows_bytes += num_rows * max_model_len
    if canvas:
        # The MLP is wide, norms are fp32, masks are of two kinds, and what is drawn from takes two
        # tensors more of the size of a sequence's logits.
        rows_bytes += num_rows * (3 * model.intermediate_size * itemsize + 12 * model.hidden_size)
        rows_bytes += num_rows * max_model_len + 2 * 4 * model.vocab_size * canvas
    logits_bytes = 4 * model.vocab_size * num_logit_rows
    logits_bytes += _SAMPLING_BYTES * min(
        num_logit_rows * model.vocab_size, max(model.vocab_size, SAMPLING_SLICE)
    )
    # Routers are kept in fp32 where no native code multiplies them as they are stored.
    dense_bytes = sizes.dense_bytes + 2 * shape.num_experts_total * model.hidden_size
    # Scores, their softmax and one temporary of a slice of queries, in fp32.
    scores_bytes = 3 * 4 * model.num_heads * ATTENTION_SLICE * max_model_len
    is_emulated = config.device == "emulated"
    buffers = hardware.disk_queue_depth * layout.slot_bytes * sizes.read_slots
    bytes_in_ram = layout.slot_bytes + (0 if low is None else low.shape.expert_bytes)
    memory = ModelMemory(
        process_bytes=found.process_bytes,
        dense_bytes=dense_bytes,
        kv_bytes=kv_per_token * num_positions * config.max_num_seqs,
        activation_bytes=rows_bytes + logits_bytes + scores_bytes + _KERNEL_BYTES,
        buffer_bytes=0 if is_emulated else buffers,
        host_expert_bytes=shape.num_experts_total * bytes_in_ram if is_emulated else 0,
    )
    return shape, memory


def lossy_of(config: EngineConfig, model: ModelConfig) -> LossyRule | None:
    """The lossy rule that `config` names, for such a model. Raises: ConfigError."""
    if config.lossy is None:
        return None
    return build_lossy(config.lossy, num_experts=model.num_experts, top_k=model.top_k)


def open_low_precision(
    config: EngineConfig, model: ModelConfig, layout: ExpertLayout, hub_cache: Path | None = None
) -> LowPrecisionPack | None:
    """The headers of the pack that `config` names for `lossy mixed`; `layout` is the model's.

    Raises: as `LowPrecisionPack.open`.
    """
    if config.low_precision is None:
        return None
    return LowPrecisionPack.open(config.low_precision, model, layout, hub_cache=hub_cache)


def low_slots_of(
    rule: LossyRule | None, pack: LowPrecisionPack | None, model: ModelConfig
) -> LowSlots | None:
    """The slots that a rule asks for experts in a lower precision."""
    if rule is None or rule.precision is None or pack is None:
        return None
    expert_bytes = pack.layout.slot_bytes
    shape = MoeShape(model.num_moe_layers, model.num_experts, model.top_k, expert_bytes)
    return LowSlots.of(rule.precision.slots, shape)


def _policy_of(
    config: EngineConfig, shape: MoeShape, costs: CostModel, default: str
) -> OffloadPolicy:
    policy = default if config.policy is None else config.policy
    if isinstance(policy, str):
        return build_policy(policy, shape, costs)
    if isinstance(policy, OffloadPolicy):
        return policy
    raise ConfigError(f"policy is {policy!r}; allowed: a name or an OffloadPolicy")
