"""Grammars over small vocabularies and answers from random logits, for tests."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from oled_moe.closing import GrammarState, Speller, byte_tokenizer
from oled_moe.config import DecodingParams
from oled_moe.constrained import GrammarConstraint
from oled_moe.unmasking import UNMASKING, BlockState

FOLDER = Path(__file__).parents[1] / "experiments" / "08_structured_output"


def random_schemas() -> ModuleType:
    """The experiment's generator of random schemas."""
    spec = importlib.util.spec_from_file_location("random_schemas", FOLDER / "schemas.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Words:
    """A vocabulary of given tokens, an end and a mask."""

    eos_token_id = -1
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = [*tokens, b"<end>", b"<mask>"]
        self.eos_token_id = len(tokens) + 1
        self.special_token_ids = [len(tokens), len(tokens) + 1]

    def __call__(self, text: str | bytes) -> list[int]:
        """The longest tokens first."""
        rest = text if isinstance(text, bytes) else text.encode()
        ids = []
        while rest:
            best = max((t for t in self.tokens if rest.startswith(t)), key=len)
            ids.append(self.tokens.index(best))
            rest = rest[len(best) :]
        return ids


def state_of(tokens: Sequence[bytes], source: str) -> GrammarState:
    """The start of an llguidance grammar over these tokens, whose ids are their positions; behind
    them come the ids of an end and a mask."""
    by_token = LLTokenizer(TokenizerWrapper(_Words(tokens)), n_vocab=len(tokens) + 2)
    usable = np.arange(len(tokens) + 2) < len(tokens)
    return GrammarState(
        LLMatcher(by_token, source, log_level=0),
        LLMatcher(byte_tokenizer(), source, log_level=0),
        Speller([*tokens, b"", b""], usable),
    )


@dataclass
class Decoded:
    """One answer made without a model. `num_forwards` that its blocks took."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    num_forwards: int = 0


def decode(
    constraint: GrammarConstraint,
    params: DecodingParams,
    *,
    vocab_size: int,
    seed: int = 0,
    num_prompt: int = 5,
    scale: float = 3.0,
) -> Decoded:
    """An answer whose logits are noise; checks what must hold at every step."""
    unmasking = UNMASKING[params.algorithm](params)
    generator = torch.Generator().manual_seed(seed)
    answer = Decoded()
    prompt = [1] * num_prompt
    while not answer.finish_reason:
        num_left = params.max_tokens - len(answer.token_ids)
        state = BlockState.start(
            prompt, block_length=params.block_length, mask_id=params.mask_token_id
        )
        constraint.start_block(state, num_left)
        num_in_block = 0
        while constraint.wants_forward(state):
            is_looked_at = unmasking.looked_at(state)
            num_rows = int(is_looked_at.sum())
            logits: Tensor = torch.randn(num_rows, vocab_size, generator=generator) * scale
            draws = torch.rand(num_rows, generator=generator, dtype=torch.float64).numpy()
            before, num_final = state.token_ids.copy(), constraint.num_final(state)
            num_masked = int(state.is_masked.sum())
            constraint.update(state, logits, is_looked_at, unmasking, draws)
            answer.num_forwards += 1
            num_in_block += 1
            assert num_in_block <= 2 * params.block_length
            # What was final stays, and every forward adds to it or commits a token further on.
            assert (state.token_ids[:num_final] == before[:num_final]).all()
            is_ended = constraint.num_tokens is not None
            is_shorter = int(state.is_masked.sum()) < num_masked
            assert constraint.num_final(state) > num_final or is_shorter or is_ended
            assert not state.is_masked[: constraint.num_final(state)].any()
        answer.token_ids += state.token_ids[len(prompt) : constraint.num_final(state)].tolist()
        prompt = []
        if constraint.num_tokens is not None:
            assert len(answer.token_ids) == constraint.num_tokens
            answer.finish_reason = "stop"
        elif len(answer.token_ids) >= params.max_tokens:
            answer.finish_reason = "stop" if constraint.is_complete else "length"
    return answer
