"""What a forward's logits say of each position: a token, its confidence, and how sure it is.

Legend: N positions that are looked at, B of the whole block, V vocabulary.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oled_moe.config import DecodingParams
from oled_moe.errors import OledMoeError
from oled_moe.layers import Logits, RowLogits, best_tokens
from oled_moe.types import BoolArray, FloatArray, IntArray

ConfidenceArray = npt.NDArray[np.float32]

# Logits that are looked at together, in whole rows.
SAMPLING_SLICE = 2**19
# What no token is chosen by, and still a finite number.
_NEVER = -1e30


@dataclass(frozen=True, slots=True)
class Guesses:
    """A token for each position, never the mask, and its probability.

    `entropy`: of the distribution that was asked for, in nats, None where none was.
    Shapes: int64 and float32 [N]; [B] once `spread`, with −1 and NaN where nobody looked.
    """

    token_ids: IntArray
    confidence: ConfidenceArray
    entropy: ConfidenceArray | None = None

    def spread(self, is_looked_at: BoolArray) -> "Guesses":
        """The same over all positions [B], of which N are looked at."""
        whole = Guesses(
            np.full(len(is_looked_at), -1, dtype=np.int64),
            np.full(len(is_looked_at), np.nan, dtype=np.float32),
        )
        whole.token_ids[is_looked_at] = self.token_ids
        whole.confidence[is_looked_at] = self.confidence
        if self.entropy is None:
            return whole
        entropy = np.full(len(is_looked_at), np.nan, dtype=np.float32)
        entropy[is_looked_at] = self.entropy
        return replace(whole, entropy=entropy)

    def part(self, rows: slice) -> "Guesses":
        """Those of some positions."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return Guesses(self.token_ids[rows], self.confidence[rows], entropy)


def takes_plain_best(params: DecodingParams) -> bool:
    """Whether a guess is the likeliest token with its probability over the whole vocabulary."""
    is_cut = params.confidence == "filtered" and (params.top_k, params.top_p or 1) != (None, 1)
    is_scaled = params.confidence != "raw" and params.temperature != 1
    return params.temperature == 0 or (params.greedy and not is_cut and not is_scaled)


def guess(
    logits_NV: Logits,
    params: DecodingParams,
    draws_N: FloatArray | None,
    *,
    entropy_of: str | None = None,
) -> Guesses:
    """One token per position, never the mask, and its probability. Control tokens count as tokens
    only where the algorithm obeys them.

    Greedy at temperature 0: the argmax, its probability over the whole vocabulary. Otherwise the
    token at which the running sum of probabilities after temperature, top-k and top-p passes the
    position's draw, or again the argmax where `params` is greedy, with the probability under the
    distribution that `params.confidence` names. `entropy_of` names that of the entropy wanted. What
    a position gets depends on nothing but its logits and its draw.

    Shapes: fp32 [N, V], draws float64 [N] in [0, 1), not needed where greedy. Mutates: logits, but
    for RowLogits.
    Raises: OledMoeError for logits that are not finite, which would decode to noise.
    Source: models.md 4, filters; 6 and 7 for confidences; 11.1 and 11.3 for what is not copied.
    """
    slices = logits_NV.slices() if isinstance(logits_NV, RowLogits) else (logits_NV,)
    parts, end = [], 0
    for logits in slices:
        first, end = end, end + len(logits)
        draws = None if draws_N is None else draws_N[first:end]
        parts.append(_of_slice(logits, params, draws, entropy_of))
    *found, is_finite = (torch.cat(part) for part in zip(*parts, strict=True))
    is_finite = is_finite.all()
    # One synchronisation with the device for everything; doubles hold ids and fp32 exactly.
    flat = torch.cat((is_finite[None].double(), *(values.double() for values in found)))
    flag, *values = np.split(flat.cpu().numpy(), 1 + len(logits_NV) * np.arange(len(found)))
    if not flag[0]:
        raise OledMoeError(
            "the model computed numbers that are not finite; its weights or config.json are "
            "damaged, or the dtype is too narrow: download it again, or try float32"
        )
    ids, *rest = values
    return Guesses(ids.astype(np.int64), *(value.astype(np.float32) for value in rest))


def _of_slice(
    logits_NV: Tensor, params: DecodingParams, draws_N: FloatArray | None, entropy_of: str | None
) -> tuple[Tensor, ...]:
    """Id, confidence and entropy of each row, if it is wanted, [N] each, and whether all logits are
    finite, [1]. Mutates: logits."""
    if params.control_ids and params.algorithm != "levenshtein":
        logits_NV[:, list(params.control_ids)] = _NEVER
    if takes_plain_best(params) and entropy_of is None:
        *found, is_finite = best_tokens(logits_NV, params.mask_token_id)
        return (*found, is_finite[None])
    # The extremes show any NaN and any overflow in one pass.
    is_finite = torch.stack(logits_NV.aminmax()).isfinite().all()
    draws = None if draws_N is None else torch.from_numpy(draws_N).to(logits_NV.device)
    # Whole rows at a time, so that whatever is made on the way stays small beside the logits.
    num_rows = max(1, SAMPLING_SLICE // logits_NV.shape[-1])
    slices = [slice(first, first + num_rows) for first in range(0, len(logits_NV), num_rows)]
    parts = [
        _of_rows(logits_NV[part], params, None if draws is None else draws[part], entropy_of)
        for part in slices
    ]
    return (*(torch.cat(part) for part in zip(*parts, strict=True)), is_finite[None])


def sample(
    logits_NV: Logits, params: DecodingParams, draws_N: FloatArray | None
) -> tuple[IntArray, ConfidenceArray]:
    """Tokens and confidences as `guess` finds them; everything else as there."""
    found = guess(logits_NV, params, draws_N)
    return found.token_ids, found.confidence


def _of_rows(
    logits_NV: Tensor, params: DecodingParams, draws_N: Tensor | None, entropy_of: str | None
) -> tuple[Tensor, ...]:
    """Id and confidence of each row, and its entropy if it is wanted, [N] each.

    Mutates: logits. What tokens are drawn from has no mask; the references' other distributions do.
    """
    wanted = {params.confidence, entropy_of} - {None}
    shares = {
        kind: _distribution(logits_NV, params, kind)
        for kind in wanted
        if kind is not None and (params.is_greedy or kind != "filtered")
    }
    logits_NV[:, params.mask_token_id] = float("-inf")
    if params.is_greedy:
        ids_N = logits_NV.argmax(-1)
    else:
        assert draws_N is not None
        shares["filtered"] = _distribution(logits_NV, params, "filtered")
        ids_N = _drawn(shares["filtered"], draws_N)
    confidence_N = shares[params.confidence].gather(1, ids_N[:, None])[:, 0]
    if entropy_of is None:
        return ids_N, confidence_N
    # 0 · log 0 is 0 here, where the published code makes NaN of it (models.md 7.2).
    return ids_N, confidence_N, torch.special.entr(shares[entropy_of]).sum(-1)


def _distribution(logits_NV: Tensor, params: DecodingParams, kind: str) -> Tensor:
    """Probabilities [N, V]: the model's, those after temperature, or after the filters too."""
    if params.temperature == 0 or kind == "raw":
        return logits_NV.softmax(-1)
    is_filtered = kind == "filtered"
    return filtered_probabilities(
        logits_NV,
        temperature=params.temperature,
        top_k=params.top_k if is_filtered else None,
        top_p=params.top_p if is_filtered else None,
    )


def _drawn(probabilities_NV: Tensor, draws_N: Tensor) -> Tensor:
    """The token [N] at which each row's running sum of probabilities passes its draw."""
    sums_NV = probabilities_NV.cumsum(-1, dtype=torch.float64)
    total_N1 = sums_NV[:, -1:].contiguous()
    ids_N1 = torch.searchsorted(sums_NV, draws_N[:, None] * total_N1, right=True)
    # Rounding must not carry a draw past the last token that has any probability, nor may numbers
    # that are not finite, which the caller refuses, carry it out of the vocabulary.
    ids_N1 = torch.minimum(ids_N1, torch.searchsorted(sums_NV, total_N1))
    return ids_N1.clamp(max=probabilities_NV.shape[-1] - 1)[:, 0]


def filtered_probabilities(
    logits_NV: Tensor, *, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Softmax after temperature, then top-k (ties stay), then top-p (the first always stays).

    Shapes: fp32 [N, V] -> fp32 [N, V].
    """
    # The maximum goes first, so that a tiny temperature cannot overflow; one that is 0 or infinite
    # in the logits' precision would make NaN.
    limits = torch.finfo(logits_NV.dtype)
    temperature = min(max(temperature, limits.tiny), limits.max)
    logits_NV = (logits_NV - logits_NV.max(-1, keepdim=True).values) / temperature
    if top_k is not None and top_k < logits_NV.shape[-1]:
        smallest = logits_NV.topk(top_k, dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < smallest, float("-inf"))
    if top_p is not None and top_p < 1:
        ranked = logits_NV.sort(dim=-1, descending=True)
        before = ranked.values.softmax(-1).cumsum(-1)
        is_dropped = (before > top_p).roll(1, dims=-1)
        is_dropped[:, 0] = False
        is_dropped = torch.zeros_like(is_dropped).scatter_(1, ranked.indices, is_dropped)
        logits_NV = logits_NV.masked_fill(is_dropped, float("-inf"))
    return logits_NV.softmax(-1)
