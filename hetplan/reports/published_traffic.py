"""How much traffic do other people's formulas give, and where do they go wrong?

An article of the switch vendor Asterfusion (cloudswit.ch/blogs/ai-data-center-network-traffic, July
2024) counts the traffic of one epoch of Llama-3 70B on C4, 2 bytes per number. N batches, P
parameters, L layers, H hidden size, T tokens, groups of G:

    DP   backward            2 N P G (G - 1)
    FSDP forward = backward  2 N P (G - 1)
    TP   backward            4 N P L (G - 1)
    TP   forward             4 L T H (G - 1) G
    PP                       2 T H (G - 1)
    3D   backward            2 N P Gdp (2 L (Gtp - 1) / Gpp + (Gdp - 1)) + 2 T H (Gpp - 1)
    3D   forward             2 T H (2 L Gtp (Gtp - 1) + (Gpp - 1))

Beside each stands what rings send (Patarasu and Yuan, J. Parallel Distrib. Comput. 69, 2009): an
all_reduce of S bytes among G ranks 2 (G - 1) S, an all_gather or a reduce_scatter half of that; and
tensor parallelism sums activations, 2 all_reduces per layer and pass (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.pieces import stage_copies
from hetplan.plans.plan import Plan

SWITCH_BITS_PER_SECOND = 51.2e12
"""One switch of the article's kind: 64 ports of 800 Gbit/s, one direction."""

SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Ranks of one group of each kind."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArticleInputs:
    """What the formulas take."""

    batches: float
    """N: optimizer steps of the run."""
    parameters: float
    layers: int
    hidden_size: int
    tokens: float
    alone: Groups
    """G of the rows with one kind of parallelism."""
    together: Groups
    """Gdp, Gtp and Gpp of 3D."""
    bytes_per_element: int = 2


ARTICLE = ArticleInputs(
    batches=364.6e6 / 2048,  # C4's 364.6 M samples in batches of 2048, as the article has them
    parameters=70e9,
    layers=80,  # with the hidden size: Llama-3 70B, arXiv 2407.21783, table 3
    hidden_size=8192,
    tokens=156e9,  # C4, as the article has it
    alone=Groups(dp=8, tp=8, pp=8),
    # 8 x 8 x 16, of which only 16 data-parallel ranks give the article's sum.
    together=Groups(dp=16, tp=8, pp=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArticleRow:
    """One row of the article's table."""

    name: str
    formula: str
    bytes: float
    """By the formula."""
    slipped_bytes: float | None
    """With the article's slip of units, where it has one."""
    published_bytes: float | None
    """As printed in the article; None: not printed, or other inputs than its own."""
    ring_bytes: float
    """What rings send for the same training."""

    @property
    def as_published(self) -> float:
        """What the article's arithmetic gives."""
        return self.bytes if self.slipped_bytes is None else self.slipped_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Slip:
    """One error of the article, recomputed."""

    what: str
    article: str
    right: str
    factor: float
    """The larger of both over the smaller."""


_SLIP_OF_UNITS = 1e6 / 2**20
"""The article's tensor-parallel figures are in units of 10**9 * 2**20 bytes, called PB."""

# As printed in the article, in bytes; the tensor-parallel ones with the slip of units.
_PUBLISHED = {
    "DP backward": 1396e15,
    "FSDP forward": 175e15,
    "TP backward": 26_622e15,
    "TP forward": 21_840e15,
    "PP forward": 17.9e15,
    "3D": 84.7e18,
}


def article_rows(inputs: ArticleInputs = ARTICLE) -> tuple[ArticleRow, ...]:
    """The article's table for these inputs; with its own ones the printed figures beside."""
    n, p = inputs.batches, inputs.parameters
    dp, tp, pp = inputs.alone.dp, inputs.alone.tp, inputs.alone.pp
    size, layers, t, h = inputs.bytes_per_element, inputs.layers, inputs.tokens, inputs.hidden_size
    # One pass: 2 all_reduces in each layer.
    sums = 2.0 * 2.0 * (tp - 1) * size * t * h * layers
    own = inputs == ARTICLE

    def row(
        name: str, formula: str, found: float, ring: float, *, slip: bool = False
    ) -> ArticleRow:
        return ArticleRow(
            name=name,
            formula=formula,
            bytes=found,
            slipped_bytes=found * _SLIP_OF_UNITS if slip else None,
            published_bytes=_PUBLISHED.get(name) if own else None,
            ring_bytes=ring,
        )

    half_ring = (dp - 1) * size * p * n
    return (
        row("DP backward", "2NPG(G-1)", size * n * p * dp * (dp - 1), 2.0 * half_ring),
        # A sharded parameter is gathered in the forward pass; in the backward pass it is gathered
        # again and its gradient scattered.
        row("FSDP forward", "2NP(G-1)", size * n * p * (dp - 1), half_ring),
        row("FSDP backward", "2NP(G-1)", size * n * p * (dp - 1), 2.0 * half_ring),
        row("TP backward", "4NPL(G-1)", 2.0 * size * n * p * layers * (tp - 1), sums, slip=own),
        row(
            "TP forward",
            "4LTH(G-1)G",
            2.0 * size * layers * t * h * (tp - 1) * tp,
            sums,
            slip=own,
        ),
        row("PP forward", "2TH(G-1)", size * t * h * (pp - 1), size * t * h * (pp - 1)),
        *_three_dimensions(inputs, own),
    )


def _three_dimensions(inputs: ArticleInputs, own: bool) -> Iterator[ArticleRow]:
    n, p, t, h = inputs.batches, inputs.parameters, inputs.tokens, inputs.hidden_size
    tp, pp, dp = inputs.together.tp, inputs.together.pp, inputs.together.dp
    size, layers = inputs.bytes_per_element, inputs.layers
    hops = size * t * h * (pp - 1)
    backward = size * n * p * dp * (2.0 * layers * (tp - 1) / pp + (dp - 1)) + hops
    forward = size * t * h * (2.0 * layers * tp * (tp - 1) + (pp - 1))
    # Every one of the tp x pp slices is reduced among dp ranks; activations are summed among tp
    # ranks 2 times per layer and pass; whatever dp is, all replicas together see T tokens.
    sums = 2.0 * layers * 2.0 * (tp - 1) * size * t * h
    ring_backward = 2.0 * (dp - 1) * size * p * n + sums + hops
    ring_forward = sums + hops
    for name, formula, found, ring in (
        ("3D backward", "2NPGdp(2L(Gtp-1)/Gpp+(Gdp-1))+2TH(Gpp-1)", backward, ring_backward),
        ("3D forward", "2TH(2LGtp(Gtp-1)+(Gpp-1))", forward, ring_forward),
        ("3D", "backward + forward", backward + forward, ring_backward + ring_forward),
    ):
        yield ArticleRow(
            name=name,
            formula=formula,
            bytes=found,
            slipped_bytes=None,
            published_bytes=_PUBLISHED.get(name) if own else None,
            ring_bytes=ring,
        )


def inputs_of(plan: Plan, model: ModelSpec, job: Job, total_tokens: int) -> ArticleInputs:
    """The formulas' inputs for a plan: the degrees of its first stage stand for all."""
    pipeline = plan.pipelines[0]
    replica = pipeline.stages[0].replicas[0]
    groups = Groups(dp=stage_copies(pipeline.stages[0]), tp=replica.tp, pp=len(pipeline.stages))
    return ArticleInputs(
        batches=total_tokens / (job.global_batch_size * job.sequence_length),
        parameters=float(model.parameter_count),
        layers=model.num_layers,
        hidden_size=model.hidden_size,
        tokens=float(total_tokens),
        alone=groups,
        together=groups,
        bytes_per_element=job.precision.bytes_per_element,
    )


def article_slips() -> tuple[Slip, ...]:
    """Every error that was found in the article, computed from its own inputs."""
    rows = {row.name: row for row in article_rows()}
    data, shards = rows["DP backward"], rows["FSDP forward"]
    backward, forward, whole = rows["TP backward"], rows["TP forward"], rows["3D"]
    total = whole.bytes
    days_bytes = total / SWITCH_BITS_PER_SECOND / SECONDS_PER_DAY
    days_bits = 8.0 * days_bytes
    # 100 epochs in 100 days are one epoch a day: as many switches as one needs days.
    asked, needed = math.ceil(days_bytes), math.ceil(days_bits)
    stray = rows["3D forward"].bytes * ARTICLE.parameters
    both = shards.bytes + rows["FSDP backward"].bytes
    ring_both = shards.ring_bytes + rows["FSDP backward"].ring_bytes
    return (
        Slip(
            what="TP figures are in units of 10^9 x 2^20 bytes and called PB",
            article=f"{backward.as_published / 1e15:,.0f} and "
            f"{forward.as_published / 1e15:,.0f} PB",
            right=f"{backward.bytes / 1e15:,.0f} and {forward.bytes / 1e15:,.0f} PB by the same "
            "formulas",
            factor=1.0 / _SLIP_OF_UNITS,
        ),
        Slip(
            what="an all_reduce is priced as G(G-1) full copies",
            article=f"DP {data.bytes / 1e15:,.0f} PB",
            right=f"{data.ring_bytes / 1e15:,.0f} PB by a ring",
            factor=data.bytes / data.ring_bytes,
        ),
        Slip(
            what="FSDP is said to move 1/G of what DP moves",
            article=f"{both / data.bytes:.2f} of DP, forward and backward together",
            right=f"{ring_both / data.ring_bytes:.2f} of DP by rings",
            factor=ring_both / data.ring_bytes / (both / data.bytes),
        ),
        Slip(
            what="TP backward sums the gradients of all P parameters in each of L layers",
            article=f"{backward.bytes / 1e15:,.0f} PB",
            right=f"{backward.ring_bytes / 1e15:,.0f} PB of activations, as in the forward pass",
            factor=backward.bytes / backward.ring_bytes,
        ),
        Slip(
            what="3D forward has a stray factor P before it is simplified",
            article=f"{stray / 1e18:.2g} EB as written",
            right=f"{rows['3D forward'].bytes / 1e18:.2f} EB without it",
            factor=ARTICLE.parameters,
        ),
        Slip(
            what="a switch of 51.2 Tbit/s is taken to carry 51.2 Tbyte/s",
            article=f"{days_bytes:.1f} days for an epoch on one switch",
            right=f"{days_bits:.1f} days",
            factor=8.0,
        ),
        Slip(
            what="so are the switches for 100 epochs in 100 days",
            article=f"{asked} switches",
            right=f"{needed} switches",
            factor=needed / asked,
        ),
    )


def switches_for(bits_per_second: float) -> int:
    """Switches of 51.2 Tbit/s that carry this much."""
    return math.ceil(bits_per_second / SWITCH_BITS_PER_SECOND)
