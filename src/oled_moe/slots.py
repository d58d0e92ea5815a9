"""SlotPool: the slots of the fast tier and the copies into them, ordered by events.

The pool carries out plans; it never decides. A slot is refilled only behind its last reader, and
a reader runs only behind the copy it needs. Eviction is a change of tables elsewhere: weights are
read-only and nothing is ever copied back.
"""

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from oled_moe.lanes import DONE, CopyLane, Event
from oled_moe.store import ExpertLayout, ExpertStore, ExpertWeights, SlotArena
from oled_moe.types import CopyPlan, LayerDemand, LayerPlan

# Every float format of which all bytes are 0xFF is a NaN.
_NAN_BYTE = 0xFF

Copy = Callable[[int, int, Tensor], None]


class RatedCopy:
    """Copies one expert into a slot no faster than a set rate: the emulated link.

    The slot is NaN until the copy is complete, so that an early reader shows in the output.
    Units: bytes per second, seconds.
    """

    def __init__(self, store: ExpertStore, *, bytes_per_s: float, latency_s: float) -> None:
        self._store = store
        self._seconds = latency_s + store.layout.slot_bytes / bytes_per_s

    def __call__(self, layer: int, expert: int, slot: Tensor) -> None:
        start_s = time.perf_counter()
        poison(slot)
        remaining_s = self._seconds - (time.perf_counter() - start_s)
        if remaining_s > 0:
            time.sleep(remaining_s)
        self._store.read_into(layer, expert, slot)


def poison(slot: Tensor) -> None:
    """Fill a slot with NaN. Shapes: slot uint8 [slot_bytes]. Mutates: slot."""
    # numpy works on the calling thread alone; torch would start workers for each copy thread.
    slot.numpy()[:] = _NAN_BYTE


class _Ended:
    """Waits until an event has fired, well or not."""

    def __init__(self, event: Event) -> None:
        self._event = event

    @property
    def is_fired(self) -> bool:
        return self._event.is_fired

    def wait(self) -> None:
        try:
            self._event.wait()
        # Whoever wanted the outcome of that work waits for the event itself.
        except Exception:
            return


class SlotPool:
    """`num_slots` equal slots in one arena, filled through a copy lane.

    `copy(layer, expert, slot)` fills one slot and blocks. `num_experts`: experts of a layer, by
    which `CopyPlan` numbers them. `is_poisoned`: freed slots become NaN. `arena`: the memory, by
    default the host's.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        num_slots: int,
        copy_lane: CopyLane,
        copy: Copy,
        *,
        num_experts: int,
        is_poisoned: bool = False,
        arena: SlotArena | None = None,
    ) -> None:
        self.arena = SlotArena.empty(layout, num_slots) if arena is None else arena
        assert len(self.arena) == num_slots
        self._copy_lane = copy_lane
        self._copy = copy
        self._num_experts = num_experts
        self._is_poisoned = is_poisoned
        self._idle: list[Event] = [DONE] * num_slots
        self._was_filled = [False] * num_slots
        # Copies ahead of their demand, by slot, until the slot is read or refilled.
        self._ahead: dict[int, Event] = {}
        self._layer = 0
        self._loads: list[tuple[int, int]] = []
        self._ready: list[Event] = []
        # For each slot, how many readers of the current plan are still to be submitted.
        self._coming_readers: dict[int, int] = {}
        # Sizes of the waves of synchronous loads still to come, and how many loads may be queued.
        self._waves: list[int] = []
        self._num_allowed = 0
        self._copy_times = (0, 0.0)
        self._copy_lock = threading.Lock()
        self.num_filled = 0
        self.num_staged_ready = 0
        self.num_cancelled = 0
        if is_poisoned:
            for slot in range(num_slots):
                poison(self.arena.slot(slot))

    @property
    def num_slots(self) -> int:
        return len(self.arena)

    @property
    def copy_times(self) -> tuple[int, float]:
        return self._copy_times

    def weights(self, slot: int) -> ExpertWeights:
        """The matrices in a slot; read them only behind its `ready` event."""
        return self.arena.weights(slot)

    def fill(
        self,
        loads: Sequence[tuple[int, int, int]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Copy (layer, expert, slot) for each of `loads` and wait, as at start."""
        events = []
        for layer, expert, slot in loads:
            self._note_filled(slot)
            events.append(self._submit(layer, expert, slot))
        for index, event in enumerate(events):
            event.wait()
            if progress is not None:
                progress(index + 1, len(events))

    def copy_ahead(self, copies: CopyPlan) -> None:
        """Queue copies behind everything urgent; their slots have no readers."""
        pairs = zip(copies.expert_ids.tolist(), copies.slots.tolist(), strict=True)
        for number, slot in pairs:
            layer, expert = divmod(number, self._num_experts)
            self._note_filled(slot)
            self._ahead[slot] = self._submit(layer, expert, slot, is_urgent=False)

    def apply(self, demand: LayerDemand, plan: LayerPlan) -> None:
        """Queue the plan's copies, in its order, as far as no reader is still to come.

        The rest follow as `submitted_readers` tells of the readers they wait for.
        `num_staged_ready` says how many staged experts were there already.
        """
        self._layer = demand.layer
        self._loads = list(zip(plan.load_ids.tolist(), plan.load_slots.tolist(), strict=True))
        self._ready = []
        self._waves = list(plan.wave_sizes)
        self._num_allowed = self._waves.pop(0) if self._waves else len(self._loads)
        self._coming_readers = dict.fromkeys(plan.hit_slots.tolist(), 1)
        staged_slots = plan.staged_slots.tolist()
        # Guesses that the layer did not want.
        for slot in self._ahead.keys() & (set(plan.freed_slots.tolist()) - set(staged_slots)):
            if self._cancel(self._ahead[slot]):
                del self._ahead[slot]
        self.num_staged_ready = 0
        for slot in staged_slots:
            self._coming_readers[slot] = 1
            self._copy_lane.hurry(self._ahead[slot])
            self.num_staged_ready += self._ahead[slot].is_fired
        self._advance()
        self.copy_ahead(plan.prefetch)

    def ready(self, load: int) -> Event:
        """The event of the plan's load with this index: the slot holds its expert."""
        return self._ready[load]

    def has_arrived(self, load: int) -> bool:
        """Whether the plan's load with this index is queued and its copy has ended."""
        return load < len(self._ready) and self._ready[load].is_fired

    def ready_staged(self, slot: int) -> Event:
        """The event of a staged expert's copy."""
        return self._ahead[slot]

    def submitted_readers(self, slots: Sequence[int], reader: Event) -> None:
        """Tell that the next reader of each slot is under way and fires `reader` when done."""
        for slot in slots:
            self._idle[slot] = reader
            self._coming_readers[slot] -= 1
            # A copy ahead has been waited for by its first reader: the slot is like any other.
            self._ahead.pop(slot, None)
        self._advance()

    def next_wave(self) -> None:
        """The kernels of a wave of synchronous loads are done: queue the copies of the next."""
        if self._waves:
            self._num_allowed += self._waves.pop(0)
        self._advance()

    def release(self, plan: LayerPlan) -> None:
        """After the layer: what the plan freed holds nothing wanted any more."""
        if self._is_poisoned:
            for slot in plan.freed_slots.tolist():
                self._idle[slot].wait()
                if slot in self._ahead:
                    _Ended(self._ahead.pop(slot)).wait()
                poison(self.arena.slot(slot))

    def drain(self, readers: Sequence[Event]) -> None:
        """After a failure: wait until every copy queued and every reader has ended, well or not."""
        for event in (*self._ready, *readers):
            _Ended(event).wait()
        self._idle = [DONE] * len(self.arena)
        self._loads, self._ready, self._coming_readers = [], [], {}
        self._waves, self._num_allowed = [], 0

    def _advance(self) -> None:
        """Queue copies in order until one has to wait for a reader not yet submitted."""
        while len(self._ready) < self._num_allowed:
            expert, slot = self._loads[len(self._ready)]
            if self._coming_readers.get(slot, 0):
                return
            self._coming_readers[slot] = 1
            self._note_filled(slot)
            self._ready.append(self._submit(self._layer, expert, slot))

    def _submit(self, layer: int, expert: int, slot: int, *, is_urgent: bool = True) -> Event:
        target = self.arena.slot(slot)
        after: list[Event] = [self._idle[slot]]
        earlier = self._ahead.pop(slot, None)
        if earlier is not None and not self._cancel(earlier):
            # A guess that nobody wanted is on its way into the slot.
            after.append(_Ended(earlier))

        def work() -> None:
            start_s = time.perf_counter()
            self._copy(layer, expert, target)
            taken_s = time.perf_counter() - start_s
            with self._copy_lock:
                num_copies, total_s = self._copy_times
                self._copy_times = (num_copies + 1, total_s + taken_s)

        submit = self._copy_lane.submit if is_urgent else self._copy_lane.submit_ahead
        return submit(work, after=after)

    def _cancel(self, event: Event) -> bool:
        is_cancelled = self._copy_lane.cancel(event)
        self.num_cancelled += is_cancelled
        return is_cancelled

    def _note_filled(self, slot: int) -> None:
        if not self._was_filled[slot]:
            self._was_filled[slot] = True
            self.num_filled += 1
