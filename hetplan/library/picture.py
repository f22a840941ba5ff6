"""A result in a notebook: its pipelines drawn, stages as wide as their layers, over its lines.

Plain SVG without scripts or styles of its own, so that it stays where HTML is cleaned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from hetplan.cluster.spec import Cluster
from hetplan.errors import printable
from hetplan.reports.summary import StageRow, short_kind
from hetplan.units import format_bytes

_WIDTH, _BAR, _GAP, _LINE = 720, 30, 8, 18
"""Pixels: of all, a bar's height, what is left between bars, a line of the legend."""
_MOST_PIPELINES = 8
"""More are counted below: a plan may have a hundred alike ones."""
_COLOURS = ("#56b4e9", "#f0803c", "#4cc38a", "#e29bd0", "#e6c229", "#a79bff", "#5fd3d3", "#aaaaaa")
"""Of the report in the dark: black is read on them."""


def result_html(rows: Sequence[StageRow], cluster: Cluster, text: str) -> str:
    """The picture and the text; names in them may be anybody's."""
    return f"<div>{pipeline_svg(rows, cluster)}<pre>{escape(text)}</pre></div>"


def pipeline_svg(rows: Sequence[StageRow], cluster: Cluster) -> str:
    """Every pipeline as a bar of its stages, coloured by device kind, with a legend.

    A kind has one colour in all plans of a cluster, and in its report.
    """
    kinds = dict.fromkeys(island.device.kind for island in cluster.islands)
    colours = {kind: _COLOURS[at % len(_COLOURS)] for at, kind in enumerate(kinds)}
    pipelines = [list(group) for _, group in groupby(rows, key=lambda row: row.pipelines)]
    parts = [
        part
        for at, pipeline in enumerate(pipelines[:_MOST_PIPELINES])
        for part in _bar(pipeline, at * (_BAR + _GAP), colours)
    ]
    y = min(len(pipelines), _MOST_PIPELINES) * (_BAR + _GAP)
    if len(pipelines) > _MOST_PIPELINES:
        y += _LINE
        parts.append(_text(0, y, f"and {len(pipelines) - _MOST_PIPELINES} more pipelines"))
    for kind, words in _legend(rows):
        y += _LINE
        parts.append(f'<rect x="0" y="{y - 11}" width="12" height="12" fill="{colours[kind]}"/>')
        parts.append(_text(18, y, words))
    words = f"{len(pipelines)} pipelines; " if len(pipelines) > 1 else ""
    title = words + "; ".join(_words(row) for row in rows[:_MOST_PIPELINES])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + _GAP}" '
        f'width="{_WIDTH}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{_safe(title)}" font-family="sans-serif" font-size="12" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )


def _kind(row: StageRow) -> str:
    return row.islands[0].device.kind


def _bar(rows: Sequence[StageRow], y: int, colours: dict[str, str]) -> Iterator[str]:
    """The stages of one pipeline; those without transformer layers are half a layer wide."""
    stages = [(row, row.first + at, n) for row in rows for at, n in enumerate(row.layers)]
    whole, x = sum(max(n, 0.5) for *_, n in stages), 0.0
    for row, number, layers in stages:
        width = _WIDTH * max(layers, 0.5) / whole
        yield (
            f"<g><title>stage {number}: {layers} layers; {_safe(_words(row))}</title>"
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" '
            f'fill="{colours[_kind(row)]}" stroke="#ffffff"/>'
        )
        if width >= 8 * len(str(layers)) + 4:
            middle = f'x="{x + width / 2:.1f}" y="{y + _BAR / 2 + 4:.0f}" text-anchor="middle"'
            yield f'<text {middle} fill="#000000">{layers}</text>'
        yield "</g>"
        x += width


def _words(row: StageRow) -> str:
    """`stages 0-7 on 8 mi300x each, 10 to 11 layers, up to 158 GiB of 173 GiB`."""
    stages = f"stage {row.first}" if row.first == row.last else f"stages {row.first}-{row.last}"
    least, most = min(row.layers), max(row.layers)
    layers = f"{most}" if least == most else f"{least} to {most}"
    room = f"{format_bytes(row.most_memory_bytes)} of {format_bytes(row.available_bytes)}"
    kind = short_kind(row.islands[0])
    return f"{stages} on {row.devices_per_stage} {kind} each, {layers} layers, up to {room}"


def _legend(rows: Sequence[StageRow]) -> Iterator[tuple[str, str]]:
    """(kind, its name with its devices and layers) of every kind."""
    for kind in dict.fromkeys(map(_kind, rows)):
        mine = [row for row in rows if _kind(row) == kind]
        devices = sum(row.devices_per_stage * len(row.layers) for row in mine)
        layers = sum(sum(row.layers) for row in mine)
        name = short_kind(mine[0].islands[0])
        yield kind, f"{name}: {devices:,} devices, {layers} layers in {_stages(mine)}"


def _stages(rows: Sequence[StageRow]) -> str:
    count = sum(len(row.layers) for row in rows)
    return f"{count} stage{'s' * (count > 1)}"


def _text(x: int, y: int, words: str) -> str:
    return f'<text x="{x}" y="{y}">{_safe(words)}</text>'


def _safe(words: str) -> str:
    return escape(printable(words))
