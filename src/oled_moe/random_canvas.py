"""RandomCanvasSequence: models without a mask, whose canvases begin as random tokens.

A step draws a token for every position, accepts those whose entropies together stay below a bound,
and puts new random tokens everywhere else, also where one was accepted before. What a finished
canvas says are the likeliest tokens of its last step; these are then read in order, like a prompt,
which rides along with the first step of the next canvas.
Source: Transformers, models/diffusion_gemma/generation_diffusion_gemma.py.
Legend: C positions of a canvas, V vocabulary, D hidden.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oled_moe.config import DecodingParams
from oled_moe.decoding import FRESH_CONFIDENCE, DecodingSequence, NewSequence, Part
from oled_moe.errors import OledMoeError
from oled_moe.layers import Logits
from oled_moe.models import ConditionedModel
from oled_moe.sampling import SAMPLING_SLICE, Guesses
from oled_moe.types import BoolArray, IntArray
from oled_moe.unmasking import BlockState, BlockUpdate

_LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class CanvasStep:
    """What a step made of a canvas. Shapes: [C] each.

    `token_ids` are those drawn; `is_accepted` says which of them stand in the next canvas.
    `best_ids` are the likeliest tokens, `confidence` float32 their probabilities.
    """

    token_ids: IntArray
    is_accepted: BoolArray
    best_ids: IntArray
    confidence: npt.NDArray[np.float32]


class RandomCanvas:
    """One canvas from random tokens to its end: `token_ids` int64 [C] is what the next forward is
    given, `condition` [D] of each position what it is told.

    All random numbers come from `generator`, in the order of the reference: C tokens, then for each
    step what is drawn and C tokens more.
    """

    def __init__(
        self, params: DecodingParams, model: ConditionedModel, generator: torch.Generator
    ) -> None:
        self.condition: Tensor | None = None
        self.is_over = False
        self._params = params
        self._model = model
        self._generator = generator
        self._num_steps = 0
        self._history: deque[Tensor] = deque(maxlen=params.stability_threshold)
        self._tokens_C = self._noise()

    @property
    def token_ids(self) -> IntArray:
        ids: IntArray = self._tokens_C.cpu().numpy()
        return ids

    def step(self, logits_CV: Tensor) -> CanvasStep:
        """Draw, accept and renoise. Mutates: the canvas and the logits.

        Raises: OledMoeError for logits that are not finite, which would decode to noise.
        """
        params, generator = self._params, self._generator
        logits_CV.div_(self._temperature())
        entropy_C = _entropies(logits_CV)
        if not bool(torch.isfinite(entropy_C).all()):
            raise OledMoeError(
                "the model computed numbers that are not finite; its weights or config.json are "
                "damaged, or the dtype is too narrow: download it again, or try float32"
            )
        best_C = logits_CV.argmax(-1)
        shares_CV = logits_CV.softmax(-1)
        confidence_C = shares_CV.gather(1, best_C[:, None])[:, 0]
        drawn_C = best_C
        if not params.is_greedy:
            drawn_C = torch.multinomial(shares_CV, 1, generator=generator)[:, 0]
        del shares_CV
        is_accepted = _accepted(entropy_C, params.eb_threshold)
        self._tokens_C = torch.where(is_accepted, drawn_C, self._noise())
        self._num_steps += 1
        self.is_over = self._has_settled(best_C, entropy_C) or self._num_steps == params.steps
        if not self.is_over:
            self.condition = self._model.condition(logits_CV)
        # One synchronisation for the rest; doubles hold ids and fp32 exactly.
        columns = (drawn_C, is_accepted, best_C, confidence_C)
        found = torch.stack([column.double() for column in columns]).cpu().numpy()
        drawn, accepted, best, confidence = found
        return CanvasStep(
            drawn.astype(np.int64),
            accepted > 0,
            best.astype(np.int64),
            confidence.astype(np.float32),
        )

    def _temperature(self) -> Tensor:
        """Of the step to come; fp32 throughout, as the reference counts it."""
        params = self._params
        left = torch.tensor(params.steps - self._num_steps, dtype=torch.int32)
        scheduled = params.t_min + (params.t_max - params.t_min) * (left / params.steps)
        # Any lower one takes the likeliest tokens too, and divides logits into infinities.
        return (scheduled * (params.temperature or 1.0)).clamp_min(_LEAST_TEMPERATURE)

    def _noise(self) -> Tensor:
        # In the reference's shape, so that the same seed gives the same tokens.
        size, device = (1, self._params.block_length), self._generator.device
        return torch.randint(
            self._model.vocab_size, size, generator=self._generator, device=device
        )[0]

    def _has_settled(self, best_C: Tensor, entropy_C: Tensor) -> bool:
        """Whether the likeliest tokens are those of the last steps, and are likely enough."""
        threshold = self._params.stability_threshold
        is_stable = len(self._history) == threshold and all(
            torch.equal(best_C, earlier) for earlier in self._history
        )
        self._history.append(best_C)
        return is_stable and bool(entropy_C.mean() < self._params.confidence_threshold)


def _entropies(logits_CV: Tensor) -> Tensor:
    """Entropy of each position's distribution, [C]; few rows at a time, so that nothing as large
    as the logits is made."""
    num_rows = max(1, SAMPLING_SLICE // logits_CV.shape[-1])
    parts = []
    for logits in torch.split(logits_CV, num_rows):
        log_shares = logits - logits.logsumexp(-1, keepdim=True)
        parts.append(-(log_shares * log_shares.softmax(-1)).sum(-1))
    return torch.cat(parts)


def _accepted(entropy_C: Tensor, bound: float) -> Tensor:
    """bool [C]: the positions of least entropy, as many as add up to the bound without the last.

    The sum bounds what these tokens tell of each other (arXiv 2505.24857).
    """
    ranked_C, order_C = entropy_C.sort()
    is_within = ranked_C.cumsum(-1) - ranked_C <= bound
    return torch.zeros_like(is_within).scatter(-1, order_C, is_within)


def new_canvas_of(model: ConditionedModel) -> NewSequence:
    """What makes the sequences of a model without a mask."""

    def new_canvas(*args: Any, **settings: Any) -> DecodingSequence:
        return RandomCanvasSequence(model, *args, **settings)

    return new_canvas


class RandomCanvasSequence(DecodingSequence):
    """One request whose answer is made of random canvases, the first right behind the prompt.

    To policies and whoever watches, accepted tokens are tokens and all others masks. Nothing of a
    canvas is final before all of it is.
    """

    def __init__(
        self,
        model: ConditionedModel,
        prompt_ids: list[int],
        params: DecodingParams,
        *args: Any,
        **settings: Any,
    ) -> None:
        self._model = model
        settings["origin"] = len(prompt_ids) % params.block_length
        super().__init__(prompt_ids, params, *args, **settings)
        self._prefill_end = len(prompt_ids)

    @property
    def takes_plain_best(self) -> bool:
        return False

    def denoise_parts(self, *, wants_all_logits: bool) -> tuple[Part, ...]:
        """What is left of the prompt, the canvas before where it is not stored, and the canvas."""
        *earlier, part = super().denoise_parts(wants_all_logits=wants_all_logits)
        canvas = self._canvas
        return (
            *earlier,
            replace(part, token_ids=canvas.token_ids, condition=canvas.condition),
        )

    def _look(self, wants_all_logits: bool) -> None:
        self._is_looked_at = np.ones(self.params.block_length, dtype=np.bool_)

    def _start_block(self) -> None:
        params, size = self.params, self.params.block_length
        if self._generator.device != self.kv.device:
            self._generator = torch.Generator(self.kv.device).manual_seed(params.seed)
        self._state = BlockState.start([], block_length=size, mask_id=params.mask_token_id)
        self._canvas = RandomCanvas(params, self._model, self._generator)
        self._confidence = np.full(size, FRESH_CONFIDENCE, dtype=np.float32)
        self._block_probability = np.ones(size, dtype=np.float32)
        self._best_ids = np.full(size, -1, dtype=np.int64)

    def _settle(self, logits_NV: Logits, best: Guesses | None) -> tuple[Guesses, BlockUpdate]:
        assert isinstance(logits_NV, Tensor), "a step looks at all of a canvas at once"
        state = self._state
        before, was_masked = state.token_ids.copy(), state.is_masked.copy()
        step = self._canvas.step(logits_NV)
        if self._canvas.is_over:
            state.token_ids[:] = step.best_ids
            state.is_masked[:] = False
            self._block_probability[:] = step.confidence
        else:
            mask_id = self.params.mask_token_id
            state.token_ids[:] = np.where(step.is_accepted, step.token_ids, mask_id)
            state.is_masked[:] = ~step.is_accepted
        state.num_steps += 1
        accepted = was_masked & ~state.is_masked
        edited = ~was_masked & (state.token_ids != before)
        return Guesses(step.best_ids, step.confidence), BlockUpdate(accepted, edited)

    def _wants_forward(self) -> bool:
        return not self._canvas.is_over

    def _ends_mid_block(self, update: BlockUpdate) -> bool:
        return False

    def _final_in_block(self) -> list[int]:
        return []

    @property
    def _decodes_on(self) -> bool:
        return False
