"""What /metrics says, under vLLM's names with a prefix of our own, so that dashboards port.

Counters of answers and steps are kept as they happen; what the scheduler and the expert monitor
know is asked for when metrics are read. One registry for each app: nothing is global.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from oled_moe.server_answers import Answer
from oled_moe.server_backend import Runtime

if TYPE_CHECKING:
    from oled_moe.scheduler import StepReport

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "oled_moe:"
# Seconds: from what a small model's step takes to what a long answer of a large one does.
_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)


class ServerMetrics:
    """The metrics of one app that serves one model under `model_name`."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._runtime: Runtime | None = None
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answers begun.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._ttft = self._times("time_to_first_token", "From arrival to the first final token.")
        self._itl = self._times("inter_token_latency", "Between tokens; a step's share them.")
        self._tpot = self._times(
            "request_time_per_output_token", "From the end of prefill, per token."
        )
        self._e2e = self._times("e2e_request_latency", "From arrival to the end.")
        self._queue = self._times("request_queue_time", "From arrival to admission.")
        self._prefill = self._times("request_prefill_time", "From admission to the end of prefill.")
        self._decode = self._times("request_decode_time", "From the end of prefill to the end.")
        self._success = Counter(
            f"{PREFIX}request_success",
            "Answers by how they ended: stop, length, abort, error.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._steps = self._counter("denoise_steps", "Denoising forwards.")
        self._step_time = self._times("denoise_step", "One denoising forward.")
        self._tokens_per_forward = Histogram(
            f"{PREFIX}tokens_per_forward",
            "Answer tokens that became final in a denoising forward, all sequences together.",
            ("model_name",),
            registry=self._registry,
            buckets=(0, *_COUNTS),
        ).labels(**self._labels)
        self._edited = self._counter("edited_tokens", "Tokens that a later step replaced.")
        self._replaced = self._counter(
            "choices_replaced", "Choices of experts that a lossy rule replaced, of whole answers."
        )
        self._registry.register(_RuntimeCollector(self))

    @property
    def runtime(self) -> Runtime | None:
        return self._runtime

    @property
    def labels(self) -> dict[str, str]:
        return self._labels

    def attach(self, runtime: Runtime) -> None:
        """Watch a model that is loaded now; a second time changes nothing."""
        if runtime is not self._runtime:
            self._runtime = runtime
            runtime.scheduler.observers.append(self._stepped)

    def render(self) -> bytes:
        """All metrics in Prometheus' text form."""
        return generate_latest(self._registry)

    def got_tokens(self, num_tokens: int, waited_s: float) -> None:
        """Tokens that became final at once, so long after those before them."""
        for _ in range(num_tokens):
            self._itl.observe(waited_s / num_tokens)

    def ended(self, answer: Answer, reason: str) -> None:
        """An answer is over. What it took counts only where it came to its end."""
        self._success.labels(**self._labels, finished_reason=reason).inc()
        handle, result = answer.handle, answer.result
        if result is None or handle is None:
            return
        num_tokens = len(result.token_ids)
        self._prompt_tokens.inc(handle.num_prompt_tokens)
        self._generation_tokens.inc(num_tokens)
        self._replaced.inc(result.stats.choices_replaced)
        self._queue.observe(handle.admitted_s - handle.submitted_s)
        self._prefill.observe(handle.prefill_end_s - handle.admitted_s)
        self._ttft.observe(handle.first_token_s - handle.submitted_s)
        self._decode.observe(handle.finished_s - handle.prefill_end_s)
        self._e2e.observe(handle.finished_s - handle.submitted_s)
        if num_tokens:
            self._tpot.observe((handle.finished_s - handle.prefill_end_s) / num_tokens)

    def _stepped(self, report: "StepReport") -> None:
        """On the scheduler's thread, after every forward."""
        if report.kind == "denoise":
            self._steps.inc()
            self._step_time.observe(report.forward_s)
            self._tokens_per_forward.observe(report.num_new_tokens)
            self._edited.inc(report.num_edited)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(PREFIX + name, text, ("model_name",), registry=self._registry)
        return counter.labels(**self._labels)

    def _times(self, name: str, text: str) -> Histogram:
        histogram = Histogram(
            f"{PREFIX}{name}_seconds",
            text,
            ("model_name",),
            registry=self._registry,
            buckets=_TIMES,
        )
        return histogram.labels(**self._labels)


class _RuntimeCollector(Collector):
    """What is asked for when metrics are read: the queue, keys and values, experts."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: there is a model only later."""
        return ()

    def collect(self) -> Iterable[Metric]:
        runtime = self._metrics.runtime
        if runtime is None:
            return
        scheduler = runtime.scheduler
        yield self._gauge("num_requests_running", "Requests at work.", scheduler.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", scheduler.num_waiting)
        usage = scheduler.kv_tokens / max(1, scheduler.kv_capacity_tokens)
        yield self._gauge("kv_cache_usage_perc", "Keys and values in use, 1 for all.", usage)
        if runtime.engine.config.lossy is not None:
            rule = GaugeMetricFamily(
                f"{PREFIX}lossy_info",
                "The rule by which experts are replaced: answers are not the model's own.",
                labels=["model_name", "rule"],
            )
            name = self._metrics.labels["model_name"]
            rule.add_metric([name, runtime.engine.config.lossy], 1)
            yield rule
        if runtime.monitor is not None:
            yield from self._experts(runtime)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric(list(self._metrics.labels.values()), value)
        return family

    def _experts(self, runtime: Runtime) -> Iterable[Metric]:
        assert runtime.monitor is not None
        totals = runtime.monitor.totals()
        for name, counts, text in (
            ("hits", totals.hits, "Demanded experts that were resident."),
            ("misses", totals.misses, "Demanded experts that were not resident."),
            ("evictions", totals.evictions, "Experts that lost their slot."),
        ):
            family = CounterMetricFamily(
                f"{PREFIX}expert_cache_{name}", text, labels=["layer", "tier"]
            )
            for layer, value in enumerate(counts.tolist()):
                family.add_metric([str(layer), totals.tier], value)
            yield family
        yield _by_layer("resident", "Experts resident.", totals.resident.tolist())
        yield _by_layer("utilization", "Share of slots wanted last.", totals.utilization.tolist())
        moved = CounterMetricFamily(
            f"{PREFIX}expert_bytes", "Bytes of experts copied.", labels=["src", "dst"]
        )
        for (source, target), num_bytes in totals.num_bytes.items():
            moved.add_metric([source, target], num_bytes)
        yield moved
        how = CounterMetricFamily(
            f"{PREFIX}miss_compensation", "What became of misses.", labels=["how"]
        )
        how.add_metric(["cpu"], int(totals.cpu_runs.sum()))
        how.add_metric(["copy"], int(totals.loads.sum()))
        if runtime.engine.low_form is not None:
            how.add_metric(["low_precision"], int(totals.low_runs.sum()))
        yield how
        fetches = SummaryMetricFamily(
            f"{PREFIX}expert_fetch_seconds", "One copy of an expert.", labels=["tier"]
        )
        fetches.add_metric([totals.tier], totals.num_fetches, totals.fetch_s)
        yield fetches
        stalls = CounterMetricFamily(
            f"{PREFIX}stall_seconds", "Time in which nothing was computed.", labels=["cause"]
        )
        stalls.add_metric(["copy"], totals.stall_s)
        yield stalls
        if totals.num_ahead:
            wanted = int(totals.ahead.sum())
            yield self._gauge(
                "prediction_precision",
                "Share of experts copied ahead that were wanted.",
                wanted / totals.num_ahead,
            )
        tier = GaugeMetricFamily(
            f"{PREFIX}tier_bytes", "Memory planned for expert slots.", labels=["tier"]
        )
        tier.add_metric([totals.tier], runtime.engine.memory_plan.expert_memory_bytes)
        yield tier


def _by_layer(name: str, text: str, values: Sequence[float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}expert_cache_{name}", text, labels=["layer"])
    for layer, value in enumerate(values):
        family.add_metric([str(layer)], value)
    return family
