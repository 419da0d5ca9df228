"""Curves as SVG, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 900, 460, 60, 20, 40, 290
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"),
    *("#999999", "#8b4513", "#6a3d9a", "#1b7837", "#b2182b", "#4d9221"),
)


def drawn(by_size: Mapping[int, Mapping[str, float]]) -> str:
    """Return a drawing of name -> milliseconds by size."""
    sizes = sorted(by_size)
    names = list(by_size[sizes[0]])
    values = [value for figures in by_size.values() for value in figures.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def across(size: float) -> float:
        span = math.log10(sizes[-1] / sizes[0]) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log10(size / sizes[0]) / span

    def up(value: float) -> float:
        height = HEIGHT - TOP - BOTTOM
        return TOP + height * (high - math.log10(value)) / ((high - low) or 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        "<style>text { font: 12px sans-serif }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for power in range(low, high + 1):
        y = up(10.0**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for size in sizes:
        x = across(size)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle">{size:,}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">backends</text>')
    parts.append(f'<text x="{LEFT}" y="14">ms</text>')
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        points = [(across(size), up(by_size[size][name])) for size in sizes]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 14 + 18 * number
        parts.append(f'<text x="{WIDTH - RIGHT + 16}" y="{y}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
