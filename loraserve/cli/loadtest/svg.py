"""Small SVG charts, readable on light and dark pages: no background, and colors of medium brightness."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

TEXT = "#7d8590"
GRID = "#9ca3af55"
MAIN = "#2563eb"
SECOND = "#d97706"
OTHER = "#9ca3af"
ROW = 22


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    color: str = MAIN
    least: float | None = None
    most: float | None = None
    """Drawn as a line from least to most."""
    text: str | None = None
    """Shown instead of the value."""


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    values: Sequence[float]
    color: str = MAIN


def document(title: str, width: int, height: float, content: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}" role="img" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="{TEXT}">\n<title>{escape(title)}</title>\n{content}\n</svg>\n'
    )


def move(content: str, x: float, y: float) -> str:
    return f'<g transform="translate({x:.0f} {y:.0f})">\n{content}\n</g>'


def text(x: float, y: float, content: str, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: str = GRID, width: float = 1) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}" stroke-width="{width:g}" fill="none"/>'


def bars(title: str, rows: Sequence[Bar], width: int, label_width: int = 200) -> str:
    """Horizontal bars from 0. The height is `bars_height(len(rows))`."""
    most = max((bar.value if bar.most is None else bar.most for bar in rows), default=0.0) or 1.0
    scale = (width - label_width - 60) / most
    parts = [text(0, 14, title, bold=True)]
    for i, bar in enumerate(rows):
        y, end = 24 + i * ROW, label_width + bar.value * scale
        parts.append(text(label_width - 8, y + 15, bar.label, "end"))
        parts.append(
            f'<rect x="{label_width}" y="{y + 4}" width="{bar.value * scale:.1f}" height="{ROW - 8}" rx="2" '
            f'fill="{bar.color}"/>'
        )
        if bar.least is not None and bar.most is not None:
            left, end = label_width + bar.least * scale, label_width + max(bar.value, bar.most) * scale
            parts.append(line(left, y + ROW / 2, label_width + bar.most * scale, y + ROW / 2, TEXT, 1.5))
        parts.append(text(end + 6, y + 15, bar.text or f"{bar.value:.3g}"))
    return "\n".join(parts)


def bars_height(count: int) -> int:
    return 24 + count * ROW


def cumulative(title: str, unit: str, curves: Sequence[Curve], width: int, height: int) -> str:
    """Share of the values at or below x. The axis ends near the 99.5th percentile, so that an outlier hides nothing."""
    left, bottom, top = 42, height - 22, 24
    end = axis_end(max((_quantile(curve.values, 0.995) for curve in curves if curve.values), default=1.0))
    parts = [text(0, 14, title, bold=True)]
    for share in (0, 0.5, 0.9, 1):
        y = bottom - share * (bottom - top)
        parts += [line(left, y, width, y), text(left - 6, y + 4, f"{share:.0%}", "end")]
    for i in range(5):
        x = left + i / 4 * (width - left)
        parts.append(
            text(x, height - 6, f"{end * i / 4:g}{f' {unit}' if i == 4 else ''}", "end" if i == 4 else "middle")
        )
    for i, curve in enumerate(curves):
        ordered = sorted(curve.values)
        points = [
            (left + min(1.0, value / end) * (width - left), bottom - share * (bottom - top))
            for value, share in _thinned(ordered)
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{left} {bottom}L{path}" stroke="{curve.color}" stroke-width="1.8" fill="none"/>')
        if len(curves) > 1:
            parts.append(f'<g fill="{curve.color}">{text(width, bottom - 8 - i * 16, curve.label, "end")}</g>')
    return "\n".join(parts)


def axis_end(largest: float) -> float:
    """The smallest round number that is not below `largest`."""
    if largest <= 0:
        return 1.0
    power = 10.0 ** (len(f"{largest:.0f}") - 1) if largest >= 1 else 0.1
    while power > largest:
        power /= 10
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= largest)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _thinned(ordered: Sequence[float], points: int = 200) -> list[tuple[float, float]]:
    """At most `points` pairs of a value and the share of values at or below it."""
    count = len(ordered)
    indices = range(count) if count <= points else [round(i * (count - 1) / (points - 1)) for i in range(points)]
    return [(ordered[i], (i + 1) / count) for i in indices]
