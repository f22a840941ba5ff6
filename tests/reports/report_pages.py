"""Results to report on, and a page as a browser's parser reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any

from compare_cases import PREDICTOR, run_text, small_result
from cost_fakes import job, model
from estimate_plans import CLUSTER, expert_model, plan_of, plan_with, stages_of
from trainer_plans import result_of

from hetplan.cost.estimate import estimate
from hetplan.plans.plan import Plan
from hetplan.reports.html.page import report_text
from hetplan.reports.html.values import PlanView, plan_view
from hetplan.search.result import (
    Alternative,
    BestAlone,
    Certificate,
    ChangeKind,
    CoursePoint,
    FamilyBound,
    IdleCause,
    IdleReason,
    KindAlone,
    Proof,
    SearchResult,
    ShadowPrice,
)

SHAPE = model(tied_embeddings=True, hidden_size=1024, ffn_hidden_size=4096, head_dim=128)
ASKED = job(target="any", gradient_clipping=True, total_tokens=10**12)
CHUNKS = [[0, 2, 3, 4], [5, 6, 7, 8]]


def priced(plan: Plan, shape: Any = SHAPE, machines: Any = CLUSTER) -> SearchResult:
    found = estimate(plan, shape, machines, ASKED, PREDICTOR)
    return result_of(machines, plan, shape, ASKED, priced=found)


def stages_in(schedule: str, chunks: list[list[int]] | None = None, count: int = 6) -> SearchResult:
    return priced(plan_of([4] * 4, chunks, microbatches=count, shape=SHAPE, asked=ASKED,
                          schedule=schedule, tp=2))  # fmt: skip


def several_pipelines() -> SearchResult:
    """Two alike, one of other sizes."""
    total, built, first = len(SHAPE.layers), [], 0
    for sizes, cut in (((4, 4), 5), ((4, 4), 5), ((8, 8), 4)):
        stages = stages_of([(0, cut)], sizes, total, first_device=first, num_microbatches=4, tp=4)
        built.append((stages, 4))
        first += sum(sizes)
    return priced(plan_with(SHAPE, CLUSTER, ASKED, built))


PRICES = (
    ShadowPrice(kind=ChangeKind.NODE, words="1 more node of a", least_gain=0.03125,
                most_gain=0.0375, same_plan_gain=0.0, changed=True),
    ShadowPrice(kind=ChangeKind.NARROWER, words="half the bandwidth between a and b",
                least_gain=-0.125, most_gain=None, same_plan_gain=-0.25, changed=False),
)  # fmt: skip
ALONE = BestAlone(
    target="megatron",
    kind=KindAlone(device="other", devices=8, tokens_per_second=1000.0,
                   roofline_tokens_per_second=None, gap=0.01, reason=""),
)  # fmt: skip


def searched() -> SearchResult:
    """With everything that a search can say."""
    result = small_result()
    step = result.estimate.step_seconds
    bound = FamilyBound(family=0, plans="1f1b, 8 x 4", bound_seconds=0.9 * step, grounds="program")
    return replace(
        result,
        certificate=Certificate(
            lower_bound_seconds=0.9 * step, gap=0.1, status="limit", space="everything",
            candidates=7, pruned_by_bound=2, searched=5, replays=9,
            proof=Proof(families=7, families_sha256="", raised=(bound,)),
            course=tuple(
                CoursePoint(steps=at, best_seconds=best * step, lower_bound_seconds=least * step)
                for at, best, least in ((1, 1.5, 0.5), (3, 1.25, 0.75), (8, 1.0, 0.9))
            ),
        ),
        alternatives=(
            Alternative(why="fewest devices", plan=result.plan, step_seconds=2 * step,
                        quantile_seconds=3 * step, quantile=0.9, usd_per_step=0.5, devices=4),
        ),
        idle=(
            IdleReason(island="a", idle_devices=4, usable_devices=8, busy_share=0.25,
                       causes=(IdleCause.MEMORY,), gain=0.125),
        ),
        prices=PRICES,
        alone=ALONE,
    )  # fmt: skip


def of_experts() -> SearchResult:
    shape = expert_model()
    return priced(plan_of([8, 8], microbatches=4, shape=shape, asked=ASKED, ep=4, tp=2), shape)


def too_large() -> SearchResult:
    """An estimate that does not fit in memory."""
    result = stages_in("1f1b")
    stage = result.estimate.stages[0]
    over = replace(stage, memory=replace(stage.memory, available_bytes=1e6))
    stages = (over, *result.estimate.stages[1:])
    return replace(result, estimate=replace(result.estimate, stages=stages))


def of_an_older_file() -> SearchResult:
    """What `hetplan.plan/5` and before held of an estimate."""
    older = replace(small_result().estimate, kinds=(), mfu=None, flops_per_second=0.0, causes=(),
                    p5_seconds=None, p95_seconds=None, interval_note="")  # fmt: skip
    return replace(small_result(), estimate=older)


RESULTS: dict[str, Callable[[], SearchResult]] = {
    "1f1b": lambda: stages_in("1f1b"),
    "gpipe": lambda: stages_in("gpipe"),
    "interleaved": lambda: stages_in("interleaved-1f1b", CHUNKS),
    "zbv": lambda: stages_in("zbv", CHUNKS),
    "several pipelines": several_pipelines,
    "one stage": lambda: priced(plan_of([8], microbatches=2, shape=SHAPE, asked=ASKED)),
    "searched": searched,
    "experts": of_experts,
    "does not fit": too_large,
    "older file": of_an_older_file,
}


def view_of(result: SearchResult, name: str = "plan.json", runs: Any = ()) -> PlanView:
    return plan_view(name, result, PREDICTOR, runs)


@dataclass
class Page(HTMLParser):
    """A page's elements, its text by element, and its data."""

    text: str
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    data: list[Any] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    """Words in <dfn>, in small letters."""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            if self.tags[-1][1].get("type") == "application/json":
                self.data.append(json.loads(data))
        elif self.open[-1:] != ["style"]:
            self.words.append(data)
            if self.open[-1:] == ["dfn"]:
                self.explained.append(data.lower())

    @property
    def says(self) -> str:
        """Everything that a reader sees, in one line."""
        return " ".join(" ".join(self.words).split())

    def with_attribute(self, name: str) -> list[tuple[str, dict[str, str]]]:
        return [(tag, attributes) for tag, attributes in self.tags if name in attributes]


def page_of(*views: PlanView) -> Page:
    return Page(report_text(views))


__all__ = [
    "ALONE",
    "PREDICTOR",
    "PRICES",
    "RESULTS",
    "Page",
    "page_of",
    "run_text",
    "searched",
    "small_result",
    "view_of",
]
