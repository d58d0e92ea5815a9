"""CanvasSequence: models that denoise prompt, answer and all masks in every forward.

Blocks follow the prompt wherever it ends; those behind the block at work are seen as masks. Nothing
is kept from one forward to the next, so that there is nothing to prefill and nothing to commit.
With `canvas_cache`, an approximation, only some forwards take the whole canvas, a block's first
among them; the others take a part of it, and keys and values of the last of these, by then out of
date, for the rest. With `cont_weight`, another one, masks are seen as what they may become.
Source: models.md 7.1 (LLaDA-MoE), 7.2 (RND1) and 7.3 (caches).
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oled_moe.config import DecodingParams, FamilyDecoding
from oled_moe.decoding import FRESH_CONFIDENCE, DecodingSequence, NewSequence, Part, RowOutcome
from oled_moe.layers import Logits, RowLogits, rows_of
from oled_moe.models import ConditionedModel, Model
from oled_moe.random_canvas import new_canvas_of
from oled_moe.sampling import Guesses
from oled_moe.types import BoolArray, Phase, TokenState
from oled_moe.unmasking import BlockUpdate


def new_sequence_of(family: FamilyDecoding, model: Model) -> NewSequence:
    """What makes the sequences of a model of this family."""
    if family.canvas_length:
        assert isinstance(model, ConditionedModel)
        return new_canvas_of(model)
    if not family.is_whole:
        return DecodingSequence

    def new_canvas(*args: Any, **settings: Any) -> DecodingSequence:
        return CanvasSequence(family, *args, **settings)

    return new_canvas


class CanvasSequence(DecodingSequence):
    """One request whose prompt, blocks and reserved slots are one canvas.

    The answer's blocks are numbered from the prompt's whole blocks on, as they are elsewhere. Its
    K/V have room for the canvas; nothing of them is kept unless a cache is asked for.
    """

    def __init__(
        self,
        family: FamilyDecoding,
        prompt_ids: list[int],
        params: DecodingParams,
        *args: Any,
        **settings: Any,
    ) -> None:
        self._family = family
        # What is behind the block at work: masks, until an eos says what is there.
        self._behind_id = params.mask_token_id
        # What is added to the embeddings of masks, [canvas, D], None until there is something, and
        # the positions whose logits the latest forward was asked for.
        self._added_TD: torch.Tensor | None = None
        self._asked: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        settings["origin"] = len(prompt_ids) % params.block_length
        settings["num_reserved"] = family.num_reserved
        super().__init__(prompt_ids, params, *args, **settings)
        self._prefill_end = 0
        self.counters.prefill_end_s = time.perf_counter()

    @property
    def block_length(self) -> int:
        # Canvases share forwards with canvases, however long each is.
        return 0

    @property
    def num_step_tokens(self) -> int:
        fed = self._fed
        return int(fed.stop - fed.start)

    @property
    def attention_length(self) -> int:
        return self.kv.capacity

    def denoise_parts(self, *, wants_all_logits: bool) -> tuple[Part, ...]:
        """The canvas or what is fed of it, with logits for what is looked at of the block."""
        self._look(wants_all_logits)
        state, num_prompt = self._state, len(self.prompt_ids)
        block, length = self._block, self.kv.capacity
        is_masked = np.zeros(length, dtype=np.bool_)
        is_masked[block] = state.is_masked
        is_masked[block.stop : length - self._family.num_reserved] = self._has_masks_behind
        states = np.where(is_masked, TokenState.MASKED, TokenState.COMMITTED).astype(np.uint8)
        states[:num_prompt] = TokenState.PROMPT
        token_ids = self._token_ids()
        known_ids = np.where(is_masked, -1, token_ids)
        known_ids[block] = np.where(state.is_masked, self._best_ids, state.token_ids)
        confidence = np.where(is_masked, np.float32(FRESH_CONFIDENCE), np.float32(1.0))
        confidence[block] = np.where(state.is_masked, self._confidence, np.float32(1.0))
        fed = self._fed
        asked = np.zeros(length, dtype=np.bool_)
        asked[block] = self._is_looked_at
        if self.params.cont_weight:
            asked[fed] |= is_masked[fed]
        self._asked = asked.nonzero()[0]
        row = self._row(self._block_id, state.num_steps, Phase.DENOISE, self.num_step_tokens)
        return (
            Part(
                row,
                fed.start,
                token_ids[fed],
                confidence[fed],
                states[fed],
                known_ids[fed],
                self._asked - self._family.shift - fed.start,
                None if self._added_TD is None else self._added_TD[fed],
            ),
        )

    @property
    def _fed(self) -> slice:
        """Positions that the next forward is given."""
        if not self.kv.length:
            return slice(0, self.kv.capacity)
        return self._window

    @property
    def _window(self) -> slice:
        """Positions that are given to forwards for which something is kept."""
        params, block, length = self.params, self._block, self.kv.capacity
        if params.canvas_cache == "prefix":
            return slice(block.start, length)
        if params.canvas_cache == "dual":
            return block
        return slice(
            max(0, block.start - params.prefix_look), min(length, block.stop + params.after_look)
        )

    def _keep_stored(self) -> None:
        params, num_before = self.params, self.counters.num_denoise_forwards
        if params.canvas_cache == "none":
            return
        # A forward without anything kept has stored all of the canvas.
        if not self.kv.length and num_before >= params.warmup_steps:
            window = self._window
            num_fed = window.stop - window.start
            self.kv.move_behind(window.start, num_fed)
            self.kv.advance(self.kv.capacity - num_fed)
        if params.cache_update_freq and (num_before + 1) % params.cache_update_freq == 0:
            self.kv.clear()

    @property
    def reads_rows(self) -> bool:
        return True

    @property
    def takes_plain_best(self) -> bool:
        return not self.params.cont_weight and super().takes_plain_best

    @property
    def _block(self) -> slice:
        """Positions of the block at work."""
        return slice(self._block_start, self._block_start + self.params.block_length)

    @property
    def _has_masks_behind(self) -> bool:
        return self._behind_id == self.params.mask_token_id

    def _token_ids(self) -> npt.NDArray[np.int64]:
        """The canvas as the model is given it."""
        params, block, num_prompt = self.params, self._block, len(self.prompt_ids)
        token_ids = np.full(self.kv.capacity, self._behind_id, dtype=np.int64)
        token_ids[:num_prompt] = self.prompt_ids
        token_ids[num_prompt : block.start] = self._answer_ids
        token_ids[block] = self._state.token_ids
        if self._family.num_reserved:
            last_id = params.eos_token_id if params.eos_at_end else params.pad_token_id
            assert last_id is not None, "the engine refuses what has no id for the last slot"
            token_ids[-self._family.num_reserved :] = last_id
        return token_ids

    def _outcome(self, confidence: npt.NDArray[np.float32], accepted: BoolArray) -> RowOutcome:
        first = self._block_start - self._fed.start
        block = slice(first, first + len(accepted))
        outcome = RowOutcome(
            np.full(self.num_step_tokens, np.nan, dtype=np.float32),
            np.zeros(self.num_step_tokens, dtype=np.bool_),
        )
        outcome.confidence[block], outcome.accepted[block] = confidence, accepted
        return outcome

    def _settle(self, logits_NV: Logits, best: Guesses | None) -> tuple[Guesses, BlockUpdate]:
        all_logits, params = logits_NV, self.params
        if params.cont_weight:
            num_before = self.counters.num_denoise_forwards
            self._state.least_threshold = 1 - num_before * params.threshold_decay
            seen = self._block.start + self._is_looked_at.nonzero()[0]
            logits_NV = rows_of(all_logits, torch.from_numpy(np.searchsorted(self._asked, seen)))
        guesses, update = super()._settle(logits_NV, best)
        is_wanted = self.params.eos_early_stop and not self.params.ignore_eos
        if self._family.fills_behind_eos and is_wanted and self._constraint is None:
            update = self._fill_behind_eos(guesses, update)
        if params.cont_weight:
            self._smooth(all_logits)
        return guesses, update

    def _smooth(self, logits_NV: Logits) -> None:
        """Have masks be seen as the tokens that this forward gives them, each by its probability.

        Mutates: what is added to embeddings. Source: models.md 7.3, iteration smoothing.
        """
        assert isinstance(logits_NV, RowLogits)
        params, block, fed = self.params, self._block, self._fed
        is_masked = np.zeros(self.kv.capacity, dtype=np.bool_)
        is_masked[block] = self._state.is_masked
        is_masked[block.stop :] = self._has_masks_behind
        rows = is_masked[self._asked].nonzero()[0]
        num_before = self.counters.num_denoise_forwards
        weight = min(
            params.cont_weight_init + params.cont_weight_growth * num_before, params.cont_weight
        )
        mixed_ND = weight * logits_NV.part(torch.from_numpy(rows)).expected_embeddings()
        if self._added_TD is None:
            self._added_TD = mixed_ND.new_zeros(self.kv.capacity, mixed_ND.shape[-1])
        self._added_TD[fed] = 0
        self._added_TD[torch.from_numpy(self._asked[rows])] = mixed_ND

    def _fill_behind_eos(self, guesses: Guesses, update: BlockUpdate) -> BlockUpdate:
        """All behind the first eos becomes eos. Mutates: the canvas and confidences there, 1 now.

        Source: models.md 7.1, early stop.
        """
        state, eos_id = self._state, self.params.eos_token_id
        is_eos = ~state.is_masked & (state.token_ids == eos_id)
        if eos_id is None or not is_eos.any():
            return update
        is_behind = np.arange(len(is_eos)) > int(is_eos.argmax())
        is_new = is_behind & (state.is_masked | (state.token_ids != eos_id))
        accepted = update.accepted | (is_new & state.is_masked)
        edited = (update.edited | is_new) & ~accepted
        guesses.confidence[is_new] = 1
        state.token_ids[is_behind] = self._behind_id = eos_id
        state.is_masked[is_behind] = False
        return BlockUpdate(accepted, edited)

    def _leave_block(self) -> None:
        """A finished block is part of the answer, which the next forward is given again."""
        self.kv.clear()

    def _ends_mid_block(self, update: BlockUpdate) -> bool:
        """Whether every answer position before the first eos is filled, and that is wanted."""
        params, state = self.params, self._state
        if self._is_closed:
            return True
        if not params.eos_early_stop or self._unmasking.edits or params.ignore_eos:
            return False
        is_end = self._is_end(state.token_ids) & ~state.is_masked
        return bool(is_end.any()) and not state.is_masked[: int(is_end.argmax())].any()

    @property
    def _decodes_on(self) -> bool:
        # So do the references of both families without an early stop.
        return True

    def _end_of_answer(self, is_last_block: bool) -> bool:
        is_over = super()._end_of_answer(is_last_block)
        params = self.params
        # The eos in the last slot ends an answer that fills all before it.
        if params.eos_at_end and not params.ignore_eos and self.finish_reason == "length":
            assert params.eos_token_id is not None
            self._answer_ids.append(params.eos_token_id)
            self._probabilities.append(1.0)
            self.finish_reason = "stop"
        return is_over
