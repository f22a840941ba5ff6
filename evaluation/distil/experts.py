"""What a layer's experts take by tokens per expert: `moe.csv` as samples of grouped products.

A row's time holds top-k, permutation, both grouped products, SwiGLU and unpermutation (the folder's
README). The passes over memory are taken out at the rate that passes reach,

    products = time - (permute + activate + unpermute bytes) / (REACHED * memory bandwidth)

and the rest is divided by operations: the up projection has two thirds, the down projection one.
With c copies of tokens on the device, inner width f, e bytes of the products' inputs,

    permute c h (2 + e)    activate c f (4 + e)    unpermute c h 2 + tokens h 2

Rows that say little of products are left out: marked rows, skewed loads, less than `MIN_TOKENS`
tokens per expert (launches and reading the weights), inner widths below `MIN_INNER`, passes of more
than `MOST_PASSES` of the time.

Bursts are no training (trap 1 of the README), and weights there are no numbers (trap 2): a product
is not taken to be faster than `sustained` operations per second of its kind and format, where that
is given. On B200 the same products in runs of 50 by Transformer Engine (SimuMax's tables) stay at
850 to 1115 TFLOP/s from 500 tokens per expert on, where bursts here go up to 1900.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from evaluation.accuracy.unit_data import MICROSECOND, Notes, Row, each_row, read_rows
from hetplan.job.spec import Precision, ProductFormat
from hetplan.model.operators import OperatorClass
from hetplan.profiling.samples import OperatorPhase, OperatorSample

EXPERTS_FILE = Path("operators") / "moe.csv"
REACHED = 0.8
"""Of the memory bandwidth, by passes over memory: devices.csv, which assumes it; H200's, GB200's
and GB300's norms (norms.csv) reach 0.75 to 0.85 of it forward."""
MIN_TOKENS, MIN_INNER, MOST_PASSES = 128, 512, 0.4
MAX_SAMPLES = 300
"""Of one kind and format: more shapes than any model has."""

FORMATS: Mapping[str, tuple[str, float]] = {
    "bf16": (Precision.BFLOAT16.value, 2.0),
    "fp8": (ProductFormat.FLOAT8.value, 1.0),
    "fp8_block": ("float8_block", 1.0 + 1 / 32),  # a float32 scale per 128
    "nvfp4": (ProductFormat.NVFP4.value, 0.5 + 1 / 16),
}
"""Precision of a sample and bytes per element of what a product reads, scales included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What of a device's catalogue entry is needed."""

    name: str
    memory_bandwidth: float
    sustained: Mapping[str, float]
    """Operations per second that products sustain, by precision; empty: not known."""


def read_experts(folder: Path, kinds: Mapping[str, Kind], notes: Notes) -> list[OperatorSample]:
    """Samples of both grouped products of every row that can be used, thinned, in their order.

    `kinds` by the table's labels; rows of others are counted in the notes.
    """
    words = ("gpu", "dtype", "distribution", "condition", "flag")
    needed = ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep", "time_us")
    table = read_rows(folder / EXPERTS_FILE, notes, words=words, needed=needed)
    found: dict[tuple[str, str], list[tuple[OperatorSample, OperatorSample]]] = {}
    for row in each_row(table):
        samples = _samples(row, kinds)
        if isinstance(samples, str):
            notes.unused[f"{EXPERTS_FILE.name}: {samples}"] += 1
        else:
            found.setdefault((samples[0].device, samples[0].precision), []).append(samples)
    return [sample for pairs in found.values() for sample in _thinned(pairs)]


def _samples(row: Row, kinds: Mapping[str, Kind]) -> tuple[OperatorSample, OperatorSample] | str:
    """Samples of the up and the down projection, or why there are none."""
    kind = kinds.get(row.gpu)
    if kind is None or row.dtype not in FORMATS:
        return "a kind or format that is not asked for"
    if row.flag or row.distribution != "balanced" or row.condition != "burst":
        return "marked, skewed or of another condition"
    precision, element = FORMATS[row.dtype]
    copies, inner = row.tokens * row.topk / row.ep, row.inter / row.tp
    each, held = row.tokens * row.topk / row.experts, row.experts / row.ep
    if each < MIN_TOKENS or inner < MIN_INNER or each % 1 or held % 1 or inner % 1:
        return "few tokens per expert, narrow experts or uneven shares"
    moved = copies * (row.hidden * (4.0 + element) + inner * (4.0 + element))
    moved += 2.0 * row.tokens * row.hidden
    seconds = row.time_us * MICROSECOND
    passes = moved / (REACHED * kind.memory_bandwidth)
    if passes > MOST_PASSES * seconds:
        return "mostly passes over memory"
    flops = 6.0 * copies * row.hidden * inner
    products = max(seconds - passes, flops / kind.sustained.get(precision, float("inf")))
    sizes = (2 * int(inner), int(row.hidden)), (int(row.hidden), int(inner))
    up, down = (
        OperatorSample(
            device=kind.name,
            operator=OperatorClass.GROUPED_PRODUCT.value,
            phase=OperatorPhase.FORWARD.value,
            precision=precision,
            output_precision=Precision.BFLOAT16.value,
            batch=int(held),
            m=int(each),
            n=n,
            k=k,
            median_seconds=products * part,
            p10_seconds=products * part,
            p90_seconds=products * part,
            repeats=6,
            outliers=0,
        )
        for (n, k), part in zip(sizes, (2 / 3, 1 / 3), strict=True)
    )
    return up, down


def _thinned(pairs: list[tuple[OperatorSample, OperatorSample]]) -> Iterator[OperatorSample]:
    """One row of each shape, and evenly many of all by the operations they do."""
    once = {pair[0].shape: pair for pair in pairs}
    ordered = sorted(once.values(), key=lambda pair: pair[0].batch * pair[0].m * pair[0].n)
    step = max(1.0, 2 * len(ordered) / MAX_SAMPLES)
    for at in range(int(len(ordered) / step)):
        yield from ordered[int(at * step)]
