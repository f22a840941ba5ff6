"""Pictures of a plan as SVG, from the values that stand beside them in the page.

Bars stretch with the page: they are rectangles in a box of its own width (no aspect is kept), and
every word is HTML beside them, so nothing shrinks on a phone. The cluster map alone holds text; it
is as wide as a phone. Whatever a picture shows stands in a table too: colours repeat words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from markupsafe import Markup, escape

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.network.segments import LinkScope
from hetplan.reports.html.values import LinkUse
from hetplan.reports.timeline import Bar, PipelineTimeline, StageTimeline, Track
from hetplan.search.result import CoursePoint

WIDTH = 100_000
"""Units of a picture's width: a step's times are rounded to so many."""
ROW, PASSES, SENDS = 26, 16, 3
"""Heights of a stage's row, of its passes, and of either way's transfers below them, in pixels."""
NAMES = (
    "forward",
    "backward",
    "weight gradients",
    "activations",
    "gradients",
    "gradient reduction",
    "tied embedding",
    "gradient norm",
    "optimizer",
    "parameter gathering",
    "data loading",
)
"""Of all bars; the page's data have their numbers here."""


def tag(name: str, *inside: str | Markup, **attributes: object) -> Markup:
    """An element; whatever is no Markup is escaped. `class_` is class, `a_b` is a-b."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{words}>{''.join(map(escape, inside))}</{name}>")


def bar(parts: Iterable[tuple[str, float]], whole: float, mark: float | None = None) -> Markup:
    """(class, value) one behind the other, of a width that stands for `whole`; a line at `mark`."""
    rects, at = [], 0.0
    for name, value in parts:
        x, width = _units(at, whole), _units(value, whole)
        rects.append(
            tag("rect", class_=name, x=x, y=0, width=width, height=16, data_value=f"{value:.12g}")
        )
        at += value
    if mark is not None:
        x = min(_units(mark, whole), WIDTH)
        rects.append(tag("path", class_="mark", d=f"M{x} 0v16", vector_effect="non-scaling-stroke"))
    box = f"0 0 {WIDTH} 16"
    return tag(
        "svg", *rects, class_="bar", viewBox=box, preserveAspectRatio="none", aria_hidden="true"
    )


def span(low: float, middle: float, high: float, whole: float) -> Markup:
    """A range with its middle."""
    left, right, at = (_units(value, whole) for value in (low, high, middle))
    return tag(
        "svg",
        tag("path", class_="rail", d=f"M0 8h{WIDTH}", vector_effect="non-scaling-stroke"),
        tag("rect", class_="range", x=left, y=4, width=max(right - left, 1), height=8),
        tag("path", class_="mark", d=f"M{at} 0v16", vector_effect="non-scaling-stroke"),
        class_="bar",
        viewBox=f"0 0 {WIDTH} 16",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _units(value: float, whole: float) -> int:
    return round(value / whole * WIDTH) if whole > 0 else 0


def course(points: Sequence[CoursePoint]) -> Markup:
    """Best plan above, bound below, by steps of the search; what lies between is the gap."""
    if len(points) < 2:
        return Markup("")
    steps = max(points[-1].steps, 1)
    low = min(each.lower_bound_seconds for each in points)
    high = max(each.best_seconds for each in points)
    across = [_units(each.steps, steps) for each in points]

    def line(values: Sequence[float]) -> str:
        ys = [
            round(_HIGH - 1 - (each - low) / (high - low or 1.0) * (_HIGH - 2)) for each in values
        ]
        moves = (f"H{x}V{y}" for x, y in zip(across[1:], ys[1:], strict=True))
        return f"M{across[0]} {ys[0]}{''.join(moves)}"

    best = line([each.best_seconds for each in points])
    bound = line([each.lower_bound_seconds for each in points])
    return tag(
        "svg",
        tag("path", d=best, class_="line best", vector_effect="non-scaling-stroke"),
        tag("path", d=bound, class_="line bound", vector_effect="non-scaling-stroke"),
        class_="course",
        viewBox=f"0 0 {WIDTH} {_HIGH}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


_HIGH = 120
"""Height of the picture of a search, in pixels."""


# ---- timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The bars of a pipeline that are drawn."""

    stages: tuple[tuple[Bar, ...], ...]
    left_out: int
    """Bars that are not, all between these two times."""
    cut_from_seconds: float
    cut_to_seconds: float


def drawn(pipeline: PipelineTimeline, most: int) -> Drawn:
    """At most so many bars: the first and the last ones, where there are more."""
    bars = [stage.bars for stage in pipeline.stages]
    starts = sorted(one.start_seconds for one in chain.from_iterable(bars))
    if len(starts) <= most:
        return Drawn(stages=tuple(bars), left_out=0, cut_from_seconds=0.0, cut_to_seconds=0.0)
    left, right = starts[most // 2], starts[len(starts) - most // 2]
    kept = tuple(
        tuple(one for one in own if one.start_seconds < left or one.start_seconds >= right)
        for own in bars
    )
    return Drawn(
        stages=kept,
        left_out=len(starts) - sum(map(len, kept)),
        cut_from_seconds=left,
        cut_to_seconds=right,
    )


def timeline_svg(
    pipeline: PipelineTimeline, shown: Drawn, step: float, kinds: Sequence[str]
) -> Markup:
    """A row per stage: passes in the colour of its kind, below them what it sends."""
    inside: list[Markup] = []
    for s, (stage, bars) in enumerate(zip(pipeline.stages, shown.stages, strict=True)):
        y, kind = s * ROW, f"k{kind_number(kinds, stage.device)}"
        inside.append(tag("rect", class_="idle", x=0, y=y, width=WIDTH, height=PASSES))
        for name in NAMES:
            own = [one for one in bars if one.name == name]
            if own:
                inside.append(tag("path", class_=f"{kind} {_class(name)}", d=_path(own, y, step)))
        if shown.left_out:
            x, to = _units(shown.cut_from_seconds, step), _units(shown.cut_to_seconds, step)
            inside.append(
                tag("rect", class_="cut", x=x, y=y, width=to - x, height=PASSES + 2 * SENDS)
            )
    height = len(pipeline.stages) * ROW
    for seconds in phases(pipeline):
        d = f"M{_units(seconds, step)} 0v{height}"
        inside.append(tag("path", class_="phase", d=d, vector_effect="non-scaling-stroke"))
    return tag(
        "svg",
        *inside,
        class_="steps",
        viewBox=f"0 0 {WIDTH} {height}",
        preserveAspectRatio="none",
        style=f"height:{height}px",
        aria_hidden="true",
    )


def kind_number(kinds: Sequence[str], device: str) -> int:
    """Number of the colour of a device kind."""
    return kinds.index(device) % 8 if device in kinds else 7


def phases(pipeline: PipelineTimeline) -> tuple[float, ...]:
    """Where a phase ends, in order."""
    steady = pipeline.warm_up_end_seconds, pipeline.cool_down_start_seconds
    return (*sorted(steady), pipeline.end_seconds)


def _class(name: str) -> str:
    return "t-" + name.replace(" ", "-")


def _path(bars: Iterable[Bar], y: int, step: float) -> str:
    """Rectangles of one row as one path: ten thousand elements would be slow."""
    found = []
    for one in bars:
        x = _units(one.start_seconds, step)
        width = max(_units(one.end_seconds, step) - x, 1)
        top, height = y, PASSES
        if one.track is Track.ACTIVATIONS:
            top, height = y + PASSES + 1, SENDS
        elif one.track is Track.GRADIENTS:
            top, height = y + PASSES + 1 + SENDS, SENDS
        elif one.name in ("forward", "weight gradients"):
            top, height = y + 4, PASSES - 4
        found.append(f"M{x} {top}h{width}v{height}h-{width}z")
    return "".join(found)


def bar_data(stage: StageTimeline, bars: Sequence[Bar], digits: int) -> list[list[float]]:
    """[number of the name, microbatch, start, end, receiving stage] of every bar, in seconds."""
    return [
        [
            NAMES.index(one.name),
            one.microbatch,
            round(one.start_seconds, digits),
            round(one.end_seconds, digits),
            *([one.to] if one.hop >= 0 else []),
        ]
        for one in bars
    ]


# ---- cluster

_MAP_WIDTH, _ISLAND_WIDTH, _LINE = 350, 216, 17
_MOST_SQUARES = 48
"""Squares of an island; one stands for several nodes where there are more."""
_IN_A_ROW = 16


def cluster_map(cluster: Cluster, used: dict[str, Sequence[float]], links: Sequence[LinkUse],
                step: float, kinds: Sequence[str]) -> Markup:  # fmt: skip
    """Regions with their islands and nodes below each other; links between islands as arcs.

    `used`: part of every node's devices that the plan uses, by island.
    """
    inside: list[Markup] = []
    middle: dict[str, int] = {}
    y = 6
    for region in cluster.regions:
        islands = [island for island in cluster.islands if island.region == region]
        top = y
        inside.append(_text(14, y + 16, f"region {region}", "region-name"))
        y += 26
        for island in islands:
            height, picture = _island(island, y, used[island.name], links, step, kinds)
            inside.append(picture)
            middle[island.name] = y + height // 2
            y += height + 8
        box = {"x": 4, "y": top, "width": _ISLAND_WIDTH + 20, "height": y - top}
        inside.insert(0, tag("rect", class_="region", rx=6, **box))
        y += 10
    arcs = [each for each in links if each.link.scope is LinkScope.ISLANDS]
    most = max((each.bytes_per_step for each in arcs), default=1.0)
    for number, each in enumerate(sorted(arcs, key=lambda one: one.bytes_per_step)):
        inside.append(_arc(each, middle, most, step, number))
    return tag(
        "svg",
        tag("title", f"Map of the cluster {cluster.name}"),
        *inside,
        class_="map",
        role="img",
        viewBox=f"0 0 {_MAP_WIDTH} {y}",
        style=f"max-width:{round(1.25 * _MAP_WIDTH)}px",
    )


_MOST_LETTERS = 34
"""Of a line in a picture of a cluster."""


def _text(x: float, y: float, words: str, name: str = "") -> Markup:
    shown = words if len(words) <= _MOST_LETTERS else words[: _MOST_LETTERS - 1] + "…"
    return tag("text", shown, x=x, y=y, class_=name or None)


def _island(island: Island, y: int, used: Sequence[float], links: Sequence[LinkUse],
            step: float, kinds: Sequence[str]) -> tuple[int, Markup]:  # fmt: skip
    """(height, picture) of an island: its name, what it has, its nodes, how full its links are."""
    kind = f"k{kind_number(kinds, island.device.kind)}"
    group = -(-len(used) // _MOST_SQUARES)
    squares = [used[at : at + group] for at in range(0, len(used), group)]
    rows = -(-len(squares) // _IN_A_ROW)
    own = [
        f"{each.link.scope.value}: {full_words(share)}"
        for each in links
        if each.link.left == each.link.right == island.name
        and (share := each.share(step)) is not None
    ]
    words = [
        island.name,
        f"{island.nodes} x {island.devices_per_node} {island.device.kind}",
        *own,
        *([f"a square is {group} nodes"] if group > 1 else []),
    ]
    lines = [
        _text(18, y + 15 + _LINE * n, text, "name" if n == 0 else "")
        for n, text in enumerate(words)
    ]
    top = y + _LINE * len(words) + 6
    for n, members in enumerate(squares):
        x, at = 18 + 12 * (n % _IN_A_ROW), top + 12 * (n // _IN_A_ROW)
        part = sum(members) / len(members)
        lines.append(tag("rect", class_="node", x=x, y=at, width=10, height=10))
        if part > 0:
            size = {"width": 10, "height": round(10 * part, 1)}
            lines.append(tag("rect", class_=kind, x=x, y=at + 10 - size["height"], **size))
    height = top - y + 12 * rows + 4
    box = tag("rect", class_="island", x=10, y=y, width=_ISLAND_WIDTH, height=height, rx=4)
    return height, tag("g", box, *lines)


def full_words(share: float) -> str:
    """`63% full`; never `0%` of a link that carries something."""
    return f"{share:.0%} full" if share >= 0.01 else "less than 1% full"


def _arc(each: LinkUse, middle: dict[str, int], most: float, step: float, number: int) -> Markup:
    """As wide as what it carries, with how full it is beside it."""
    top, bottom = sorted((middle[each.link.left], middle[each.link.right]))
    x, out = 10 + _ISLAND_WIDTH, 26 + 14 * (number % 3)
    width = 1.5 + 8.5 * each.bytes_per_step / most
    share = each.share(step)
    label = "" if share is None else full_words(share)
    way = f"M{x} {top}C{x + out} {top} {x + out} {bottom} {x} {bottom}"
    at = (top + bottom) / 2 + 16 * (number % 3) - 4
    return tag(
        "g",
        tag("path", class_="link", d=way, stroke_width=f"{width:.1f}"),
        _text(x + out, at, label, "link-name"),
    )
