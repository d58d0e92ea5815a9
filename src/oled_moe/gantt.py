"""One simulated forward as a picture: three lanes over time, as an SVG text of its own.

No library and no script; colours follow the viewer's light or dark mode.
"""

from collections.abc import Callable
from html import escape

from oled_moe.simulator import SimulationReport
from oled_moe.virtual_clock import COPY, CPU, DEVICE, LANES, Span

# Seconds to the left edge of what is drawn.
_Scale = Callable[[float], float]

_WIDTH, _LEFT, _RIGHT = 1280, 86, 16
_TOP, _LANE_HEIGHT, _LANE_GAP = 78, 46, 10
_LANE_NAMES = {DEVICE: "device", COPY: "copy lane", CPU: "CPU"}
# Kind: what the legend says, colour in light mode, colour in dark mode.
_KINDS = {
    "software": ("software", "#9aa0a8", "#7d838c"),
    "dense": ("attention, router, head, software", "#9aa0a8", "#7d838c"),
    "shared": ("shared expert", "#6f7782", "#a5acb6"),
    "hit": ("hits", "#2f8f4e", "#4fc274"),
    "staged": ("copied ahead, run", "#7a4fb5", "#b08be6"),
    "load": ("load, kept", "#1f6fc4", "#5aa5f0"),
    "stream": ("load, streamed", "#d9822b", "#f0a654"),
    "late": ("copy ahead, late", "#b5307c", "#ee72b4"),
    "ahead": ("copy ahead", "#7a4fb5", "#b08be6"),
    "cpu": ("experts on the CPU", "#b8372f", "#f0766c"),
}
# What stands in the legend, kinds of one colour and meaning once.
_LEGEND = ("dense", "shared", "hit", "load", "stream", "ahead", "late", "cpu")


def gantt_svg(report: SimulationReport, forward_id: int) -> str:
    """The recorded forward of a report. `report.spans` must not be empty.

    Long bars are work; a gap in the device's lane is time in which it waits.
    """
    spans = report.spans
    start_s = min(span.start_s for span in spans if span.lane == DEVICE)
    end_s = max(span.end_s for span in spans)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end_s - start_s, 1e-12)

    def x(moment_s: float) -> float:
        return _LEFT + max(0.0, moment_s - start_s) * scale

    bottom = _TOP + len(LANES) * (_LANE_HEIGHT + _LANE_GAP)
    parts = [*_layer_bands(spans, x, bottom), *_axis(start_s, end_s, x, bottom)]
    for index, lane in enumerate(LANES):
        top = _TOP + index * (_LANE_HEIGHT + _LANE_GAP)
        parts.append(
            f'<text class="name" x="{_LEFT - 8}" y="{top + _LANE_HEIGHT / 2 + 4:.0f}" '
            f'text-anchor="end">{_LANE_NAMES[lane]}</text>'
        )
        for span in spans:
            if span.lane == lane and span.end_s > start_s:
                parts.append(_bar(span, x, top))
    device_end_s = max(span.end_s for span in spans if span.lane in (DEVICE, CPU))
    taken = f"{1e3 * (device_end_s - start_s):.2f} ms"
    title = (
        f"{report.policy}, {report.experts_per_layer:g} experts per layer: forward {forward_id}, "
        f"{taken}"
    )
    below = f"simulated on {report.hardware}; trace {report.trace} ({report.trace_source})"
    head = [
        f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>',
        f'<text class="small" x="{_LEFT}" y="40">{escape(below)}</text>',
    ]
    legend, height = _legend({span.kind for span in spans}, bottom + 40)
    return "\n".join([_opening(height), *head, *parts, *legend, "</svg>", ""])


def _opening(height: int) -> str:
    def rules(column: int) -> str:
        return " ".join(f".{kind}{{fill:{each[column]}}}" for kind, each in _KINDS.items())

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="12">\n'
        "<style>\n"
        f".page{{fill:#ffffff}} .band{{fill:#eef0f3}} text{{fill:#24292f}} {rules(1)}\n"
        ".title{font-size:15px;font-weight:600} .small{font-size:12px;opacity:.75} "
        ".name{font-weight:600} .grid{stroke:#8b929b;stroke-width:.5;opacity:.5}\n"
        "@media (prefers-color-scheme: dark) {\n"
        f".page{{fill:#14171a}} .band{{fill:#1f242a}} text{{fill:#e6e9ec}} {rules(2)}\n"
        "}\n</style>\n"
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>'
    )


def _layer_bands(spans: tuple[Span, ...], x: _Scale, bottom: int) -> list[str]:
    """Every second layer shaded, from its first work on the device to the next layer's."""
    starts: dict[int, float] = {}
    for span in spans:
        if span.lane == DEVICE and span.layer >= 0:
            starts.setdefault(span.layer, span.start_s)
    layers = sorted(starts)
    layer_end_s = max(span.end_s for span in spans if span.layer >= 0 and span.lane != COPY)
    parts, last_label = [], 0.0
    for index, layer in enumerate(layers):
        left = x(starts[layer])
        is_last = index + 1 == len(layers)
        right = x(layer_end_s if is_last else starts[layers[index + 1]])
        if index % 2 == 0:
            parts.append(
                f'<rect class="band" x="{left:.2f}" y="{_TOP - 8}" width="{right - left:.2f}" '
                f'height="{bottom - _TOP + 8}"/>'
            )
        middle = (left + right) / 2
        if middle - last_label > 22:
            words = f"layer {layer}" if right - left > 52 else str(layer)
            parts.append(
                f'<text class="small" x="{middle:.1f}" y="{_TOP - 14}" '
                f'text-anchor="middle">{words}</text>'
            )
            last_label = middle
    return parts


def _axis(start_s: float, end_s: float, x: _Scale, bottom: int) -> list[str]:
    """Ticks in milliseconds at round numbers."""
    total_ms = 1e3 * (end_s - start_s)
    step = 1e-6
    while total_ms / step > 12:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    parts, count = [], 0
    while count * step <= total_ms:
        left = x(start_s + count * step / 1e3)
        parts.append(
            f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>'
            f'<text class="small" x="{left:.1f}" y="{bottom + 16}" '
            f'text-anchor="middle">{count * step:.6g}{" ms" if count == 0 else ""}</text>'
        )
        count += 1
    return parts


def _bar(span: Span, x: _Scale, top: int) -> str:
    left, right = x(span.start_s), x(span.end_s)
    # Neighbours stay apart where there is room for a gap.
    width = max(0.4, right - left - (0.6 if right - left > 2 else 0))
    kind, _, _ = _KINDS[span.kind]
    place = f"layer {span.layer}, " if span.layer >= 0 else ""
    words = f"{place}{span.label}: {kind}, {1e6 * (span.end_s - span.start_s):.0f} µs"
    return (
        f'<rect class="{span.kind}" x="{left:.2f}" y="{top}" width="{width:.2f}" '
        f'height="{_LANE_HEIGHT}"><title>{escape(words)}</title></rect>'
    )


def _legend(kinds: set[str], top: int) -> tuple[list[str], int]:
    """Boxes and words for the kinds in the picture, and the height down to their end."""
    if "software" in kinds:
        kinds = kinds | {"dense"}
    if "staged" in kinds:
        kinds = kinds | {"ahead"}
    parts, left = [], float(_LEFT)
    for kind in _LEGEND:
        if kind not in kinds:
            continue
        words = _KINDS[kind][0]
        width = 24 + 7.0 * len(words)
        if left + width > _WIDTH - _RIGHT:
            left, top = float(_LEFT), top + 20
        parts.append(
            f'<rect class="{kind}" x="{left:.0f}" y="{top - 10}" width="12" height="12"/>'
            f'<text x="{left + 17:.0f}" y="{top}">{words}</text>'
        )
        left += width
    return parts, top + 18
