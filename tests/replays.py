"""Small made-up traces for what replays them, and the replay rules in plain Python."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from oled_moe.traces import RoutingTrace, TraceRequest
from oled_moe.types import Phase, TokenState


def random_trace(
    seed: int,
    *,
    num_layers: int = 2,
    num_experts: int = 6,
    top_k: int = 2,
    num_forwards: int = 10,
    num_requests: int = 2,
    block_length: int = 3,
    max_batch: int = 2,
    only_denoise: bool = False,
    **header: Any,
) -> RoutingTrace:
    """Forwards of every kind: batches, prefills, commits, folded commits, skipped last layers.

    All weights and confidences are multiples of powers of two, so that sums of them are exact and
    ties are ties for everybody.
    """
    random = np.random.default_rng(seed)
    rows: list[tuple[int, int, int, int, int]] = []
    tokens: dict[str, list[Any]] = {"position": [], "state": [], "confidence": [], "accepted": []}
    ids: list[Any] = []
    weights: list[Any] = []
    offsets = [0]
    block_of, step_of = [0] * num_requests, [0] * num_requests
    started: set[int] = set()

    def add_row(forward: int, request: int, block: int, step: int, phase: Phase) -> None:
        rows.append((forward, request, block, step, phase))
        size = block_length
        skips_last = phase != Phase.DENOISE and bool(random.integers(2))
        for token in range(size):
            tokens["position"].append(block * block_length + token)
            states = {Phase.PREFILL: TokenState.PROMPT, Phase.COMMIT: TokenState.COMMITTED}
            state = states.get(phase, TokenState(int(random.integers(1, 3))))
            tokens["state"].append(int(state))
            has_logits = phase == Phase.DENOISE
            tokens["confidence"].append(random.integers(17) / 16 if has_logits else np.nan)
            tokens["accepted"].append(0)
            chosen = np.array([random.permutation(num_experts)[:top_k] for _ in range(num_layers)])
            # The first experts are wanted more often, so that caches have something to keep.
            if random.integers(3):
                few = max(top_k, num_experts // 2)
                chosen = np.array([random.permutation(few)[:top_k] for _ in range(num_layers)])
            if skips_last:
                chosen[-1] = -1
            ids.append(chosen)
            parts = random.multinomial(8, np.ones(top_k) / top_k, size=num_layers) / 8
            weights.append(parts)
        offsets.append(offsets[-1] + size)

    for forward in range(num_forwards):
        batch = random.permutation(num_requests)[: int(random.integers(1, max_batch + 1))]
        for request in batch.tolist():
            block, kind = block_of[request], int(random.integers(5))
            if only_denoise:
                kind = 4
            if request not in started and kind < 3:
                add_row(forward, request, block, 0, Phase.PREFILL)
                block_of[request] += 1
            elif step_of[request] and kind < 2:
                add_row(forward, request, block, step_of[request], Phase.COMMIT)
                block_of[request], step_of[request] = block + 1, 0
                if kind == 0:
                    add_row(forward, request, block + 1, 0, Phase.DENOISE)
                    step_of[request] = 1
            else:
                add_row(forward, request, block, step_of[request], Phase.DENOISE)
                step_of[request] += 1
            started.add(request)
    forward_R, request_R, block_R, step_R, phase_R = np.array(rows).T
    num_tokens = len(ids)
    return RoutingTrace(
        source="synthetic",
        model_type="fake",
        model_name="a fake model",
        num_moe_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_bytes=1000,
        block_length=block_length,
        threshold=0.95,
        requests=tuple(
            TraceRequest(str(i), "made up", 0, block_length) for i in range(num_requests)
        ),
        row_forward=forward_R.astype(np.int32),
        row_request=request_R.astype(np.int32),
        row_block=block_R.astype(np.int32),
        row_step=step_R.astype(np.int32),
        row_phase=phase_R.astype(np.uint8),
        row_token_offset=np.array(offsets, dtype=np.int64),
        token_position=np.array(tokens["position"], dtype=np.int32),
        token_state=np.array(tokens["state"], dtype=np.uint8),
        token_confidence=np.array(tokens["confidence"], dtype=np.float32),
        token_accepted=np.array(tokens["accepted"], dtype=np.uint8),
        expert_ids=np.array(ids, dtype=np.int16),
        gate_weights=np.array(weights, dtype=np.float32),
        gate_scores=random.random((num_tokens, num_layers, num_experts)).astype(np.float16),
        input_embedding=random.random((num_tokens, 4)).astype(np.float16),
        token_ids=random.integers(0, 50, num_tokens).astype(np.int32),
        extra=header,
    )


class NaiveReplay:
    """The replay rules of trace-format.md with sets and dicts, straight from a trace's arrays.

    Shares no code with the package. `hits` and `demands` hold one number for each (forward, layer)
    that is not skipped.
    """

    def __init__(self, trace: RoutingTrace, policy: str, capacity: int) -> None:
        self.hits: dict[tuple[int, int], int] = {}
        self.demands: dict[tuple[int, int], int] = {}
        self._trace, self._policy, self._capacity = trace, policy, capacity
        self._tokens_of: dict[int, list[tuple[int, int]]] = {}
        self._denoises: dict[int, bool] = {}
        for row, forward in enumerate(trace.row_forward.tolist()):
            tokens = self._tokens_of.setdefault(forward, [])
            first, end = trace.row_token_offset[row : row + 2].tolist()
            tokens += [(row, token) for token in range(first, end)]
            is_denoise = int(trace.row_phase[row]) == 1
            self._denoises[forward] = self._denoises.get(forward, False) or is_denoise
        # Forwards count model calls; the trace may number them with gaps.
        self._order = sorted(self._tokens_of)
        self._confidence = self._layer_time_confidence()
        for layer in range(trace.num_moe_layers):
            self._replay_layer(layer)

    def _layer_time_confidence(self) -> dict[int, float]:
        trace = self._trace
        latest: dict[tuple[int, int], float] = {}
        known: dict[int, float] = {}
        for forward in self._order:
            seen = {}
            for row, token in self._tokens_of[forward]:
                place = (int(trace.row_request[row]), int(trace.token_position[token]))
                is_masked = int(trace.token_state[token]) == 2
                known[token] = latest.get(place, 0.5) if is_masked else 1.0
                now = float(trace.token_confidence[token])
                if now == now:
                    seen[place] = now
            latest.update(seen)
        return known

    def _active(self, forward: int, layer: int) -> dict[int, float]:
        """Distinct experts with their sums of gate weight and confidence."""
        mass: dict[int, float] = {}
        for _, token in self._tokens_of[forward]:
            ids = self._trace.expert_ids[token, layer].tolist()
            weights = self._trace.gate_weights[token, layer].tolist()
            for expert, weight in zip(ids, weights, strict=True):
                if expert >= 0:
                    mass[expert] = mass.get(expert, 0.0) + weight * self._confidence[token]
        return mass

    def _replay_layer(self, layer: int) -> None:
        capacity = self._capacity
        resident: set[int] = set()
        last_active: dict[int, int] = {}
        num_active: dict[int, int] = {}
        for now, forward in enumerate(self._order):
            mass = self._active(forward, layer)
            if not mass:
                continue
            active = set(mass)
            place = (forward, layer)
            self.demands[place] = len(active)
            if self._policy == "oracle":
                self.hits[place] = min(len(active), capacity)
                continue
            self.hits[place] = len(active & resident)
            for expert in active:
                last_active[expert] = now
                num_active[expert] = num_active.get(expert, 0) + 1
            total = sum(mass.values())

            def score(
                expert: int,
                mass: dict[int, float] = mass,
                total: float = total,
                now: int = now,
            ) -> float:
                if self._policy == "naive-lru":
                    return last_active[expert]
                if self._policy == "lfu":
                    return num_active[expert]
                if self._policy == "priority":
                    if expert in mass:
                        return mass[expert] / total if total else 0.0
                    return -(now - last_active[expert])
                assert self._policy == "belady"
                for later in range(now + 1, len(self._order)):
                    if expert in self._active(self._order[later], layer):
                        return -(later - now)
                return -float("inf")

            ranked = sorted(resident | active, key=lambda expert: (-score(expert), expert))
            resident = set(ranked[:capacity])

    def _over_denoise(self, whole: str) -> Iterator[list[tuple[int, int]]]:
        for forward in self._order:
            places = [place for place in self.hits if place[0] == forward]
            if self._denoises[forward] and places:
                yield [
                    (self.hits[p], self._capacity if whole == "slots" else self.demands[p])
                    for p in places
                ]

    def ratio(self, whole: str) -> float:
        """Utilisation (`slots`) or hit rate (`demands`): mean of layers, then of forwards."""
        means = [
            sum(part / size if size else 0.0 for part, size in pairs) / len(pairs)
            for pairs in self._over_denoise(whole)
        ]
        return sum(means) / len(means) if means else 0.0

    def pooled(self, whole: str) -> float:
        pairs = [pair for each in self._over_denoise(whole) for pair in each]
        size = sum(size for _, size in pairs)
        return sum(part for part, _ in pairs) / size if size else 0.0
