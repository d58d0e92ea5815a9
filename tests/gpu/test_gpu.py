"""What only a GPU can show: real streams, real pinned memory, compiled kernels.

Run with `pytest -m gpu tests/gpu`. The same things are tested without a GPU in test_cuda.py and
test_triton.py, on streams and memory that are played.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from fakes import LIVE_POLICIES, FakeRouter, outcome_of, policy_of, random_store, shape_of
from test_golden import GOLDEN, check_runs, golden_runs, params_of
from torch import Tensor
from triton_cases import random_arena, ranges

from oled_moe.cache import ExpertCache
from oled_moe.config import EngineConfig
from oled_moe.costs import DEFAULT_CUDA_PROFILE
from oled_moe.cuda import (
    StreamCopyLane,
    StreamLane,
    StreamSlotPool,
    TorchStreams,
)
from oled_moe.cuda_memory import (
    BounceRing,
    CudaLink,
    HostCopy,
    PinnedExpertStore,
    PinnedMemory,
    TorchPinning,
)
from oled_moe.devices import best_gpu_kernel
from oled_moe.engine import Engine
from oled_moe.experts import OffloadedExperts
from oled_moe.kernels import GPU_KERNELS, EachExpert, ExpertKernel, reference
from oled_moe.store import ExpertLayout, SlotArena
from oled_moe.types import LayerDemand

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

GPU = torch.device("cuda", 0)
SHAPE = shape_of(2, 16, 4)
HIDDEN, WIDTH = 256, 192
STORE = random_store(2, 16, hidden_size=HIDDEN, width=WIDTH)
# Long enough that everything a test queues behind it is queued before it ends.
LONG_CYCLES = 200_000_000
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def upload(tensor: Tensor) -> Tensor:
    return tensor.to(GPU)


# The engine


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("capacity", [16, 3, 1])
def test_golden_runs(policy: str, capacity: float) -> None:
    config = EngineConfig(
        device="cuda",
        policy=policy,
        experts_per_layer=capacity,
        cpu_experts=False,
        hardware=DEFAULT_CUDA_PROFILE,
    )
    with Engine(GOLDEN / "llada2_a", config) as engine:
        check_runs(engine, "llada2_a", "v20", every=2)
        check_runs(engine, "llada2_a", "v21", every=3)


def test_golden_runs_with_cpu_experts() -> None:
    config = EngineConfig(device="cuda", experts_per_layer=3, hardware=DEFAULT_CUDA_PROFILE)
    with Engine(GOLDEN / "llada2_a", config) as engine:
        check_runs(engine, "llada2_a", "v20", every=2)
        run = golden_runs("llada2_a", "v20")[0]
        assert engine.generate(run["prompt_ids"], params_of(run, "v20")).stats.cpu_expert_runs > 0


def test_golden_runs_with_cuda_graphs() -> None:
    config = EngineConfig(
        device="cuda",
        experts_per_layer=4,
        cpu_experts=False,
        cuda_graphs=True,
        hardware=DEFAULT_CUDA_PROFILE,
    )
    with Engine(GOLDEN / "llada2_a", config) as engine:
        check_runs(engine, "llada2_a", "v20", every=2)
        check_runs(engine, "llada2_a", "v21", every=3)


def test_an_engine_gives_its_memory_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    config = EngineConfig(device="cuda", experts_per_layer=4, hardware=DEFAULT_CUDA_PROFILE)
    for _ in range(3):
        engine = Engine(GOLDEN / "llada2_a", config)
        assert torch.cuda.memory_allocated() > before
        engine.close()
        del engine
    assert torch.cuda.memory_allocated() <= before + 2**20


# The layer


@contextmanager
def offloaded(
    policy: str, num_slots: int, *, num_pinned: int = 16, busy_cycles: int = 0
) -> Iterator[OffloadedExperts]:
    """Experts on real streams; before every kernel the GPU is kept busy for a while."""
    api, pinning = TorchStreams(GPU), TorchPinning(GPU)
    host = PinnedExpertStore(STORE.layout, 2, num_pinned, pinning)
    host.fill(STORE, num_threads=2)
    num_staging = 3
    memory = torch.full(
        (num_slots + num_staging, STORE.layout.slot_bytes), 0xFF, dtype=torch.uint8, device=GPU
    )
    bounce = PinnedMemory.empty(6 * STORE.layout.slot_bytes, pinning)
    copies = StreamCopyLane(api, num_readers=2)
    link, compute = CudaLink(GPU, api, pinning), StreamLane(api)
    kernel = best_gpu_kernel(link.to_device)

    def busy(*args: object) -> None:
        if busy_cycles:
            torch.cuda._sleep(busy_cycles)
        kernel(*args)

    pool = StreamSlotPool(
        STORE.layout,
        num_slots + num_staging,
        copies,
        HostCopy(api, host, STORE, BounceRing(bounce.memory.view(6, -1))),
        num_experts=16,
        arena=SlotArena(STORE.layout, memory),
        api=api,
    )
    cache = ExpertCache(
        SHAPE, policy_of(policy, SHAPE), num_slots=num_slots, num_staging=num_staging
    )
    pool.fill(cache.place())
    yield OffloadedExperts(cache, pool, kernel=busy, compute_lane=compute, link=link)
    for piece in (copies, compute, link, host, bounce):
        piece.close()


def run(experts: OffloadedExperts, demand: LayerDemand, hidden_TD: Tensor) -> Tensor:
    if demand.layer == 0:
        experts.start_forward(demand.context)
    ids_TK, gates_TK = (upload(torch.from_numpy(x)) for x in (demand.topk_ids, demand.gate_weights))
    scores_TE = upload(torch.from_numpy(demand.gate_scores))
    pending = experts.start(demand.layer, hidden_TD, ids_TK, gates_TK, demand.context, scores_TE)
    return experts.finish(pending, gates_TK)


@pytest.mark.parametrize("policy", [*LIVE_POLICIES, "oled+prefetch:words=true,depth=2,least=0"])
@pytest.mark.parametrize("num_pinned", [16, 6])
@pytest.mark.parametrize("busy_cycles", [0, 300_000])
def test_residency_never_changes_a_bit(policy: str, num_pinned: int, busy_cycles: int) -> None:
    """With and without load, from pinned memory and from disk: the bits of everything resident."""
    router, generator = FakeRouter(SHAPE, 1), torch.Generator().manual_seed(1)
    with (
        offloaded("naive-lru", 32) as resident,
        offloaded(policy, 9, num_pinned=num_pinned, busy_cycles=busy_cycles) as experts,
    ):
        resident.pool.fill(resident.cache.fill())
        for _ in range(8):
            pairs = []
            for demand in router.forward(24):
                hidden_TD = upload(torch.randn(24, HIDDEN, generator=generator))
                pairs.append((run(experts, demand, hidden_TD), run(resident, demand, hidden_TD)))
            experts.end_forward(outcome_of(demand.context))
            # Compared at the end, so that nothing waits for the GPU in between.
            assert all(torch.equal(found, wanted) for found, wanted in pairs)
            assert all(bool(found.isfinite().all()) for found, _ in pairs)


def test_a_copy_waits_for_the_slots_reader_and_a_reader_for_its_copy() -> None:
    """A kernel that reads late sees the old expert, and the next one the new, not a mixture."""
    api, pinning = TorchStreams(GPU), TorchPinning(GPU)
    num_bytes = 64 * 2**20
    pinned = PinnedMemory.empty(num_bytes, pinning)
    pinned.memory.fill_(2)
    slot = torch.ones(num_bytes, dtype=torch.uint8, device=GPU)
    copies, compute = StreamCopyLane(api, num_readers=1), StreamLane(api)
    sums: list[Tensor] = []

    def read_late() -> None:
        torch.cuda._sleep(LONG_CYCLES)
        sums.append(slot.long().sum())

    reader = compute.submit(read_late)
    copy = copies.submit(lambda: api.copy(slot, pinned.memory), after=(reader,))
    assert not reader.is_fired and not copy.is_fired
    compute.submit(lambda: sums.append(slot.long().sum()), after=(copy,)).wait()
    assert [int(total) for total in sums] == [num_bytes, 2 * num_bytes]
    for piece in (copies, compute, pinned):
        piece.close()


def test_nothing_synchronizes_between_the_router_and_the_sum() -> None:
    """Besides the link's one wait, which torch does not count."""
    router = FakeRouter(SHAPE, 2)
    with offloaded("oled", 9) as experts:
        for number in range(4):
            for demand in router.forward(8):
                hidden_TD = torch.ones(8, HIDDEN, device=GPU)
                ids_TK = upload(torch.from_numpy(demand.topk_ids))
                gates_TK = upload(torch.from_numpy(demand.gate_weights))
                torch.cuda.set_sync_debug_mode("error" if number else "default")
                try:
                    pending = experts.start(
                        demand.layer, hidden_TD, ids_TK, gates_TK, demand.context
                    )
                    experts.finish(pending, gates_TK)
                finally:
                    torch.cuda.set_sync_debug_mode("default")


# Kernels


@pytest.fixture(params=["triton", "grouped", "each"])
def kernel_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "triton":
        pytest.importorskip("triton")
    return name


def on_gpu(arena: SlotArena) -> SlotArena:
    return SlotArena(arena.layout, arena.memory.to(GPU))


def computed(
    kernel: ExpertKernel, arena: SlotArena, rows_ND: Tensor, slots: object, *pair: object
) -> Tensor:
    out_ND = torch.full_like(rows_ND, float("nan"))
    kernel(arena, rows_ND, out_ND, slots, *pair)
    return out_ND.cpu()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("hidden, width", [(2048, 512), (256, 96), (200, 72)])
def test_kernels_agree_with_the_reference(
    kernel_name: str, dtype: torch.dtype, hidden: int, width: int
) -> None:
    if kernel_name == "grouped" and dtype != torch.bfloat16:
        pytest.skip("grouped_mm is for bf16")
    sizes = [1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 65, 200]
    arena = random_arena(ExpertLayout(hidden, width, dtype), len(sizes) + 2)
    slots = np.random.default_rng(0).permutation(len(arena))[: len(sizes)]
    starts, ends, num_rows = ranges(sizes, gap=1)
    rows_ND = torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    kernel = GPU_KERNELS[kernel_name](upload)
    found = computed(kernel, on_gpu(arena), upload(rows_ND), slots, starts, ends)
    expected = torch.full_like(rows_ND, float("nan"))
    EachExpert(reference.expert_mlp)(arena, rows_ND, expected, slots, starts, ends)
    torch.testing.assert_close(
        found.float(),
        expected.float(),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
        equal_nan=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_company(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    sizes = [5, 70, 1, 33, 16]
    arena = on_gpu(random_arena(ExpertLayout(256, 128, dtype), 8))
    slots = np.array([4, 0, 5, 2, 7])
    starts, ends, num_rows = ranges(sizes)
    rows_ND = upload(torch.randn(num_rows, 256).to(dtype))
    kernel = GPU_KERNELS["triton"](upload)
    together = computed(kernel, arena, rows_ND, slots, starts, ends)
    for index in range(len(sizes)):
        one, rows = slice(index, index + 1), slice(int(starts[index]), int(ends[index]))
        alone = computed(kernel, arena, rows_ND, slots[one], starts[one], ends[one])
        assert torch.equal(alone[rows], together[rows])


# Memory


@pytest.mark.parametrize("num_bytes", [3 * 2**30 + 4096, 2**20 + 1])
def test_what_is_pinned_is_what_was_asked(num_bytes: int) -> None:
    """No rounding up to a power of two, and the GPU's driver knows it as pinned."""
    pinned = PinnedMemory.empty(num_bytes, TorchPinning(GPU))
    assert pinned.num_pinned_bytes == pinned.memory.numel() == num_bytes
    assert pinned.memory.is_pinned() and pinned.memory[-1:].is_pinned()
    before = resident_bytes()
    assert before is None or before > num_bytes
    pinned.close()
    assert not pinned.memory.is_pinned()


def resident_bytes() -> int | None:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_pinned_copy_returns_before_it_is_done() -> None:
    api, pinning = TorchStreams(GPU), TorchPinning(GPU)
    pinned = PinnedMemory.empty(2**30, pinning)
    target = torch.empty(2**30, dtype=torch.uint8, device=GPU)
    lane = StreamCopyLane(api, num_readers=1)
    event = lane.submit(lambda: api.copy(target, pinned.memory))
    assert not event.is_fired
    lane.close()
    assert event.is_fired
    pinned.close()


def test_refused_pinning_leaves_no_error_behind() -> None:
    pinning = TorchPinning(GPU)
    memory = torch.empty(2**20, dtype=torch.uint8)
    assert pinning.register(memory.data_ptr(), 2**20) is None
    assert pinning.register(memory.data_ptr(), 2**20) is not None
    assert torch.ones(3, device=GPU).sum().item() == 3
    pinning.unregister(memory.data_ptr())


def test_the_link_both_ways() -> None:
    link = CudaLink(GPU, TorchStreams(GPU), TorchPinning(GPU))
    sent = [torch.randn(size) for size in (1, 1000, 300_000) for _ in range(20)]
    torch.cuda._sleep(LONG_CYCLES)
    received = [link.to_device(tensor) for tensor in sent]
    for tensor, back in zip(sent, link.to_host(*received), strict=True):
        assert torch.equal(tensor, back)
    link.close()
