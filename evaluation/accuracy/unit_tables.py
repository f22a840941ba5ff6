"""Published tables of layers, operators and efficiencies (CSV): rows in base units.

Each kind of table is recognised by its header. Units follow the column's name: `_us` microseconds,
`_mb` MiB, `_tflops` 1e12 operations per second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetplan.lint.rows import CollectiveRow, Place
from hetplan.lint.tables import (
    COLUMNS,
    MICROSECOND,
    Cells,
    columns_of,
    read_collectives,
    read_table,
)
from hetplan.model.spec import Architecture, ModelSpec, plain_model

MIB = float(2**20)
_LAYER_COLUMNS = frozenset({"gpu", "model", "op", "mbs", "tp", "fwd_us", "bwd_us"})
_EFFICIENCY_COLUMNS = frozenset({"gpu", "op", "shape", "efficiency"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """Time of one layer, or of one operator of a layer, at one microbatch size and tp."""

    place: Place
    source: str
    precision: str
    """As the file writes it."""
    device: str
    model: str
    operation: str
    """`layer` for a whole layer."""
    layer: int | None
    """Position in the model's row of layers; None: an operator."""
    microbatch_size: int
    tp: int
    variant: str
    """What else distinguishes rows, such as the algorithm of a product."""
    forward_seconds: float
    backward_seconds: float | None
    weight_bytes: float | None
    activation_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyRow:
    """Share of the peak rate that one operator of one shape reaches."""

    place: Place
    source: str
    device: str
    operation: str
    shape: str
    """`key=value` pairs, comma separated, as the file writes them."""
    efficiency: float
    peak_flops_per_second: float | None = None
    """The rate of which it is the share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of one file, which holds one kind of them."""

    layers: tuple[LayerRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    efficiencies: tuple[EfficiencyRow, ...] = ()
    needed: str = "value"
    """Without it a line is no row."""


def read_unit_table(file: str, text: str) -> Table | None:
    """The table's rows; None where its header is of no kind that is known.

    An InputError lists the cells that are wrong.
    """
    columns = columns_of(text.partition("\n")[0].rstrip("\r"))
    if columns >= _LAYER_COLUMNS:
        needed = "forward time or no microbatch size (Galvatron's totals of layers)"
        return Table(layers=read_table(file, text, _layer), needed=needed)
    if columns >= COLUMNS:
        return Table(collectives=read_collectives(file, text))
    if columns >= _EFFICIENCY_COLUMNS:
        return Table(efficiencies=read_table(file, text, _efficiency), needed="efficiency")
    return None


def _layer(cells: Cells) -> LayerRow | None:
    forward, microbatch = cells.number("fwd_us", MICROSECOND), cells.count("mbs")
    if forward is None or microbatch is None:
        return None  # forward-only totals of several layers: nothing to compare them with
    layer = cells.number("layer")
    return LayerRow(
        place=cells.place,
        source=cells.text("source"),
        precision=cells.text("dtype"),
        device=cells.text("gpu"),
        model=cells.text("model"),
        operation=cells.text("op"),
        layer=None if layer is None else int(layer),
        microbatch_size=microbatch,
        tp=cells.count("tp") or 1,
        variant=cells.text("algo"),
        forward_seconds=forward,
        backward_seconds=cells.number("bwd_us", MICROSECOND),
        weight_bytes=cells.number("weights_mb", MIB),
        activation_bytes=cells.number("act_mb", MIB),
    )


def _efficiency(cells: Cells) -> EfficiencyRow | None:
    efficiency, peak = cells.number("efficiency"), cells.number("peak_tflops", 1e12)
    if efficiency is None:
        return None
    return EfficiencyRow(
        place=cells.place,
        source=cells.text("source"),
        device=cells.text("gpu"),
        operation=cells.text("op"),
        shape=cells.text("shape"),
        efficiency=efficiency,
        peak_flops_per_second=peak,
    )


def precision_of(label: str) -> str:
    """`float32`, `float16` or `bfloat16`; empty where the label says none of them."""
    text = label.lower()
    if re.search(r"fp16\s*=\s*false", text):
        return "float32"
    for name, pattern in (
        ("bfloat16", r"\b(bf16|bfloat16)\b"),
        ("float16", r"\b(fp16|float16|half)\b"),
        ("float32", r"\b(fp32|float32)\b"),
    ):
        if re.search(pattern, text):
            return name
    return ""


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int) -> ModelSpec:
    return plain_model(
        name=name,
        architecture=Architecture.GPT,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_sequence_length=2048,
    )


_MODELS = (
    # config.json of facebook/opt-350m, facebook/opt-30b, EleutherAI/gpt-neo-2.7B,
    # meta-llama/Meta-Llama-3-8B.
    (r"opt-?350", _gpt("opt-350m", 24, 1024, 16, 50272)),
    (r"opt-?30(?!\d)", _gpt("opt-30b", 48, 7168, 56, 50272)),
    (r"gpt-?neo-?2", _gpt("gpt-neo-2.7b", 32, 2560, 20, 50257)),
    (
        r"llama-?3-8",
        plain_model(
            name="llama-3-8b",
            architecture=Architecture.LLAMA,
            num_layers=32,
            hidden_size=4096,
            ffn_hidden_size=14336,
            num_attention_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128256,
            max_sequence_length=8192,
        ),
    ),
)


def known_model(name: str) -> ModelSpec | None:
    """The model that a file of measurements names; None where its shape is not known."""
    return next((model for pattern, model in _MODELS if re.search(pattern, name.lower())), None)
