"""A benchmark's JSON as one HTML page that needs nothing else: no script, no request, no font.

Plots are inline SVG from the small functions below. Cases differ by colour, by shape and by a
label beside the mark; whatever came from outside is escaped.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from oled_moe.config import format_size

# Okabe and Ito's colours, which stay apart for colour-blind readers; darker or lighter by theme.
_LIGHT = ("#0072b2", "#d55e00", "#007a5a", "#a6547f", "#8a6d00", "#3a7ca5", "#555555", "#6b4fa0")
_DARK = ("#56b4e9", "#f08a3c", "#2fc79b", "#e29ac2", "#e6c84f", "#9ad0f5", "#bbbbbb", "#b59be8")

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de;
  --page: #ffffff; --panel: #f6f8fa; --warn: #7a4b00; --warn-page: #fff4d6; %(light)s }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa5b1; --line: #3a424c;
  --page: #0f1318; --panel: #171c23; --warn: #ffd78a; --warn-page: #3a2c0a; %(dark)s } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.25rem clamp(0.75rem, 3vw, 2rem) 3rem;
  background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 0.25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { margin: 0.25rem 0 0.75rem; max-width: 60rem; }
.soft { color: var(--soft); }
.verdict { border-left: 4px solid var(--c2); padding: 0.35rem 0.75rem; background: var(--panel); }
.verdict.bad { border-color: var(--c1); font-weight: 600; }
.notes { background: var(--warn-page); color: var(--warn); border-radius: 6px;
  padding: 0.5rem 0.75rem 0.5rem 1.75rem; margin: 0.75rem 0; }
.notes li { margin: 0.2rem 0; }
.plots { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%%, 25rem), 1fr)); }
figure { margin: 0; padding: 0.75rem; border: 1px solid var(--line); border-radius: 6px;
  background: var(--panel); min-width: 0; }
figcaption { font-weight: 600; font-size: 0.95rem; margin-bottom: 0.35rem; }
figcaption span { font-weight: 400; color: var(--soft); }
svg { display: block; width: 100%%; height: auto; max-width: 40rem; margin: 0 auto; }
svg text { fill: var(--ink); font-size: 12px; font-family: inherit; }
svg .soft { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
svg .edge { stroke: var(--panel); stroke-width: 4; fill: none; }
svg .halo { paint-order: stroke; stroke: var(--panel); stroke-width: 3px; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%%; font-size: 0.9rem; }
th, td { padding: 0.35rem 0.6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
tbody tr:last-child > * { border-bottom: 0; }
th { font-weight: 600; } thead th { background: var(--panel); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--panel); }
td small { color: var(--soft); display: block; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 0.2rem 1rem;
  margin: 0; font-size: 0.9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.swatch { width: 0.9em; height: 0.9em; display: inline-block; vertical-align: -0.1em;
  margin: 0 0.4em 0 0; }
:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
@media (max-width: 30rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 0.4rem; } }
@media print { body { max-width: none; } figure, .notes { break-inside: avoid; } }
"""


@dataclass(frozen=True, slots=True)
class _Metric:
    """One measured thing: its key in the JSON, its names, and how a value is printed."""

    key: str
    title: str
    better: str
    say: Callable[[float], str]


def milliseconds(seconds: float) -> str:
    """Three significant digits: `8.31 ms`, `124 ms`, `2.05 s`."""
    if seconds >= 1:
        return f"{_digits(seconds)} s"
    return f"{_digits(1e3 * seconds)} ms"


def _digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(6, max(0, decimals))}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _rate(value: float) -> str:
    return f"{_digits(value)} tok/s"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


METRICS = (
    _Metric("ttft_s", "TTFT", "lower is better", milliseconds),
    _Metric("tpot_s", "TPOT", "lower is better", milliseconds),
    _Metric("e2el_s", "end to end", "lower is better", milliseconds),
    _Metric("output_throughput", "output", "higher is better", _rate),
    _Metric("hit_rate", "hit rate", "higher is better", _percent),
    _Metric("expert_cache_utilization", "utilisation", "higher is better", _percent),
    _Metric("effective_transfer_ratio", "transfers used", "higher is better", _percent),
    _Metric("expert_loads", "loads", "lower is better", _whole),
    _Metric("bytes_loaded", "loaded", "lower is better", format_size),
    _Metric("cpu_expert_runs", "run on the CPU", "", _whole),
    _Metric("tokens_per_forward", "tokens per forward", "", _digits),
    _Metric("policy_overhead", "deciding", "lower is better", _percent),
)
_BY_KEY = {metric.key: metric for metric in METRICS}
_BARS = ("tpot_s", "ttft_s", "hit_rate", "expert_cache_utilization")
_BAR_NAMES = {
    "tpot_s": "Time per output token (TPOT)",
    "ttft_s": "Time to first token (TTFT)",
    "hit_rate": "Hit rate: demanded experts found resident",
    "expert_cache_utilization": "Utilisation: slots whose expert was demanded",
}

Case = Mapping[str, Any]


def _styles(cases: Sequence[Case]) -> list[int]:
    """Colour and shape of each case: those of its policy, whatever the capacity."""
    policies = list(dict.fromkeys(case["policy"] for case in cases))
    return [policies.index(case["policy"]) for case in cases]


def render_report(report: Mapping[str, Any]) -> str:
    """The page for what `BenchReport.to_dict` gives, or for the same read back from a file."""
    cases: Sequence[Case] = report["cases"]
    title = f"{report['model']}: {len(cases)} cases side by side"
    style = _STYLE % {
        "light": _variables(_LIGHT),
        "dark": _variables(_DARK),
    }
    bars = [_bar_figure(key, cases) for key in _BARS]
    # No <script> and no outside address: the policy below makes sure of it.
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\"/>",
            f"<title>{_text(title)}</title>",
            f"<style>{style}</style></head>",
            "<body><main>",
            f"<h1>{_text(report['model'])}: expert policies side by side</h1>",
            f'<p class="soft">{_text(_summary(report))}</p>',
            _verdict(report),
            _notes(report["notes"]),
            "<h2>At a glance</h2>",
            f'<p class="soft">{_text(_how_to_read(report))}</p>',
            f'<div class="plots">{"".join(bars)}</div>',
            "<h2>Hit rate and speed</h2>",
            f'<div class="plots">{_scatter_figure(cases)}{_strip_figure(cases)}</div>',
            "<h2>All medians</h2>",
            _table(cases),
            "<h2>Against the baseline</h2>",
            '<p class="soft">Medians of ratios taken repetition by repetition, so that drift of '
            "the machine cancels. An interval that holds 1 means: no difference was shown.</p>",
            _ratio_table(cases),
            "<h2>How it was measured</h2>",
            _facts(report),
            "</main></body></html>",
            "",
        ]
    )


def _variables(colours: Sequence[str]) -> str:
    return " ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours))


def _text(value: object) -> str:
    return escape(str(value), quote=True)


def _device(report: Mapping[str, Any]) -> str:
    if report["is_emulated"]:
        return "emulated (a device simulated on this CPU, its link speed is set)"
    return str(report["device"])


def _summary(report: Mapping[str, Any]) -> str:
    return (
        f"device {_device(report)}; {report['num_prompts']} prompts, {report['repetitions']} "
        f"interleaved repetitions; warm-up: {report['warmup']['words']}"
    )


def _how_to_read(report: Mapping[str, Any]) -> str:
    return (
        f"Medians over {report['repetitions']} repetitions; the thin line is "
        f"{_level(report['cases'])}. Each repetition is one value: all its prompts together."
    )


def _level(cases: Sequence[Case]) -> str:
    levels = {median["level"] for case in cases if (median := case["medians"]["tpot_s"])}
    if len(levels) != 1:
        return "the confidence interval of the median"
    level = levels.pop()
    if not level:
        return "missing: one repetition has no spread"
    return f"the {100 * level:.4g} % confidence interval of the median (order statistics)"


def _verdict(report: Mapping[str, Any]) -> str:
    tokens = report["tokens"]
    if tokens["is_failed"]:
        words = f"The policies gave different tokens ({tokens['difference']}). That must not be."
        return f'<p class="verdict bad">{_text(words)}</p>'
    if tokens["difference"] is None:
        return '<p class="verdict">All policies gave exactly the same tokens.</p>'
    shares = ", ".join(f"{k} {_percent(v)}" for k, v in tokens["agreement"].items())
    words = f"Answers equal to those of the first policy, experts on the CPU allowed: {shares}."
    return f'<p class="verdict">{_text(words)}</p>'


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return f'<ul class="notes" aria-label="Caveats">{items}</ul>' if items else ""


# Plots: coordinates are those of the viewBox, which the page scales to its column

_WIDTH = 360.0
_MARGIN = 8.0
_ROW = 40.0


def _bar_figure(key: str, cases: Sequence[Case]) -> str:
    """A row for each case: its label and value, below them the bar and its interval."""
    metric = _BY_KEY[key]
    medians = [case["medians"][key] for case in cases]
    top = max((median["high"] for median in medians if median), default=0.0) or 1.0
    scale = (_WIDTH - 2 * _MARGIN) / top
    rows = []
    styles = _styles(cases)
    for i, (case, median) in enumerate(zip(cases, medians, strict=True)):
        y = i * _ROW
        rows.append(
            f'<text x="{_MARGIN}" y="{y + 14:.1f}">{_text(_shorten(case["label"], 26))}</text>'
        )
        value = metric.say(median["median"]) if median else "no answer"
        rows.append(
            f'<text x="{_WIDTH - _MARGIN}" y="{y + 14:.1f}" text-anchor="end">{_text(value)}</text>'
        )
        if median:
            rows.append(_bar(y + 20, scale, median, styles[i]))
    described = "; ".join(
        f"{c['label']} {_interval(m, metric)}" for c, m in zip(cases, medians, strict=True)
    )
    svg = _svg(_WIDTH, len(cases) * _ROW, _BAR_NAMES[key], described, rows)
    caption = f"{_text(_BAR_NAMES[key])} <span>{_text(metric.better)}</span>"
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"


def _bar(y: float, scale: float, median: Mapping[str, float], style: int) -> str:
    middle = y + 6
    low, high = (_MARGIN + scale * median[name] for name in ("low", "high"))
    lines = (
        f"M{low:.2f} {middle:.1f}H{high:.2f}M{low:.2f} {middle - 4:.1f}v8"
        f"M{high:.2f} {middle - 4:.1f}v8"
    )
    return (
        f'<rect x="{_MARGIN}" y="{y:.1f}" width="{scale * median["median"]:.2f}" height="12" '
        f'rx="2" fill="{_colour(style)}"/>'
        f'<path class="edge" d="{lines}"/><path class="whisker" d="{lines}"/>'
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values to coordinates, with round ticks."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> "_Axis":
        """Room on both sides of the values; never below 0."""
        low, high = min(values), max(values)
        room = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(max(0.0, low - room) if low >= 0 else low - room, high + room, start, end)

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, num: int = 4) -> list[float]:
        rough = (self.high - self.low) / num
        power = 10.0 ** math.floor(math.log10(rough))
        size = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
        first = math.ceil(self.low / size)
        last = math.floor(self.high / size)
        return [i * size for i in range(first, last + 1)]


def _scatter_figure(cases: Sequence[Case]) -> str:
    """Hit rate across, TPOT up; crosses are intervals, labels stand beside their marks."""
    name = "Hit rate against time per token"
    points = [
        (style, case, case["medians"]["hit_rate"], case["medians"]["tpot_s"])
        for style, case in zip(_styles(cases), cases, strict=True)
        if case["medians"]["hit_rate"] and case["medians"]["tpot_s"]
    ]
    if not points:
        return ""
    height, left, bottom = 280.0, 62.0, 240.0
    across = _Axis.around(
        [100 * hit[end] for _, _, hit, _ in points for end in ("low", "high")], left, _WIDTH - 12
    )
    up = _Axis.around([tpot[end] for *_, tpot in points for end in ("low", "high")], bottom, 12.0)
    parts = _grid(across, up, say_x=lambda x: f"{x:g} %", say_y=milliseconds)
    parts.append(
        f'<text class="soft" x="{(left + _WIDTH) / 2:.1f}" y="{height - 6}" text-anchor="middle">'
        "hit rate</text>"
    )
    marks = [(across.at(100 * hit["median"]), up.at(tpot["median"])) for _, _, hit, tpot in points]
    labels = _label_places(marks, _WIDTH, bottom)
    for (style, case, hit, tpot), (x, y), (label_x, label_y, anchor) in zip(
        points, marks, labels, strict=True
    ):
        x_low, x_high = (across.at(100 * hit[end]) for end in ("low", "high"))
        y_low, y_high = (up.at(tpot[end]) for end in ("low", "high"))
        parts.append(
            f'<path class="whisker" stroke-opacity="0.6" d="M{x_low:.2f} {y:.2f}H{x_high:.2f}'
            f'M{x:.2f} {y_low:.2f}V{y_high:.2f}"/>'
        )
        parts.append(_mark(x, y, style))
        parts.append(
            f'<text class="halo" x="{label_x:.1f}" y="{label_y:.1f}" text-anchor="{anchor}">'
            f"{_text(_shorten(case['label'], 22))}</text>"
        )
    described = "; ".join(
        f"{case['label']} hit rate {_percent(hit['median'])}, "
        f"{milliseconds(tpot['median'])} per token"
        for _, case, hit, tpot in points
    )
    svg = _svg(_WIDTH, height, name, described, parts)
    caption = f"{name} <span>right and down is better</span>"
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"


def _label_places(
    marks: Sequence[tuple[float, float]], width: float, bottom: float
) -> list[tuple[float, float, str]]:
    """Beside each mark, on the side with room; moved down where labels would overlap."""
    places: list[tuple[float, float, str]] = []
    taken: list[tuple[float, float]] = []
    order = sorted(range(len(marks)), key=lambda i: marks[i][1])
    found: dict[int, tuple[float, float, str]] = {}
    for i in order:
        x, y = marks[i]
        is_left = x > 0.6 * width
        label_y = y - 8
        while any(
            abs(label_y - other_y) < 13 and abs(x - other_x) < 150 for other_x, other_y in taken
        ):
            label_y += 13
        label_y = min(max(label_y, 12.0), bottom - 4)
        taken.append((x, label_y))
        found[i] = (x - 8 if is_left else x + 8, label_y, "end" if is_left else "start")
    places.extend(found[i] for i in range(len(marks)))
    return places


def _strip_figure(cases: Sequence[Case]) -> str:
    """Every repetition's TPOT as a mark in the row of its case; the median as a line."""
    name = "Time per token in every repetition"
    metric = _BY_KEY["tpot_s"]
    known = [case["medians"]["tpot_s"] for case in cases]
    values = [value for median in known if median for value in median["values"]]
    if not values:
        return ""
    height = len(cases) * _ROW + 26
    across = _Axis.around(values, _MARGIN + 4, _WIDTH - _MARGIN - 4)
    parts = []
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height - 22}"/>')
        parts.append(
            f'<text class="soft" x="{x:.2f}" y="{height - 8}" text-anchor="{_anchor(x)}">'
            f"{_text(metric.say(tick))}</text>"
        )
    styles = _styles(cases)
    for i, (case, median) in enumerate(zip(cases, known, strict=True)):
        y = i * _ROW
        parts.append(
            f'<text class="halo" x="{_MARGIN}" y="{y + 14:.1f}">'
            f"{_text(_shorten(case['label'], 40))}</text>"
        )
        if not median:
            continue
        x = across.at(median["median"])
        parts.append(f'<path class="whisker" d="M{x:.2f} {y + 18:.1f}V{y + 36:.1f}"/>')
        parts.extend(_mark(across.at(v), y + 27, styles[i], opacity=0.75) for v in median["values"])
    described = "; ".join(
        f"{case['label']}: {', '.join(metric.say(v) for v in median['values'])}"
        for case, median in zip(cases, known, strict=True)
        if median
    )
    svg = _svg(_WIDTH, height, name, described, parts)
    caption = f"{name} <span>one mark each, the line is the median</span>"
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"


def _grid(
    across: _Axis, up: _Axis, *, say_x: Callable[[float], str], say_y: Callable[[float], str]
) -> list[str]:
    parts = []
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(
            f'<line class="grid" x1="{across.start}" x2="{across.end}" y1="{y:.2f}" y2="{y:.2f}"/>'
            f'<text class="soft" x="{across.start - 6}" y="{y + 4:.2f}" text-anchor="end">'
            f"{_text(say_y(tick))}</text>"
        )
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(
            f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="{up.end}" y2="{up.start}"/>'
            f'<text class="soft" x="{x:.2f}" y="{up.start + 16}" text-anchor="{_anchor(x)}">'
            f"{_text(say_x(tick))}</text>"
        )
    return parts


def _anchor(x: float) -> str:
    """So that text at an edge stays inside."""
    if x < 24:
        return "start"
    return "end" if x > _WIDTH - 24 else "middle"


def _colour(style: int) -> str:
    return f"var(--c{style % len(_LIGHT)})"


def _mark(x: float, y: float, style: int, *, opacity: float = 1.0) -> str:
    """Circle, square, triangle, diamond, and so on: one shape for each policy."""
    r = 5.0
    shapes = (
        f"M{x - r:.2f} {y:.2f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        f"M{x - 4.4:.2f} {y - 4.4:.2f}h8.8v8.8h-8.8z",
        f"M{x:.2f} {y - 5.5:.2f}l5.5 9.5h-11z",
        f"M{x:.2f} {y - 6:.2f}l6 6l-6 6l-6 -6z",
        f"M{x:.2f} {y + 5.5:.2f}l5.5 -9.5h-11z",
        f"M{x - 6:.2f} {y - 2:.2f}h4v-4h4v4h4v4h-4v4h-4v-4h-4z",
    )
    shape, colour = shapes[style % len(shapes)], _colour(style)
    return f'<path d="{shape}" fill="{colour}" fill-opacity="{opacity:g}"/>'


def _svg(width: float, height: float, title: str, described: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"<title>{_text(title)}</title><desc>{_text(described)}</desc>{''.join(parts)}</svg>"
    )


def _shorten(label: str, length: int) -> str:
    return label if len(label) <= length else label[: length - 1] + "…"


# Tables


def _interval(median: Mapping[str, float] | None, metric: _Metric) -> str:
    if not median:
        return "no answer"
    low, high = metric.say(median["low"]), metric.say(median["high"])
    return f"{metric.say(median['median'])} ({low} to {high})"


def _table(cases: Sequence[Case]) -> str:
    head = "".join(f'<th scope="col">{_text(metric.title)}</th>' for metric in METRICS)
    rows = []
    for style, case in zip(_styles(cases), cases, strict=True):
        cells = []
        for metric in METRICS:
            median = case["medians"][metric.key]
            if not median:
                cells.append("<td>–</td>")
                continue
            low, high = metric.say(median["low"]), metric.say(median["high"])
            small = f"<small>{_text(low)} – {_text(high)}</small>" if low != high else ""
            cells.append(f"<td>{_text(metric.say(median['median']))}{small}</td>")
        rows.append(f"<tr>{_row_head(style, case)}{''.join(cells)}</tr>")
    return _scrolled("All medians", head, rows)


def _ratio_table(cases: Sequence[Case]) -> str:
    keys = list(cases[0]["ratios"])
    head = '<th scope="col">baseline</th>'
    head += "".join(f'<th scope="col">{_text(_BY_KEY[key].title)}</th>' for key in keys)
    rows = []
    for style, case in zip(_styles(cases), cases, strict=True):
        if case["label"] == case["baseline"]:
            continue
        cells = [f"<td>{_text(case['baseline'])}</td>"]
        for key in keys:
            ratio = case["ratios"][key]
            cells.append(
                f"<td>{ratio['median']:.3f}<small>{ratio['low']:.3f} – {ratio['high']:.3f}"
                "</small></td>"
                if ratio
                else "<td>–</td>"
            )
        rows.append(f"<tr>{_row_head(style, case)}{''.join(cells)}</tr>")
    if not rows:
        return '<p class="soft">There is one policy only, so nothing to compare.</p>'
    return _scrolled("Ratios to the baseline", head, rows)


def _row_head(style: int, case: Case) -> str:
    swatch = (
        f'<svg class="swatch" viewBox="-7 -7 14 14" aria-hidden="true">{_mark(0, 0, style)}</svg>'
    )
    return f'<th scope="row">{swatch}{_text(case["label"])}</th>'


def _scrolled(name: str, head: str, rows: Sequence[str]) -> str:
    return (
        f'<div class="scroll" role="region" aria-label="{_text(name)}" tabindex="0"><table>'
        f'<thead><tr><th scope="col">policy</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _facts(report: Mapping[str, Any]) -> str:
    machine, hardware = report["environment"], report["hardware"]
    before, after = (report[f"load_average_{when}"][0] for when in ("before", "after"))
    idle = "idle" if report["is_idle"] else "not idle"
    slots = dict.fromkeys(
        f"{case['num_slots']} slots and {case['num_staging']} staging" for case in report["cases"]
    )
    plan = report["plan"]
    facts = [
        ("model", f"{report['model']}, {report['dtype']}"),
        ("device", _device(report)),
        (
            "experts",
            f"{'; '.join(slots)}, the same for every policy of a capacity; {plan['num_experts']} "
            f"experts of {format_size(plan['expert_bytes'])}",
        ),
        ("CPU experts", "on" if report["has_cpu_experts"] else "off"),
        ("hardware profile", f"{hardware['name']} ({hardware['source']})"),
        ("decoding", _pairs(report["decoding"])),
        ("settings", _pairs(report["config"])),
        ("prompts", f"{report.get('prompts', report['num_prompts'])}; {report['request_rate']}"),
        ("warm-up", report["warmup"]["words"]),
        ("repetitions", f"{report['repetitions']}, order seed {report['seed']}"),
        ("order", " | ".join(", ".join(row) for row in report["order"])),
        ("engines", report["engines"]),
        ("intervals", report["interval"]),
        (
            "machine",
            f"{idle}: other processes kept {report['other_busy_cores']:.2f} cores busy; load "
            f"average {before:.2f} before, {after:.2f} after",
        ),
        ("CPU", f"{machine['cpu_model'] or 'unknown'}, {machine['usable_cores']} usable cores"),
        ("memory", f"{format_size(machine['memory_total_bytes'])}"),
        ("peak memory", f"{format_size(report['peak_process_bytes'])} of the whole process"),
        ("platform", machine["platform"]),
        ("versions", _pairs(report["versions"])),
        ("revision", report["git_revision"] or "unknown"),
        ("took", milliseconds(report["wall_s"])),
    ]
    entries = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts)
    return f"<dl>{entries}</dl>"


def _pairs(values: Mapping[str, Any]) -> str:
    given = [(k, v) for k, v in values.items() if v is not None and v != [] and v != ()]
    return ", ".join(f"{name} {value}" for name, value in given)
