"""The CUDA device without a GPU: on streams that are late on purpose, and memory that refuses."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fake_streams import FakeGraphs, FakePinning, FakeStreams
from fakes import (
    LIVE_POLICIES,
    FakeRouter,
    bounded,
    outcome_of,
    policy_of,
    random_store,
    shape_of,
)
from hypothesis import given
from hypothesis import strategies as st
from test_golden import GOLDEN, check_runs
from torch import Tensor

from oled_moe import cuda, cuda_memory
from oled_moe import engine as engine_module
from oled_moe.cache import ExpertCache
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_CUDA_PROFILE
from oled_moe.cuda import (
    MOST_AHEAD,
    StreamCopyLane,
    StreamEvent,
    StreamLane,
    StreamSlotPool,
    WouldBlock,
    check_cuda,
    cuda_errors,
)
from oled_moe.cuda_graphs import RecordedPieces
from oled_moe.cuda_memory import (
    BounceRing,
    CudaLink,
    HostCopy,
    PinnedExpertStore,
    PinnedMemory,
)
from oled_moe.devices import Gpu
from oled_moe.engine import Engine
from oled_moe.errors import ConfigError, DoesNotFitError, MissingDependencyError, OledMoeError
from oled_moe.experts import OffloadedExperts
from oled_moe.kernels import GPU_KERNELS, EachExpert, reference
from oled_moe.lanes import DONE, Event, Lane, ThreadLane, Work
from oled_moe.store import HostExpertStore, SlotArena, aligned_empty
from oled_moe.types import LayerDemand

SHAPE = shape_of(2, 8, 3)
HIDDEN = 8
STORE = random_store(SHAPE.num_layers, SHAPE.num_experts, hidden_size=HIDDEN)
CPU = torch.device("cpu")
PATIENCE_S = 30.0


class SlowStore:
    """Reads from `STORE` on the thread that asks, after a moment, or fails at the numbers given."""

    layout = STORE.layout
    num_layers = STORE.num_layers
    num_experts = STORE.num_experts

    def __init__(self, fail_at: Sequence[int] = ()) -> None:
        self._fail_at = set(fail_at)
        self._lock = threading.Lock()
        self.threads: list[str] = []

    def read_into(self, layer: int, expert: int, slot: Tensor) -> None:
        with self._lock:
            number = len(self.threads)
            self.threads.append(threading.current_thread().name)
        slot.fill_(0xFF)
        time.sleep(0.0002)
        if number in self._fail_at:
            raise OSError(f"read {number} fails")
        STORE.read_into(layer, expert, slot)

    def close(self) -> None:
        return None


class LateKernel:
    """Runs the reference as a stream would: when it gets there."""

    def __init__(self, api: FakeStreams) -> None:
        self._api = api
        self._kernel = EachExpert(reference.expert_mlp)

    def __call__(self, *args: object) -> None:
        self._api.run(lambda: self._kernel(*args))


def pinned_store(num_experts: int, pinning: FakePinning | None = None) -> PinnedExpertStore:
    """The first experts of every layer of `STORE`."""
    store = PinnedExpertStore(STORE.layout, STORE.num_layers, num_experts, pinning or FakePinning())
    store.fill(STORE, num_threads=2)
    return store


@contextmanager
def offloaded(
    policy: str,
    num_slots: int,
    *,
    num_staging: int = 2,
    num_pinned: int = SHAPE.num_experts,
    has_cpu_experts: bool = False,
    seed: int = 0,
    disk: SlowStore | None = None,
    make_copies: Callable[..., StreamCopyLane] = StreamCopyLane,
    make_compute: Callable[..., StreamLane] = StreamLane,
) -> Iterator[tuple[OffloadedExperts, FakeStreams]]:
    """Experts on late streams, as the CUDA device puts them together."""
    api = FakeStreams(seed)
    host = pinned_store(num_pinned)
    ring = BounceRing(aligned_empty(5 * STORE.layout.slot_bytes).view(5, -1))
    copies = make_copies(api, num_readers=2)
    compute = make_compute(api, api.new_stream(is_urgent=False))
    cpu = ThreadLane("cpu", jitter_s=0.0003, seed=seed) if has_cpu_experts else None
    cache = ExpertCache(
        SHAPE,
        policy_of(policy, SHAPE),
        num_slots=num_slots,
        num_staging=num_staging,
        has_cpu_experts=has_cpu_experts,
    )
    arena = SlotArena.empty(STORE.layout, num_slots + num_staging)
    arena.memory.fill_(0xFF)
    pool = StreamSlotPool(
        STORE.layout,
        num_slots + num_staging,
        copies,
        HostCopy(api, host, disk or SlowStore(), ring),
        num_experts=SHAPE.num_experts,
        arena=arena,
        api=api,
    )
    experts = OffloadedExperts(
        cache,
        pool,
        kernel=LateKernel(api),
        compute_lane=compute,
        cpu_lane=cpu,
        cpu_kernel=EachExpert(reference.expert_mlp),
        host_store=host if has_cpu_experts else None,
        link=CudaLink(CPU, api, FakePinning()),
    )
    pool.fill(cache.place())
    yield experts, api
    lanes: list[Lane] = [copies, compute, *([cpu] if cpu else [])]
    for lane in lanes:
        lane.close()
    host.close()


class Inputs:
    """Random activations and routing, forward after forward."""

    def __init__(self, seed: int = 0) -> None:
        self.router = FakeRouter(SHAPE, seed)
        self._generator = torch.Generator().manual_seed(seed)

    def forward(self, num_tokens: int = 5) -> list[tuple[LayerDemand, Tensor]]:
        return [
            (demand, torch.randn(num_tokens, HIDDEN, generator=self._generator))
            for demand in self.router.forward(num_tokens)
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


def expected_of(demand: LayerDemand, hidden_TD: Tensor) -> Tensor:
    """The layer with every expert where it lies."""
    total_TD = torch.zeros(len(hidden_TD), HIDDEN)
    for expert in demand.expert_ids.tolist():
        out_TD = reference.expert_mlp(hidden_TD, STORE.weights(demand.layer, expert))
        chosen = torch.from_numpy((demand.topk_ids == expert) * demand.gate_weights)
        total_TD += 2.5 * chosen.sum(1).float()[:, None] * out_TD
    return total_TD


def is_right(out_TD: Tensor, demand: LayerDemand, hidden_TD: Tensor) -> bool:
    return torch.allclose(out_TD, expected_of(demand, hidden_TD), rtol=1e-4, atol=1e-4)


def count_wrong(experts: OffloadedExperts, num_forwards: int, seed: int = 0) -> int:
    inputs, num_wrong = Inputs(seed), 0
    for _ in range(num_forwards):
        for demand, hidden_TD in inputs.forward():
            num_wrong += not is_right(run(experts, demand, hidden_TD), demand, hidden_TD)
            experts.cache.check()
        experts.end_forward(outcome_of(demand.context))
    return num_wrong


# The layer on late streams


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("num_pinned", [8, 5])
def test_equals_the_dense_layer(policy: str, num_pinned: int) -> None:
    for num_slots in (0, 3, 12):
        with offloaded(
            policy, num_slots, num_staging=1 + num_slots % 3, num_pinned=num_pinned, seed=num_slots
        ) as (experts, _):
            assert count_wrong(experts, 5, seed=num_slots) == 0


@bounded(15)
@given(
    policy=st.sampled_from((*LIVE_POLICIES, "oled+prefetch:words=true,depth=2,least=0")),
    seed=st.integers(0, 1000),
    num_slots=st.integers(0, 16),
    num_staging=st.integers(1, 6),
    num_pinned=st.integers(1, 8),
)
def test_residency_never_changes_a_bit(
    policy: str, seed: int, num_slots: int, num_staging: int, num_pinned: int
) -> None:
    with (
        offloaded("naive-lru", 16) as (resident, _),
        offloaded(policy, num_slots, num_staging=num_staging, num_pinned=num_pinned, seed=seed) as (
            experts,
            _,
        ),
    ):
        resident.pool.fill(resident.cache.fill())
        inputs = Inputs(seed)
        for _ in range(4):
            for demand, hidden_TD in inputs.forward():
                wanted_TD = run(resident, demand, hidden_TD)
                assert torch.equal(run(experts, demand, hidden_TD), wanted_TD)
            experts.end_forward(outcome_of(demand.context))


@pytest.mark.parametrize("policy", ["oled", "fiddler", "oled+prefetch"])
def test_cpu_experts_are_computed_on_pinned_weights(policy: str) -> None:
    with offloaded(policy, 5, has_cpu_experts=True, seed=3) as (experts, _):
        plans = []
        experts.observers.append(lambda demand, plan: plans.append(len(plan.cpu_ids)))
        assert count_wrong(experts, 8) == 0
        assert sum(plans) > 0


class ForgetfulCopies(StreamCopyLane):
    """Does not wait for the readers of a slot."""

    def enqueue(self, work: Work, after: Sequence[Event]) -> cuda.Mark:
        return super().enqueue(work, ())


class ForgetfulCompute(StreamLane):
    """Does not wait for copies."""

    def enqueue(self, work: Work, after: Sequence[Event]) -> cuda.Mark:
        return super().enqueue(work, ())


@pytest.mark.parametrize(
    "lanes", [{"make_copies": ForgetfulCopies}, {"make_compute": ForgetfulCompute}]
)
def test_a_missing_wait_would_show(lanes: dict[str, Callable[..., StreamLane]]) -> None:
    """The tests above can fail: without one kind of wait, numbers are wrong."""
    with offloaded("naive-lru", 2, num_staging=2, seed=1, **lanes) as (experts, _):
        assert count_wrong(experts, 10) > 0


@pytest.mark.parametrize("fail_at", [0, 2, 7])
def test_recovers_from_a_failed_read(fail_at: int) -> None:
    disk = SlowStore(fail_at=(fail_at,))
    with offloaded("oled+prefetch", 5, num_pinned=3, seed=fail_at, disk=disk) as (experts, _):
        inputs, num_failed = Inputs(), 0
        for _ in range(8):
            for demand, hidden_TD in inputs.forward():
                try:
                    out_TD = run(experts, demand, hidden_TD)
                except OSError:
                    num_failed += 1
                    break
                assert is_right(out_TD, demand, hidden_TD)
                experts.cache.check()
        assert num_failed <= 1 and len(disk.threads) > fail_at


def test_a_layer_never_finished_leaves_nothing_behind() -> None:
    with offloaded("oled+prefetch", 6, num_pinned=5, seed=5) as (experts, _):
        assert count_wrong(experts, 2) == 0
        inputs = Inputs(9)
        for layer in (0, 1, 1, 0):
            demand, hidden_TD = inputs.forward()[layer]
            ids_TK, gates_TK = map(torch.from_numpy, (demand.topk_ids, demand.gate_weights))
            experts.start(layer, hidden_TD, ids_TK, gates_TK, demand.context)
            assert count_wrong(experts, 2, seed=layer) == 0


def test_only_threads_of_the_lane_read_from_disk() -> None:
    disk = SlowStore()
    with offloaded("oled+prefetch", 4, num_pinned=2, disk=disk) as (experts, _):
        count_wrong(experts, 3)
    assert disk.threads
    assert all(name.startswith(("oled-moe-read", "oled-moe-ahead")) for name in disk.threads)


# Lanes


@pytest.fixture
def copy_lane() -> Iterator[Callable[[FakeStreams], StreamCopyLane]]:
    made = []

    def make(api: FakeStreams) -> StreamCopyLane:
        made.append(StreamCopyLane(api, num_readers=1))
        return made[-1]

    yield make
    for lane in made:
        lane.close()


class Gate:
    """An event that the test opens by hand."""

    def __init__(self) -> None:
        self._is_open = threading.Event()

    @property
    def is_fired(self) -> bool:
        return self._is_open.is_set()

    def open(self) -> None:
        self._is_open.set()

    def wait(self) -> None:
        assert self._is_open.wait(PATIENCE_S), "the test never opened the gate"


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline_s, "it never came to that"
        time.sleep(0.001)


def test_work_runs_behind_its_events_and_blocks_nobody() -> None:
    api = FakeStreams()
    first, second = (StreamLane(api, api.new_stream(is_urgent=False)) for _ in range(2))
    seen: list[str] = []
    one = first.submit(lambda: api.run(lambda: seen.append("one")))
    two = second.submit(lambda: api.run(lambda: seen.append("two")), after=(DONE, one))
    assert not two.is_fired or seen == ["one", "two"]
    two.wait()
    assert seen == ["one", "two"] and one.is_fired and two.is_fired


def test_an_event_without_its_work_on_a_stream_blocks() -> None:
    event = StreamEvent(FakeStreams())
    waiter = threading.Thread(target=event.wait, daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive() and not event.is_fired and not event.is_put
    event.put(None)
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive() and event.is_fired


def test_few_guesses_are_on_the_link_at_a_time(
    copy_lane: Callable[[FakeStreams], StreamCopyLane],
) -> None:
    api = FakeStreams()
    lane = copy_lane(api)
    target, source = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    events = [lane.submit_ahead(lambda: api.copy(target, source)) for _ in range(20)]
    for event in events:
        event.wait()
    assert 1 <= api.most_queued_copies["later"] <= MOST_AHEAD


def test_an_urgent_copy_passes_guesses_and_hurry_makes_one_urgent(
    copy_lane: Callable[[FakeStreams], StreamCopyLane],
) -> None:
    api = FakeStreams()
    lane, gate = copy_lane(api), Gate()
    done: list[object] = []
    blocking = [lane.submit_ahead(gate.wait) for _ in range(MOST_AHEAD)]
    guesses = [
        lane.submit_ahead(lambda n=number: api.run(lambda: done.append(n))) for number in range(3)
    ]
    lane.submit(lambda: api.run(lambda: done.append("urgent"))).wait()
    assert done == ["urgent"]
    lane.hurry(guesses[1])
    guesses[1].wait()
    assert done == ["urgent", 1]
    lane.hurry(guesses[1])
    assert lane.cancel(guesses[0]) and guesses[0].is_fired
    assert not lane.cancel(guesses[0]) and not lane.cancel(guesses[1])
    gate.open()
    guesses[2].wait()
    assert done == ["urgent", 1, 2]
    for event in blocking:
        event.wait()


def test_closing_drops_guesses_that_have_not_begun(
    copy_lane: Callable[[FakeStreams], StreamCopyLane],
) -> None:
    api = FakeStreams()
    lane, gate, done = copy_lane(api), Gate(), []
    begun = [lane.submit_ahead(gate.wait) for _ in range(MOST_AHEAD)]
    wait_until(lambda: not lane._guesses)
    late = lane.submit_ahead(lambda: done.append("late"))
    closer = threading.Thread(target=lane.close)
    closer.start()
    wait_until(lambda: late.is_fired)
    gate.open()
    closer.join(PATIENCE_S)
    assert not closer.is_alive() and not done and all(event.is_fired for event in begun)
    with pytest.raises(OledMoeError, match="closed"):
        lane.submit(lambda: None)


def test_a_copy_behind_a_host_event_does_not_block_the_caller(
    copy_lane: Callable[[FakeStreams], StreamCopyLane],
) -> None:
    api = FakeStreams()
    lane, gate, done = copy_lane(api), Gate(), []
    event = lane.submit(lambda: api.run(lambda: done.append(1)), after=(gate,))
    assert not event.is_fired and not done
    gate.open()
    event.wait()
    assert done == [1]


def test_errors_of_threads_belong_to_the_waiter(
    copy_lane: Callable[[FakeStreams], StreamCopyLane],
) -> None:
    def read(enqueue: cuda.Enqueue) -> cuda.Mark:
        raise OSError("no such luck")

    def work() -> None:
        raise WouldBlock(read)

    lane = copy_lane(FakeStreams())
    for event in (lane.submit(work), lane.submit_ahead(work)):
        with pytest.raises(OSError, match="luck"):
            event.wait()
        assert event.is_fired


def test_errors_of_the_caller_reach_the_caller() -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    lane = StreamLane(FakeStreams())
    with pytest.raises(DoesNotFitError, match="lower memory, expert_memory, experts_per_layer"):
        lane.submit(work)


# Pinned memory


def test_all_memory_is_pinned_in_one_piece_and_unpinned() -> None:
    pinning = FakePinning()
    memory = PinnedMemory.empty(5 * 2**20 + 3, pinning)
    assert pinning.num_bytes == memory.num_pinned_bytes == len(memory.memory) == 5 * 2**20 + 3
    assert len(pinning.pinned) == 1 and memory.memory.data_ptr() % 4096 == 0
    memory.close()
    assert not pinning.pinned
    memory.close()


def test_memory_is_unpinned_before_it_goes() -> None:
    pinning = FakePinning()
    PinnedMemory.empty(2**20, pinning)
    assert not pinning.pinned


@pytest.mark.parametrize("most_at_once", [100, 64, 40])
def test_a_refused_registration_is_tried_in_parts(
    most_at_once: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_memory, "_LEAST_PINNED_BYTES", 2**16)
    pinning = FakePinning(most_at_once=most_at_once * 4096)
    memory = PinnedMemory(aligned_empty(400 * 4096), pinning, granule_bytes=3 * 4096)
    assert memory.num_pinned_bytes == 400 * 4096 and not caplog.records
    base = memory.memory.data_ptr()
    starts = [(address - base) // 4096 for address in sorted(pinning.pinned)]
    assert all(start % 3 == 0 for start in starts), "an expert would lie in two registrations"


@pytest.mark.parametrize("most", [0, 250])
def test_what_cannot_be_pinned_is_said_once(
    most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_memory, "_LEAST_PINNED_BYTES", 2**14)
    pinning = FakePinning(most=most * 4096)
    memory = PinnedMemory(aligned_empty(400 * 4096), pinning)
    assert memory.num_pinned_bytes == pinning.num_bytes <= most * 4096
    assert memory.num_pinned_bytes > (most - 20) * 4096
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "out of memory" in record.getMessage()
    assert "ulimit -l" in record.getMessage()


def test_a_pinned_store_takes_its_experts_and_no_more() -> None:
    pinning = FakePinning()
    seen: list[tuple[int, int]] = []
    store = PinnedExpertStore(STORE.layout, 2, 5, pinning)
    store.fill(STORE, num_threads=3, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (10, 10) and len(seen) == 10
    assert pinning.num_bytes == store.num_pinned_bytes == 10 * STORE.layout.slot_bytes
    for layer in range(2):
        for expert in range(5):
            for found, wanted in zip(
                store.weights(layer, expert), STORE.weights(layer, expert), strict=True
            ):
                assert torch.equal(found, wanted)
    store.close()
    assert not pinning.pinned
    with pytest.raises(OledMoeError, match="closed"):
        store.weights(0, 0)


def test_copies_from_memory_that_is_not_pinned_are_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pinning = FakePinning(most=0)
    store = pinned_store(8, pinning)
    assert store.num_pinned_bytes == 0 and "slower" in caplog.text
    assert isinstance(store, HostExpertStore)
    slot = torch.zeros(STORE.layout.slot_bytes, dtype=torch.uint8)
    HostCopy(FakeStreams(), store, None, None)(1, 3, slot)
    assert torch.equal(slot, store.arena.slot(11))


def test_a_bounce_buffer_is_free_behind_its_copy() -> None:
    api = FakeStreams()
    ring = BounceRing(torch.zeros(1, 8, dtype=torch.uint8))
    target = torch.zeros(8, dtype=torch.uint8)
    buffer = ring.take()
    buffer.fill_(7)
    with api.use(api.new_stream(is_urgent=True)):
        api.copy(target, buffer)
        ring.give_back(buffer, api.mark())
    ring.take().fill_(9)
    assert target.tolist() == [7] * 8


# The link


@pytest.mark.parametrize("seed", range(5))
def test_uploads_keep_their_values(seed: int) -> None:
    """More tensors than buffers, on a late stream: no buffer is overwritten while it is read."""
    api, pinning = FakeStreams(seed), FakePinning()
    link = CudaLink(CPU, api, pinning)
    generator = torch.Generator().manual_seed(seed)
    sent, found = [], []
    with api.use(api.new_stream(is_urgent=False)):
        for number in range(60):
            size = (1, 100, 100_000)[number % 3]
            dtype = (torch.float32, torch.int64, torch.bfloat16)[number // 3 % 3]
            sent.append(torch.randint(0, 100, (size, 2), generator=generator).to(dtype))
            found.append(link.to_device(sent[-1]))
        mark = api.mark()
    mark.synchronize()
    assert all(map(torch.equal, sent, found))
    assert pinning.num_bytes > 17 * 2**18
    link.close()
    assert not pinning.pinned


def test_downloads_are_the_callers_to_keep() -> None:
    api = FakeStreams()
    link = CudaLink(CPU, api, FakePinning())
    wide = torch.randn(3, 64).to(torch.bfloat16)
    with api.use(api.new_stream(is_urgent=False)):
        first = link.to_host(torch.arange(5), wide[:, ::2], torch.empty(0, 3))
        second = link.to_host(torch.arange(100_000))
    assert first[0].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(first[1], wide[:, ::2]) and first[2].shape == (0, 3)
    assert torch.equal(second[0], torch.arange(100_000))


# The engine on a GPU that is played by late streams


def fake_gpu(seed: int = 0, free_bytes: int = 4 * 2**30) -> Gpu:
    return Gpu(CPU, free_bytes, FakeStreams(seed), FakePinning(), GPU_KERNELS["each"], FakeGraphs)


@pytest.fixture
def gpu_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Opens an engine on `cuda`, whose GPU is a fake with `free_bytes`."""

    def open_engine(
        model: str = "llada2_a",
        *,
        seed: int = 0,
        free_bytes: int = 4 * 2**30,
        ram_bytes: int = 4 * 2**30,
        **settings: object,
    ) -> Engine:
        monkeypatch.setattr(engine_module, "open_gpu", lambda: fake_gpu(seed, free_bytes))
        monkeypatch.setattr(engine_module, "usable_memory_bytes", lambda: ram_bytes)
        config = EngineConfig(device="cuda", hardware=DEFAULT_CUDA_PROFILE, **settings)
        return Engine(GOLDEN / model, config)

    return open_engine


@pytest.mark.parametrize("model, version", [("llada2_a", "v20"), ("llada2_a", "v21")])
def test_golden_runs(gpu_engine: Callable[..., Engine], model: str, version: str) -> None:
    with gpu_engine(model, experts_per_layer=5, cpu_experts=False) as engine:
        check_runs(engine, model, version, every=4)


@pytest.mark.parametrize("policy", ["naive-lru", "oled+prefetch", "moe-infinity", "tide"])
@pytest.mark.parametrize("cpu_experts", [False, True])
def test_golden_run_for_other_policies(
    gpu_engine: Callable[..., Engine], policy: str, cpu_experts: bool
) -> None:
    with gpu_engine(
        "llada2_b", experts_per_layer=2.5, policy=policy, cpu_experts=cpu_experts, seed=7
    ) as engine:
        check_runs(engine, "llada2_b", "v20", every=9)
        assert engine.gpu_plan is not None
        assert engine.gpu_plan.num_pinned == engine.memory_plan.shape.num_experts_total


def test_everything_resident_needs_no_ram_behind_it(gpu_engine: Callable[..., Engine]) -> None:
    with gpu_engine("llada2_b") as engine:
        assert engine.memory_plan.holds_all_experts and engine.cache.is_complete
        check_runs(engine, "llada2_b", "v20", every=6)
        assert engine.experts._host_store is None
        loads = []
        engine.experts.observers.append(lambda demand, plan: loads.append(len(plan.load_ids)))
        check_runs(engine, "llada2_b", "v20", every=6)
        assert sum(loads) == 0


def test_what_ram_cannot_hold_stays_on_disk(
    gpu_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    with gpu_engine("llada2_a", experts_per_layer=4) as engine:
        plan = engine.gpu_plan
        assert plan is not None and plan.num_on_disk == 0 and not caplog.records
        expert_bytes = plan.shape.expert_bytes
        buffers = 2 * (DEFAULT_CUDA_PROFILE.disk_queue_depth + MOST_AHEAD + 1) * expert_bytes
    room = (buffers + 25 * expert_bytes) * 10 // 9
    with gpu_engine("llada2_a", experts_per_layer=4, ram_bytes=room) as engine:
        plan = engine.gpu_plan
        assert plan is not None and 0 < plan.num_pinned < plan.shape.num_experts_total
        hosted = plan.num_pinned // plan.shape.num_layers
        computed: set[int] = set()
        engine.experts.observers.append(lambda _, plan: computed.update(plan.cpu_ids.tolist()))
        check_runs(engine, "llada2_a", "v20", every=5)
        assert computed and max(computed) < hosted
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "is read from disk" in record.getMessage()


def test_a_gpu_that_is_too_small_says_what_to_lower(gpu_engine: Callable[..., Engine]) -> None:
    with gpu_engine("llada2_a", experts_per_layer=16) as engine:
        needed = engine.memory_plan.total_bytes
        expert_bytes = engine.memory_plan.shape.expert_bytes
    with pytest.raises(DoesNotFitError, match="of the GPU.*lower experts_per_layer") as caught:
        gpu_engine("llada2_a", experts_per_layer=16, free_bytes=needed - 10 * expert_bytes)
    assert caught.value.exit_code == 4


def test_a_kernel_that_cannot_be_compiled_is_replaced(
    gpu_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    gpu = fake_gpu()._replace(make_kernel=lambda upload: refuse)
    monkeypatch.setattr(
        "test_cuda.fake_gpu",
        lambda *args: gpu,
    )
    with gpu_engine("llada2_b", experts_per_layer=3, cpu_experts=False) as engine:
        check_runs(engine, "llada2_b", "v20", every=9)
    assert "cannot be compiled here (Failed to find C compiler" in caplog.text


# Graphs


@pytest.mark.parametrize("lossy", [None, "des-vote:experts=4"])
def test_restricted_routing_is_that_of_the_cpu(
    gpu_engine: Callable[..., Engine], tmp_path: Path, lossy: str | None
) -> None:
    """Block routing, recorded pieces included, and a lossy rule: late streams change no token."""
    config = json.loads((GOLDEN / "llada2_a" / "config.json").read_text())
    config |= {"expert_capacity": config["num_experts_per_tok"] + 2, "block_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(GOLDEN / "llada2_a" / "model.safetensors")
    params = SamplingParams(max_tokens=24, threshold=0.3, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(11, 30))]

    def answers(engine: Engine) -> list[list[int]]:
        return [engine.generate(prompt, params).token_ids for prompt in prompts]

    common = {"experts_per_layer": 5, "cpu_experts": False, "lossy": lossy}
    with Engine(tmp_path, EngineConfig(**common)) as engine:
        expected = answers(engine)
    for graphs in (False, True) if lossy is None else (False,):
        with gpu_engine(tmp_path, cuda_graphs=graphs, **common) as engine:
            assert answers(engine) == expected


def test_golden_runs_with_recorded_pieces(gpu_engine: Callable[..., Engine]) -> None:
    with gpu_engine("llada2_a", experts_per_layer=5, cpu_experts=False, cuda_graphs=True) as engine:
        pieces = engine.model.run_piece
        assert isinstance(pieces, RecordedPieces)
        api = pieces._api

        def spoil(outcome: object) -> None:
            api.forget()

        # What a forward leaves in the graphs' own tensors is nobody's any more.
        engine.outcome_observers.append(spoil)
        check_runs(engine, "llada2_a", "v20", every=4)
        assert pieces.num_recordings >= 3 * engine.model_config.num_moe_layers
        assert sum(graph.num_replays for graph in api.graphs) > 100


def add_twice(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return left + right, left + 2 * right


def test_a_piece_is_recorded_the_second_time_and_right_ever_after() -> None:
    api = FakeGraphs()
    pieces = RecordedPieces(api, most_rows=8, most_sizes=2)
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        num_rows = (1, 4, 8, 9)[number % 4]
        left, right = torch.rand((2, num_rows, 3), generator=generator)
        for layer in range(2):
            found = pieces((layer, "add"), add_twice, left, right)
            assert all(map(torch.equal, found, add_twice(left, right)))
    # Rows beyond the limit and sizes beyond the second are never recorded.
    assert pieces.num_recordings == 2 * 2
    assert {graph.outputs[0].shape[0] for graph in api.graphs} == {1, 4}


def test_pieces_that_are_not_faster_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeGraphs(is_faster=False)
    pieces = RecordedPieces(api)
    with caplog.at_level("INFO"):
        for _ in range(5):
            for layer in range(3):
                pieces((layer, "add"), add_twice, torch.ones(2, 3), torch.ones(2, 3))
    assert pieces.num_recordings == 0 and len(api.graphs) == 1
    (record,) = caplog.records
    assert "add for 2 tokens takes" in record.getMessage() and "as it is" in record.getMessage()


# Errors


def test_errors_of_cuda_become_sentences() -> None:
    with pytest.raises(DoesNotFitError, match="out of memory while loading; lower"):
        with cuda_errors("while loading"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
    with pytest.raises(OledMoeError, match=r"illegal memory access.*start it again"):
        with cuda_errors("while decoding"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")
    for error in (RuntimeError("something else"), DoesNotFitError("CUDA"), ValueError("CUDA")):
        with pytest.raises(type(error)) as caught, cuda_errors("while decoding"):
            raise error
        assert caught.value is error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MissingDependencyError, match="install a CUDA build of torch") as caught:
        check_cuda()
    assert caught.value.exit_code == 5
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ConfigError, match="no GPU here; check the driver with nvidia-smi") as found:
        check_cuda()
    assert found.value.exit_code == 2
    with pytest.raises(ConfigError, match="no GPU here"):
        Engine("demo", EngineConfig(device="cuda"))
