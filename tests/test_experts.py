"""OffloadedExperts: the same sums as a plain layer, whatever is resident, and after any failure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from fakes import (
    LIVE_POLICIES,
    CountedCopy,
    FakeRouter,
    bounded,
    outcome_of,
    policy_of,
    random_store,
    shape_of,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oled_moe.cache import ExpertCache
from oled_moe.experts import OffloadedExperts
from oled_moe.kernels import EachExpert, ExpertKernel, reference
from oled_moe.lanes import InlineLane, Lane, ThreadLane
from oled_moe.slots import SlotPool
from oled_moe.store import Activation, ExpertWeights
from oled_moe.types import LayerDemand, Phase

SHAPE = shape_of(2, 8, 3)
HIDDEN = 8
STORE = random_store(SHAPE.num_layers, SHAPE.num_experts, hidden_size=HIDDEN)
JITTER_S = 0.0005
REFERENCE = EachExpert(reference.expert_mlp)


@contextmanager
def offloaded(
    policy: str = "oled",
    num_slots: int = 7,
    *,
    num_staging: int = 2,
    is_threaded: bool = False,
    has_cpu_experts: bool = False,
    seed: int = 0,
    fail_copies: Sequence[int] = (),
    kernel: ExpertKernel = REFERENCE,
    cpu_kernel: ExpertKernel = REFERENCE,
) -> Iterator[OffloadedExperts]:
    """Experts over `STORE`, free slots NaN; threads are delayed at random under `seed`."""
    lanes: list[Lane] = [InlineLane() for _ in range(3)]
    if is_threaded:
        lanes = [
            ThreadLane(name, num_threads=num_threads, jitter_s=JITTER_S, seed=seed + index)
            for index, (name, num_threads) in enumerate(
                (("copy", 1 + seed % 2), ("device", 1), ("cpu", 1))
            )
        ]
    copies, device, cpu = lanes
    cache = ExpertCache(
        SHAPE,
        policy_of(policy, SHAPE),
        num_slots=num_slots,
        num_staging=num_staging,
        has_cpu_experts=has_cpu_experts,
    )
    pool = SlotPool(
        STORE.layout,
        num_slots + num_staging,
        copies,
        CountedCopy(STORE, fail_copies),
        num_experts=SHAPE.num_experts,
        is_poisoned=True,
    )
    pool.fill(cache.place())
    yield OffloadedExperts(
        cache,
        pool,
        kernel=kernel,
        compute_lane=device,
        cpu_lane=cpu if has_cpu_experts else None,
        cpu_kernel=cpu_kernel,
        host_store=STORE if has_cpu_experts else None,
    )
    for lane in lanes:
        lane.close()


class Inputs:
    """Random activations and routing, forward after forward."""

    def __init__(self, seed: int = 0) -> None:
        self.router = FakeRouter(SHAPE, seed)
        self._generator = torch.Generator().manual_seed(seed)

    def forward(
        self, num_tokens: int = 5, phases: Sequence[Phase] = (Phase.DENOISE,)
    ) -> list[tuple[LayerDemand, Tensor]]:
        return [
            (demand, torch.randn(num_tokens, HIDDEN, generator=self._generator))
            for demand in self.router.forward(num_tokens, phases=phases)
        ]


def run(experts: OffloadedExperts, demand: LayerDemand, hidden_TD: Tensor) -> Tensor:
    if demand.layer == 0:
        experts.start_forward(demand.context)
    gates_TK = torch.from_numpy(demand.gate_weights)
    pending = experts.start(
        demand.layer,
        hidden_TD,
        torch.from_numpy(demand.topk_ids),
        gates_TK,
        demand.context,
        torch.from_numpy(demand.gate_scores),
    )
    return experts.finish(pending, 2.5 * gates_TK)


def dense(demand: LayerDemand, hidden_TD: Tensor) -> Tensor:
    """Every expert on every token, weighted; what offloading must equal."""
    gates_TE = torch.zeros(len(hidden_TD), SHAPE.num_experts)
    gates_TE.scatter_(1, torch.from_numpy(demand.topk_ids), torch.from_numpy(demand.gate_weights))
    total_TD = torch.zeros(len(hidden_TD), HIDDEN)
    for expert in range(SHAPE.num_experts):
        gate_up, down = STORE.weights(demand.layer, expert)
        gate_TF, up_TF = (hidden_TD @ gate_up.T).chunk(2, dim=1)
        total_TD += 2.5 * gates_TE[:, expert, None] * ((F.silu(gate_TF) * up_TF) @ down.T)
    return total_TD


def check_forwards(experts: OffloadedExperts, inputs: Inputs, num_forwards: int) -> None:
    """Prefill, then denoising with a commit now and then: each layer equals the dense one."""
    for number in range(num_forwards):
        phase = Phase.DENOISE if number % 4 else (Phase.PREFILL, Phase.COMMIT)[number > 0]
        for demand, hidden_TD in inputs.forward(2 + number % 5, (phase,)):
            out_TD = run(experts, demand, hidden_TD)
            assert out_TD.dtype == torch.float32
            torch.testing.assert_close(out_TD, dense(demand, hidden_TD), rtol=1e-4, atol=1e-4)
            experts.cache.check()
        experts.end_forward(outcome_of(demand.context))


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("has_cpu_experts", [False, True])
def test_equals_the_dense_layer(policy: str, is_threaded: bool, has_cpu_experts: bool) -> None:
    for num_slots in (0, 1, 5, 12, 16):
        with offloaded(
            policy,
            num_slots,
            num_staging=1 + num_slots % 3,
            is_threaded=is_threaded,
            has_cpu_experts=has_cpu_experts,
            seed=num_slots,
        ) as experts:
            check_forwards(experts, Inputs(seed=num_slots), 6)


@bounded(20)
@given(
    policy=st.sampled_from(sorted(LIVE_POLICIES)),
    seed=st.integers(0, 1000),
    num_slots=st.integers(0, 16),
    num_staging=st.integers(1, 4),
)
def test_residency_never_changes_a_bit(
    policy: str, seed: int, num_slots: int, num_staging: int
) -> None:
    """Against everything resident: same bits, on poisoned slots with delays, no CPU experts."""
    with (
        offloaded("naive-lru", 16) as resident,
        offloaded(
            policy, num_slots, num_staging=num_staging, is_threaded=True, seed=seed
        ) as experts,
    ):
        inputs = Inputs(seed)
        resident.pool.fill(resident.cache.fill())
        for _ in range(5):
            for demand, hidden_TD in inputs.forward():
                expected_TD = run(resident, demand, hidden_TD)
                assert torch.equal(run(experts, demand, hidden_TD), expected_TD)
            experts.end_forward(outcome_of(demand.context))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_order_does_not_matter(dtype: torch.dtype) -> None:
    def kernel(rows_ND: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
        return reference.expert_mlp(rows_ND.float(), weights, activation).to(rows_ND.dtype)

    (demand, hidden_TD), _ = Inputs().forward(7)
    hidden_TD = hidden_TD.to(dtype)
    ids_TK, gates_TK = torch.from_numpy(demand.topk_ids), torch.from_numpy(demand.gate_weights)
    generator = torch.Generator().manual_seed(0)
    sums = []
    with offloaded(kernel=EachExpert(kernel)) as experts:
        for _ in range(4):
            order_TK = torch.rand(ids_TK.shape, generator=generator).argsort(dim=1)
            ids, gates = ids_TK.gather(1, order_TK), gates_TK.gather(1, order_TK)
            pending = experts.start(0, hidden_TD, ids, gates, demand.context)
            sums.append(experts.finish(pending, gates))
    assert all(torch.equal(one, sums[0]) for one in sums[1:])


def test_observers_see_each_layer_once_with_its_plan() -> None:
    seen = []
    with offloaded() as experts:
        experts.observers.append(lambda demand, plan: seen.append((demand, plan)))
        inputs = Inputs()
        for forward_id in range(3):
            for demand, hidden_TD in inputs.forward():
                run(experts, demand, hidden_TD)
            layers = [(demand.context.forward_id, demand.layer) for demand, _ in seen]
            assert layers == [(f, layer) for f in range(forward_id + 1) for layer in range(2)]
    for demand, plan in seen:
        assert plan.num_demanded == len(demand.expert_ids)
    assert experts.planning_s > 0


class FaultyKernel:
    """The reference, until the call with this number."""

    def __init__(self, fail_at: int) -> None:
        self._fail_at = fail_at
        self._num_calls = 0

    def __call__(self, rows_ND: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
        self._num_calls += 1
        if self._num_calls == self._fail_at + 1:
            raise OSError("the kernel fails")
        return reference.expert_mlp(rows_ND, weights, activation)


def check_recovery(experts: OffloadedExperts, seed: int) -> None:
    """Until the one failure results are right, then it surfaces, then they are right again."""
    seen = []
    experts.observers.append(lambda demand, plan: seen.append(demand))
    inputs, num_failures, num_calls = Inputs(seed), 0, 0
    for _ in range(12):
        for demand, hidden_TD in inputs.forward():
            num_calls += 1
            try:
                out_TD = run(experts, demand, hidden_TD)
            except OSError as error:
                num_failures += 1
                assert "fails" in str(error)
                assert not len(experts.cache.resident_ids(demand.layer))
            else:
                torch.testing.assert_close(out_TD, dense(demand, hidden_TD), rtol=1e-4, atol=1e-4)
            experts.cache.check()
        experts.end_forward(outcome_of(demand.context))
    assert num_failures == 1
    assert len(seen) == num_calls - 1


@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("fail_at", [0, 1, 4, 9, 15])
def test_recovers_from_a_failed_copy(is_threaded: bool, fail_at: int) -> None:
    # One staging slot and few others: copies wait for readers when the failure comes.
    with offloaded(
        "naive-lru",
        4,
        num_staging=1,
        is_threaded=is_threaded,
        has_cpu_experts=True,
        seed=fail_at,
        fail_copies=[fail_at],
    ) as experts:
        check_recovery(experts, fail_at)


@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("fail_at", [0, 3, 11])
@pytest.mark.parametrize("where", ["kernel", "cpu_kernel"])
def test_recovers_from_a_failed_kernel(is_threaded: bool, fail_at: int, where: str) -> None:
    faulty: dict[str, ExpertKernel] = {where: EachExpert(FaultyKernel(fail_at))}
    with offloaded(
        "oled", 5, is_threaded=is_threaded, has_cpu_experts=True, seed=fail_at, **faulty
    ) as experts:
        check_recovery(experts, fail_at)


@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("has_cpu_experts", [False, True])
def test_a_layer_never_finished_leaves_nothing_behind(
    is_threaded: bool, has_cpu_experts: bool
) -> None:
    """Interrupted between `start` and `finish`: its loads must not be taken for residents."""
    with offloaded(
        "oled", 8, num_staging=1, is_threaded=is_threaded, has_cpu_experts=has_cpu_experts
    ) as experts:
        inputs = Inputs()
        check_forwards(experts, inputs, 3)
        for layer in (0, 1, 1):
            demand, hidden_TD = inputs.forward()[layer]
            ids_TK = torch.from_numpy(demand.topk_ids)
            gates_TK = torch.from_numpy(demand.gate_weights)
            experts.start(layer, hidden_TD, ids_TK, gates_TK, demand.context)
            check_forwards(experts, inputs, 2)
