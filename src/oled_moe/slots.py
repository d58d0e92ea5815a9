"""SlotPool: the slots of the fast tier and the copies into them, ordered by events.

The pool carries out plans; it never decides. A slot is refilled only behind its last reader, and
a reader runs only behind the copy it needs. Eviction is a change of tables elsewhere: weights are
read-only and nothing is ever copied back.
"""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from oled_moe.lanes import DONE, Event, Lane
from oled_moe.store import ExpertLayout, ExpertStore, ExpertWeights, aligned_empty
from oled_moe.types import LayerDemand, LayerPlan

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


class SlotPool:
    """`num_slots` equal slots in one arena, filled through a copy lane.

    `copy(layer, expert, slot)` fills one slot and blocks. `is_poisoned`: freed slots become NaN.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        num_slots: int,
        copy_lane: Lane,
        copy: Copy,
        *,
        is_poisoned: bool = False,
    ) -> None:
        arena = aligned_empty(num_slots * layout.slot_bytes)
        self._slots = [
            arena[i * layout.slot_bytes : (i + 1) * layout.slot_bytes] for i in range(num_slots)
        ]
        self._weights = [layout.views(slot) for slot in self._slots]
        self._copy_lane = copy_lane
        self._copy = copy
        self._is_poisoned = is_poisoned
        self._idle: list[Event] = [DONE] * num_slots
        self._was_filled = [False] * num_slots
        self._layer = 0
        self._loads: list[tuple[int, int]] = []
        self._ready: list[Event] = []
        # For each slot, how many readers of the current plan are still to be submitted.
        self._coming_readers: dict[int, int] = {}
        self.num_filled = 0
        if is_poisoned:
            for slot in self._slots:
                poison(slot)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def weights(self, slot: int) -> ExpertWeights:
        """The matrices in a slot; read them only behind its `ready` event."""
        return self._weights[slot]

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

    def apply(self, demand: LayerDemand, plan: LayerPlan) -> None:
        """Queue the plan's copies, in its order, as far as no reader is still to come.

        The rest follow as `submitted_reader` tells of the readers they wait for.
        """
        self._layer = demand.layer
        self._loads = list(zip(plan.load_ids.tolist(), plan.load_slots.tolist(), strict=True))
        self._ready = []
        self._coming_readers = dict.fromkeys(plan.hit_slots.tolist(), 1)
        self._advance()

    def ready(self, load: int) -> Event:
        """The event of the plan's load with this index: the slot holds its expert."""
        return self._ready[load]

    def submitted_reader(self, slot: int, reader: Event) -> None:
        """Tell that the next reader of `slot` is under way and fires `reader` when done."""
        self._idle[slot] = reader
        self._coming_readers[slot] -= 1
        self._advance()

    def release(self, plan: LayerPlan) -> None:
        """After the layer: what the plan freed holds nothing wanted any more."""
        if self._is_poisoned:
            for slot in plan.freed_slots.tolist():
                self._idle[slot].wait()
                poison(self._slots[slot])

    def drain(self, readers: Sequence[Event]) -> None:
        """After a failure: wait until every copy queued and every reader has ended, well or not."""
        for event in (*self._ready, *readers):
            try:
                event.wait()
            # The failure being handled is the one to report; these must only have ended.
            except Exception:
                continue
        self._idle = [DONE] * len(self._slots)
        self._loads, self._ready, self._coming_readers = [], [], {}

    def _advance(self) -> None:
        """Queue copies in order until one has to wait for a reader not yet submitted."""
        while len(self._ready) < len(self._loads):
            expert, slot = self._loads[len(self._ready)]
            if self._coming_readers.get(slot, 0):
                return
            self._coming_readers[slot] = 1
            self._note_filled(slot)
            self._ready.append(self._submit(self._layer, expert, slot))

    def _submit(self, layer: int, expert: int, slot: int) -> Event:
        target = self._slots[slot]

        def work() -> None:
            self._copy(layer, expert, target)

        return self._copy_lane.submit(work, after=(self._idle[slot],))

    def _note_filled(self, slot: int) -> None:
        if not self._was_filled[slot]:
            self._was_filled[slot] = True
            self.num_filled += 1
