"""The experts of one Transformers model at work: forwards are told apart, counted and computed.

Transformers says which layer it is at and no more. What policies are told of forwards is made from
that, from the shape of the model's inputs and from what its key/value cache holds.
Legend: T tokens, D hidden, F hidden of one expert, K experts per token.
"""

import copy
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from oled_moe.devices import Tiers
from oled_moe.errors import ConfigError, OledMoeError
from oled_moe.integrations.expert_modules import OWNER, ExpertModules, put_back
from oled_moe.kernels.cpu import padded_rows
from oled_moe.lanes import check_process
from oled_moe.memory import MemoryPlan
from oled_moe.store import ExpertStore, SlotArena
from oled_moe.types import (
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    IntArray,
    LayerDemand,
    LayerPlan,
    Phase,
    TokenState,
)

IMPLEMENTATION = "oled_moe"
# Policies look at the last tokens of a prompt, this many, for what comes after it.
TAIL_LENGTH = 32
# Where a module's keyword arguments hold its tokens, one row a sequence.
_TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """What an offloaded model's experts have done so far, in all forwards.

    Every demand for an expert is one of `hits` (kept since an earlier use), `prefetched` (copied
    ahead, on its first use), `loads` and `cpu_runs`; they sum to `demanded`. `hit_rate` is over all
    of them. `resident_bytes`: what lies in slots now, never more than `slot_bytes`, the room for
    it, and that is never more than `budget_bytes`, what was granted. `max_resident_experts` counts
    slots ever filled. Units: bytes.
    """

    forwards: int
    demanded: int
    hits: int
    prefetched: int
    loads: int
    cpu_runs: int
    bytes_loaded: int
    resident_experts: int
    max_resident_experts: int
    num_experts: int
    expert_bytes: int
    resident_bytes: int
    slot_bytes: int
    budget_bytes: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.demanded if self.demanded else 0.0


class OwnGateKernel:
    """An ExpertKernel whose activation is what the model's modules do between the two products.

    `module` is the one at work, set before each layer: activations may differ between layers.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(
        self,
        arena: SlotArena,
        rows_ND: Tensor,
        out_ND: Tensor,
        slots: IntArray,
        starts: IntArray,
        ends: IntArray,
    ) -> None:
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            weights, num_rows = arena.weights(slot), end - start
            own_ND = rows_ND[start:end]
            if own_ND.dtype != torch.float32 and own_ND.device.type == "cpu":
                # To few sizes, for the reason that kernels/cpu.py gives.
                own_ND = F.pad(own_ND, (0, 0, 0, padded_rows(num_rows) - num_rows))
            gated_NF = self.module._apply_gate(F.linear(own_ND, weights.gate_up))
            out_ND[start:end] = F.linear(gated_NF, weights.down)[:num_rows]


class _Call(NamedTuple):
    """Tokens of a forward as the model was given them, and how many its key/value cache held
    before; None where there is no cache."""

    num_sequences: int
    num_tokens: int
    num_cached: int | None


@dataclass(slots=True)
class _Counts:
    """Everything demanded, in any phase."""

    forwards: int = 0
    demanded: int = 0
    hits: int = 0
    staged: int = 0
    loads: int = 0
    cpu_runs: int = 0

    def __call__(self, demand: LayerDemand, plan: LayerPlan) -> None:
        self.demanded += len(demand.expert_ids)
        self.hits += len(plan.hit_ids)
        self.staged += len(plan.staged_ids)
        self.loads += len(plan.load_ids)
        self.cpu_runs += len(plan.cpu_ids)


class ModelExperts:
    """The experts of one model: forwards are told apart, counted and computed here.

    Several threads may run the model: each layer is computed by one at a time, and results do not
    depend on who runs beside whom. What policies are told of forwards is right for one thread.
    """

    def __init__(
        self,
        found: ExpertModules,
        tiers: Tiers,
        store: ExpertStore,
        plan: MemoryPlan,
        kernel: OwnGateKernel | None,
        budget_bytes: int,
    ) -> None:
        self.shape = found.shape
        self.tiers = tiers
        self.outcome_observers: list[Callable[[ForwardOutcome], None]] = []
        self.model_type = "unknown"
        self._found = found
        self._store = store
        self._plan = plan
        self._kernel = kernel
        self._budget_bytes = budget_bytes
        self._counts = _Counts()
        tiers.experts.observers.append(self._counts)
        self._lock = threading.Lock()
        self._process_id = os.getpid()
        self._call: _Call | None = None
        # The forward under way and its last layer so far; then what the last one was like.
        self._context: ForwardContext | None = None
        self._layer = -1
        self._num_tokens = 0
        self._request_ids: tuple[int, ...] = ()
        self._num_requests = 0
        self._step = 0
        self._hooks: list[Any] = []
        self._configs: list[tuple[nn.Module, Any]] = []
        # Parts that may not save themselves meanwhile, with what they had to do it: None as a rule.
        self._savers: weakref.WeakKeyDictionary[PreTrainedModel, Any] = weakref.WeakKeyDictionary()
        self._release = weakref.finalize(self, _close_all, tiers, store)
        self._model: weakref.ref[PreTrainedModel] | None = None

    def attach(self, model: PreTrainedModel) -> None:
        """Have the model's expert modules compute here."""
        model.eval().requires_grad_(False)
        self.model_type = str(model.config.model_type)
        self._model = weakref.ref(model)
        setattr(model, OWNER, self)
        for layer, modules in enumerate(self._found.modules):
            for module in modules:
                self._configs.append((module, module.config))
                # A copy: the model's own is shared with whatever else was made from it.
                module.config = copy.copy(module.config)
                module.config._experts_implementation_internal = IMPLEMENTATION
                setattr(module, OWNER, (self, layer))
                self._hooks.append(module.register_state_dict_pre_hook(_refuse_saving))
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                hook = module.register_forward_pre_hook(self._see_call, with_kwargs=True)
                self._hooks.append(hook)
                # Refused before the config is written, which would be half a checkpoint.
                self._savers[module] = vars(module).get("save_pretrained")
                module.save_pretrained = _refuse_saving

    def restore(self) -> None:
        """Undo `attach`, and put the weights back."""
        model = self._model() if self._model is not None else None
        assert model is not None
        with self._lock:
            device = next((each.device for each in model.parameters()), torch.device("cpu"))
            put_back(self._found, self._store, device)
            for hook in self._hooks:
                hook.remove()
            for part, saver in self._savers.items():
                del part.save_pretrained
                if saver is not None:
                    part.save_pretrained = saver
            for module, config in self._configs:
                module.config = config
                delattr(module, OWNER)
            delattr(model, OWNER)
            self._release()

    def run(
        self, layer: int, module: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """The weighted sum of the experts' outputs, in the dtype of `hidden_TD`."""
        self._check(module, hidden_TD, ids_TK)
        if not len(hidden_TD):
            return torch.zeros_like(hidden_TD)
        mixing_TK = weights_TK.detach().float()
        total_T1 = mixing_TK.sum(-1, keepdim=True)
        gates_TK = mixing_TK / torch.where(total_T1 == 0, 1, total_T1)
        with self._lock, torch.no_grad():
            # Another thread may have restored the model meanwhile.
            self._check_open()
            if self._kernel is not None:
                self._kernel.module = module
            context = self._forward_of(layer, len(hidden_TD))
            experts = self.tiers.experts
            pending = experts.start(
                layer, hidden_TD.contiguous(), ids_TK.long().contiguous(), gates_TK, context
            )
            out_TD = experts.finish(pending, mixing_TK)
            if layer == self.shape.num_layers - 1:
                self._end_forward()
        return out_TD.to(hidden_TD.dtype)

    def stats(self) -> ExpertStats:
        with self._lock:
            cache, counts = self.tiers.experts.cache, self._counts
            expert_bytes = self.shape.expert_bytes
            num_staged = sum(len(cache.staged_ids(n)) for n in range(self.shape.num_layers))
            num_resident = cache.num_resident + num_staged
            return ExpertStats(
                forwards=counts.forwards,
                demanded=counts.demanded,
                hits=counts.hits,
                prefetched=counts.staged,
                loads=counts.loads,
                cpu_runs=counts.cpu_runs,
                bytes_loaded=counts.loads * self.tiers.layout.weight_bytes,
                resident_experts=num_resident,
                max_resident_experts=self.tiers.pool.num_filled,
                num_experts=self.shape.num_experts_total,
                expert_bytes=expert_bytes,
                resident_bytes=num_resident * expert_bytes,
                slot_bytes=self._plan.expert_memory_bytes,
                budget_bytes=self._budget_bytes,
            )

    def _check_open(self) -> None:
        if not self._release.alive:
            raise OledMoeError("the experts of this model are closed; offload it again")
        check_process(
            self._process_id,
            "offloaded the experts of this model",
            "load and offload the model after the fork",
        )

    def _check(self, module: nn.Module, hidden_TD: Tensor, ids_TK: Tensor) -> None:
        """Raises: OledMoeError for what offloaded experts cannot compute."""
        layout, memory = self.tiers.layout, self.tiers.pool.arena.memory
        self._check_open()
        if module.training:
            raise OledMoeError("offloaded experts are for inference only; call model.eval()")
        if hidden_TD.requires_grad and torch.is_grad_enabled():
            raise OledMoeError(
                "offloaded experts are for inference only, and their input asks for gradients; "
                "run the model under torch.no_grad()"
            )
        if hidden_TD.dtype != layout.dtype or hidden_TD.device.type != memory.device.type:
            raise OledMoeError(
                f"the experts were offloaded in {layout.dtype} for {memory.device.type} and are "
                f"given {hidden_TD.dtype} on {hidden_TD.device.type}; convert or move the model "
                "before its experts are offloaded"
            )
        if ids_TK.shape[1] != self.shape.top_k:
            raise OledMoeError(
                f"the router chose {ids_TK.shape[1]} experts for a token, the model's config says "
                f"{self.shape.top_k}; this model cannot be offloaded"
            )

    def _see_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A part of the model is about to run: note the batch and what its cache holds."""
        named = [kwargs[name] for name in _TOKEN_ARGUMENTS if isinstance(kwargs.get(name), Tensor)]
        tokens = named or [arg for arg in args[:1] if isinstance(arg, Tensor)]
        if not tokens or tokens[0].ndim < 2:
            return
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        num_cached = _num_cached(caches[0]) if caches else None
        self._call = _Call(tokens[0].shape[0], tokens[0].shape[1], num_cached)

    def _forward_of(self, layer: int, num_tokens: int) -> ForwardContext:
        """The forward that a layer's call belongs to: a new one where layers begin again."""
        context = self._context
        if context is not None and layer > self._layer and context.num_tokens == num_tokens:
            self._layer = layer
            return context
        if context is not None:
            self._end_forward()
        context = self._new_context(num_tokens)
        self.tiers.experts.start_forward(context)
        self._context, self._layer, self._num_tokens = context, layer, num_tokens
        return context

    def _new_context(self, num_tokens: int) -> ForwardContext:
        call = self._call
        if call is None or call.num_sequences * call.num_tokens != num_tokens:
            call = _Call(1, num_tokens, None)
        if call.num_cached is None:
            is_continued = num_tokens == self._num_tokens
        else:
            is_continued = call.num_cached > 0
        if not is_continued or len(self._request_ids) != call.num_sequences:
            self._begin_requests(call.num_sequences)
        phase = Phase.DENOISE if is_continued else Phase.PREFILL
        state = TokenState.COMMITTED if is_continued else TokenState.PROMPT
        rows = [
            ForwardRow(request_id, 0, self._step, phase, call.num_tokens)
            for request_id in self._request_ids
        ]
        self._step += 1
        positions = np.arange(call.num_tokens, dtype=np.int64) + (call.num_cached or 0)
        return ForwardContext(
            forward_id=self._counts.forwards,
            block_length=TAIL_LENGTH,
            rows=tuple(rows),
            token_confidence=np.ones(num_tokens, dtype=np.float32),
            token_state=np.full(num_tokens, state, dtype=np.uint8),
            token_position=np.tile(positions, call.num_sequences),
        )

    def _begin_requests(self, num_sequences: int) -> None:
        for request_id in self._request_ids:
            self.tiers.experts.cache.end_request(request_id)
        first = self._num_requests
        self._num_requests += num_sequences
        self._request_ids = tuple(range(first, self._num_requests))
        self._step = 0

    def _end_forward(self) -> None:
        assert self._context is not None
        outcome = ForwardOutcome.without_logits(self._context)
        self._context = None
        self._counts.forwards += 1
        self.tiers.experts.end_forward(outcome)
        for observer in self.outcome_observers:
            observer(outcome)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OledMoeError(
            "a model with offloaded experts cannot be copied or pickled: its experts are not in "
            "it; call restore_experts(model) first, or offload another"
        )


def _num_cached(cache: Cache) -> int | None:
    """Positions in a cache; None for one of linear attention alone, which does not count them."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return None


def _experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The implementation "oled_moe" of the experts interface. Shapes: [T, D], [T, K], [T, K]."""
    place = getattr(module, OWNER, None)
    if place is None:
        raise OledMoeError(
            f"experts implementation {IMPLEMENTATION!r} was chosen for a model whose experts are "
            "not offloaded; call oled_moe.integrations.transformers.offload_experts(model)"
        )
    owner, layer = place
    out: Tensor = owner.run(layer, module, hidden_states, top_k_index, top_k_weights)
    return out


# Not to be traced: which copies are made is decided as it runs.
_untraced = torch.compiler.disable(_experts_forward)  # type: ignore[no-untyped-call]  # torch's own
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _untraced)


def _refuse_saving(*args: object, **kwargs: object) -> NoReturn:
    raise OledMoeError(
        "the experts of this model are offloaded, so its weights cannot be saved from it; call "
        "restore_experts(model) first, or keep the checkpoint that it came from"
    )


def owner_of(model: Any) -> ModelExperts:
    owner = getattr(model, OWNER, None)
    if not isinstance(owner, ModelExperts):
        raise ConfigError(
            f"this {type(model).__name__} has no offloaded experts; call offload_experts(model)"
        )
    return owner


def _close_all(tiers: Tiers, store: ExpertStore) -> None:
    tiers.close()
    store.close()
