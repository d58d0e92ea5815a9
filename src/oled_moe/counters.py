"""Counts of hits, loads and copies ahead; engine and simulator count with the same object.

Definitions: policies.md 3 and trace-format.md, replay rule 6. Ratios are means over the layers of
a forward, then over the forwards with a row that denoises.
"""

from dataclasses import dataclass, field

from oled_moe.types import CopyPlan, ForwardContext, LayerDemand, LayerPlan, Phase

_Blocks = dict[int, int]


class ExpertCounters:
    """Watches demands and plans; an observer of whoever carries plans out.

    Loads and runs on the CPU or in a lower precision count in every phase; ratios, and what is
    called `denoise`, only in forwards that denoise. A hit is an expert kept since an earlier use.
    An expert that was copied ahead is no hit when it is first wanted: it is useful where its copy
    was complete when the demand became known, else late; what was copied and never wanted is
    wasted. `num_loads` are copies in full precision on demand, `num_low_loads` those in a lower
    one.
    """

    def __init__(self) -> None:
        self.num_loads = 0
        self.num_denoise_loads = 0
        self.num_cpu_runs = 0
        self.num_low_loads = 0
        self.num_low_runs = 0
        self.num_prefetched = 0
        self.num_useful = 0
        self.num_late = 0
        self.num_cancelled = 0
        self.utilization = MeanOfMeans()
        self.hit_rate = MeanOfMeans()
        # The same with the copies ahead that were there in time.
        self.ready_utilization = MeanOfMeans()
        self.ready_rate = MeanOfMeans()
        self._transfers = _TransferCounter()

    @property
    def num_wasted(self) -> int:
        """Copies ahead made, or still under way, that no demand has used."""
        return self.num_prefetched - self.num_cancelled - self.num_useful - self.num_late

    @property
    def effective_transfer_ratio(self) -> float:
        """Share of experts transferred for a denoising forward that the same request's next one
        found resident and wanted at that layer, block boundaries included."""
        return ratio(self._transfers.num_reused, self._transfers.num_transferred)

    @property
    def effective_transfer_ratio_within_blocks(self) -> float:
        """The same without the steps from one block to the next."""
        counts = self._transfers
        return ratio(counts.num_reused_within_blocks, counts.num_transferred_within_blocks)

    def __call__(self, demand: LayerDemand, plan: LayerPlan, num_ready: int = 0) -> None:
        """Count one layer; `num_ready` of the staged experts were there when it was demanded."""
        num_loads, num_staged = len(plan.load_ids), len(plan.staged_ids)
        self.num_loads += num_loads
        self.num_cpu_runs += len(plan.cpu_ids)
        if plan.low is not None:
            self.num_low_loads += len(plan.low.load_ids)
            self.num_low_runs += plan.low.num_demanded
        self.num_prefetched += len(plan.prefetch)
        self.num_useful += num_ready
        self.num_late += num_staged - num_ready
        context = demand.context
        if not context.is_denoise:
            return
        self.num_denoise_loads += num_loads
        forward_id, capacity = context.forward_id, plan.capacity
        num_hits, num_demanded = len(plan.hit_ids), plan.num_demanded
        self.utilization.add(forward_id, num_hits, capacity)
        self.hit_rate.add(forward_id, num_hits, num_demanded)
        self.ready_utilization.add(forward_id, num_hits + num_ready, capacity)
        self.ready_rate.add(forward_id, num_hits + num_ready, num_demanded)
        self._transfers.add(demand, plan)

    def copied_ahead(self, copies: CopyPlan) -> None:
        """Count copies that were asked for before the first layer."""
        self.num_prefetched += len(copies)

    def cancelled(self, num_copies: int) -> None:
        """Count copies ahead that were never begun: nobody could want them any more."""
        self.num_cancelled += num_copies


class MeanOfMeans:
    """Ratios averaged within a forward, then over forwards; and the ratio of sums."""

    def __init__(self) -> None:
        self._forward_id = -1
        self._sum_ratios = 0.0
        self._num_ratios = 0
        self._sum_means = 0.0
        self._num_means = 0
        self._sum_parts = 0
        self._sum_wholes = 0

    def add(self, forward_id: int, part: int, whole: int) -> None:
        """Note one layer; the layers of a forward come one after another."""
        if forward_id != self._forward_id:
            self._close_forward()
            self._forward_id = forward_id
        self._sum_ratios += ratio(part, whole)
        self._num_ratios += 1
        self._sum_parts += part
        self._sum_wholes += whole

    def mean(self) -> float:
        self._close_forward()
        return ratio(self._sum_means, self._num_means)

    def pooled(self) -> float:
        return ratio(self._sum_parts, self._sum_wholes)

    def _close_forward(self) -> None:
        if self._num_ratios:
            self._sum_means += self._sum_ratios / self._num_ratios
            self._num_means += 1
            self._sum_ratios, self._num_ratios = 0.0, 0
            # Whatever is added after a mean was taken belongs to a forward of its own.
            self._forward_id = -1


@dataclass(slots=True)
class _TransferCounter:
    """Which transferred experts the next denoising forward of a request finds and wants.

    Staged experts that were demanded count as transferred too. In a batch the next forward is the
    next with any of the requests in it, and it stays within blocks if all those do.
    """

    num_transferred: int = 0
    num_reused: int = 0
    num_transferred_within_blocks: int = 0
    num_reused_within_blocks: int = 0
    _context: ForwardContext | None = None
    _blocks: _Blocks = field(default_factory=dict)
    _last: dict[int, tuple[_Blocks, list[int]]] = field(default_factory=dict)

    def add(self, demand: LayerDemand, plan: LayerPlan) -> None:
        if demand.context is not self._context:
            self._context = demand.context
            self._blocks = {
                row.request_id: row.block_id
                for row in demand.context.rows
                if row.phase == Phase.DENOISE
            }
        earlier = self._last.get(demand.layer)
        if earlier is not None and earlier[1]:
            self._compare(earlier[0], earlier[1], plan)
        transferred: list[int] = plan.load_ids.tolist()
        if len(plan.staged_ids):
            transferred += plan.staged_ids.tolist()
        self._last[demand.layer] = (self._blocks, transferred)

    def _compare(self, blocks: _Blocks, transferred: list[int], plan: LayerPlan) -> None:
        shared = blocks.keys() & self._blocks.keys()
        if not shared:
            return
        num_reused = len(set(plan.hit_ids.tolist()).intersection(transferred))
        self.num_transferred += len(transferred)
        self.num_reused += num_reused
        if all(blocks[request] == self._blocks[request] for request in shared):
            self.num_transferred_within_blocks += len(transferred)
            self.num_reused_within_blocks += num_reused


def ratio(part: float, whole: float) -> float:
    """part / whole, 0 where there is no whole."""
    return part / whole if whole else 0.0
