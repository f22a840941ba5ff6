"""Measured training steps that other people published, and the model of each.

Rows come from `runs/*.csv` in a folder of reference data. A file may have more columns than are
read here, or lack some; a cell may be empty, `n/a` or not a number. Nothing of that ends the
reading: a row keeps what is wrong with it, and whoever predicts it says so.

A row is suspect where its source says so (`SUSPECT` in `other`), or where it is one of those whose
step time nothing in their configuration explains (`SLOW_ROWS`): 8 to 98 % above rows beside them.

A row has the model's sizes. What it lacks follows from the family that its name begins with. A name
of no known family is read by its sizes: an inner width of 4 hidden sizes is a GPT layer, anything
else a gated one, and a note says so.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hetplan.errors import Fault, InputError
from hetplan.job.spec import ProductFormat
from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    LayerRun,
    Mlp,
    Norm,
    TransformerLayer,
)
from hetplan.model.spec import Architecture, ModelSpec, plain_model
from hetplan.plans.plan import Sharding

RUNS_FOLDER = "runs"
SUSPECT_MARK = "SUSPECT"

_COLUMNS = {"step_seconds": "step_time_s", "peak_memory_gib": "peak_mem_gib"}
"""Columns that are not called like the fields of `RunRow`."""
_SHARDINGS = {
    Sharding.NONE: ("0", "false", "no"),
    Sharding.OPTIMIZER: ("1", "true", "yes", "zero1", "stage1"),
    Sharding.GRADIENTS: ("zero2", "stage2"),
    Sharding.PARAMETERS: ("zero3", "stage3", "fsdp", "fsdp2", "hsdp"),
}
"""Words of `dist_opt`; stages are those of ZeRO (arXiv 1910.02054), hsdp shards within a node."""
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_NOTHING = ("", "n/a", "na", "none", "null", "-")
_MAX_WHOLE = 10**12
"""No size or count of a training run is larger; more is a slip."""

_FORMATS = {
    "fp8": ProductFormat.FLOAT8,
    "fp8-cs": ProductFormat.FLOAT8,  # one current scale per tensor
    "fp8-ds": ProductFormat.FLOAT8,  # one delayed scale per tensor
    "fp8-mx": ProductFormat.MXFP8,
    "mxfp8": ProductFormat.MXFP8,
    "nvfp4": ProductFormat.NVFP4,
}

SLOW_ROWS = (
    ("vtrain-multi", "gpt-39.1B", 2, 8, 2), ("vtrain-multi", "gpt-39.1B", 2, 8, 3),
    ("vtrain-multi", "gpt-39.1B", 2, 8, 6), ("vtrain-multi", "gpt-39.1B", 2, 16, 2),
    ("vtrain-multi", "gpt-39.1B", 2, 16, 3), ("vtrain-multi", "gpt-39.1B", 2, 16, 6),
    ("vtrain-multi", "gpt-39.1B", 4, 4, 3), ("vtrain-multi", "gpt-39.1B", 4, 4, 6),
    ("vtrain-multi", "gpt-39.1B", 4, 8, 2), ("vtrain-multi", "gpt-39.1B", 4, 8, 3),
    ("vtrain-multi", "gpt-39.1B", 4, 8, 4), ("vtrain-multi", "gpt-39.1B", 4, 16, 6),
    ("vtrain-multi", "gpt-39.1B", 4, 16, 12),
    ("vtrain-multi", "gpt-3.6B", 8, 1, 64), ("vtrain-multi", "gpt-3.6B", 8, 1, 2),
    ("vtrain-multi", "gpt-3.6B", 4, 1, 2),
)  # fmt: skip
"""(source, model, tp, pp, microbatch size) of the 16 of vTrain's 73 public multi-node rows that are
far slower than rows beside them. They were picked by their residual (8 to 98 % above a prediction
without any fit on runs), so figures without them flatter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One measured training step; None and empty texts are what the row does not say."""

    file: str
    """Name of the CSV file."""
    line: int
    source: str = ""
    source_ref: str = ""
    model: str = ""
    layers: int | None = None
    hidden: int | None = None
    ffn_hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    seq: int | None = None
    num_experts: int | None = None
    gpu: str = ""
    gpus: int | None = None
    gpus_per_node: int | None = None
    intra_bw_note: str = ""
    inter_bw_note: str = ""
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    dtype: str = ""
    recompute: str = ""
    seq_parallel: bool | None = None
    dist_opt: Sharding | None = None
    within_node: bool = False
    """The ranks of a node split what is sharded, and nodes hold copies (`dist_opt` hsdp)."""
    other: str = ""
    step_time_kind: str = ""
    step_seconds: float | None = None
    peak_memory_gib: float | None = None
    faults: tuple[str, ...] = ()
    """Cells that hold something else than they should, in words."""

    @property
    def derived(self) -> bool:
        """The step time was computed from a published rate, not published itself."""
        return "derived" in self.step_time_kind.lower()

    @property
    def product_format(self) -> ProductFormat | None:
        """Format of the products where it is narrower; of `A (B)`, two variants, the first."""
        return _FORMATS.get(self.dtype.split("(")[0].strip().lower())

    @property
    def data_set(self) -> str:
        """Which figures it is averaged with.

        Published and derived step times are kept apart, and so are formats of products.
        """
        name = self.source or Path(self.file).stem
        parts = (
            "experts" if self.num_experts else "",
            "" if self.product_format is None else self.product_format.value,
            "derived" if self.derived else "",
        )
        return ", ".join((name, *filter(None, parts)))

    @property
    def suspect(self) -> str:
        """Why it is listed apart; empty where it is not."""
        if SUSPECT_MARK in self.other:
            return next(part.strip() for part in self.other.split(";") if SUSPECT_MARK in part)
        place = (self.source, self.model, self.tp, self.pp, self.micro_batch)
        return "slower than its neighbours without a cause" if place in SLOW_ROWS else ""

    @property
    def settings(self) -> dict[str, str]:
        """The `key=value` parts of `other`."""
        pairs = (part.split("=", 1) for part in self.other.split(";") if "=" in part)
        return {key.strip(): value.strip() for key, value in pairs}

    @property
    def layout(self) -> str:
        """Degrees and sizes in words."""
        words = [f"{self.gpus or '?'} x {self.gpu.split(' (')[0] or '?'}"]
        for name in ("tp", "pp", "vpp", "cp", "ep", "dp"):
            value = getattr(self, name)
            if value is not None and (value > 1 or name in ("tp", "pp", "dp")):
                words.append(f"{name} {value}")
        words.append(f"microbatch {self.micro_batch or '?'}, batch {self.global_batch or '?'}")
        if self.recompute not in ("", "none", "full"):
            words.append(f"recompute {self.recompute}")
        return f"{self.model or '?'}, " + ", ".join(words)

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"


def read_runs(folder: Path) -> tuple[list[RunRow], list[Fault]]:
    """Every row of the tables in `folder/runs`, and of those in `folder` itself; files by name.

    Faults: files that could not be read at all, and cells that hold no number. Bytes that are no
    UTF-8 become a mark in the text that they stand in.
    """
    rows: list[RunRow] = []
    faults: list[Fault] = []
    for place in (folder / RUNS_FOLDER, folder):
        for path in sorted(place.glob("*.[cC][sS][vV]")):
            try:
                found = read_table(path)
            except (OSError, csv.Error) as fault:
                faults.append(Fault(file=path.name, message=f"cannot be read: {fault}"))
                continue
            except KeyError:
                # A table of another kind beside the folder is for the reader of unit data.
                if place != folder:
                    message = "has no column step_time_s; it is no table of runs"
                    faults.append(Fault(file=path.name, message=message))
                continue
            rows += found
            faults += [
                Fault(file=row.file, line=row.line, message=each)
                for row in found
                for each in row.faults
            ]
    return rows, faults


def read_table(path: Path) -> list[RunRow]:
    """Every row of one table of runs; a KeyError where it has no column of step times."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        table = csv.DictReader(file)
        names = table.fieldnames or ()
        cells = [(table.line_num, row) for row in table]
    if "step_time_s" not in names:
        raise KeyError("step_time_s")
    return [run_row(path.name, line, row) for line, row in cells]


def run_row(file: str, line: int, cells: Mapping[str, str]) -> RunRow:
    """One line of a table, by the names of its columns."""
    values: dict[str, Any] = {}
    faults: list[str] = []
    for name, kind in _KINDS.items():
        column = _COLUMNS.get(name, name)
        text = (cells.get(column) or "").strip()
        try:
            values[name] = text if kind is str else _value(text, kind)
        except ValueError as fault:
            values[name] = None
            faults.append(f"{column} is {text!a}{fault}")
    hybrid = (cells.get("dist_opt") or "").strip().lower() == "hsdp"
    return RunRow(file=file, line=line, faults=tuple(faults), **values | {"within_node": hybrid})


_KINDS = {
    name: next(
        kind for kind in (str, bool, int, float, Sharding) if kind in (hint, *get_args(hint))
    )
    for name, hint in get_type_hints(RunRow).items()
    if name not in ("file", "line", "faults")
}
"""What a cell of every column holds."""


def _value(text: str, kind: type) -> bool | int | float | Sharding | None:
    """A cell that is no text; a ValueError says what is wrong with it."""
    if text.lower() in _NOTHING:
        return None
    if kind is Sharding:
        for sharding, words in _SHARDINGS.items():
            if text.lower() in words:
                return sharding
        raise ValueError(f"; it is one of {', '.join(sum(_SHARDINGS.values(), ()))} or empty")
    if kind is int:
        text = text.split(" (")[0]  # `1 (5)`: two variants, the first
    if kind is bool:
        if text.lower() not in _FLAGS:
            raise ValueError("; it is 0, 1 or empty")
        return _FLAGS[text.lower()]
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if kind is int:
        if not 0 <= number <= _MAX_WHOLE or number % 1:
            raise ValueError(", not a whole number")
        return int(number)
    if not 0 < number < math.inf:
        raise ValueError(", not a number above 0")
    return number


_NO_PROJECTION = 128
"""Words of a vocabulary whose projection costs nothing: the multiple that Megatron-LM pads to."""
_HEADLESS = (
    "the last layer of Sailor's GPT-Neo, as its profile was measured, holds no projection: priced "
    "with a vocabulary of 128, so without the embedding's gradients and memory too"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    num_experts: int


def model_of(row: RunRow) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model of a row and what was assumed of it; an InputError says what the row lacks."""
    sizes = _sizes(row)
    name = row.model.lower().replace("_", "-")
    if row.source.startswith("sailor") and name.startswith("gpt-neo"):
        headless = replace(sizes, vocab=_NO_PROJECTION)
        return _plain_model(headless, Architecture.GPT), (_HEADLESS,)
    for beginnings, make in _FAMILIES:
        if name.startswith(beginnings):
            return make(sizes), ()
    if sizes.num_experts:
        raise InputError(
            f"model {row.model!a} has {sizes.num_experts} experts and is of no known family: how "
            "many a token goes to is not known"
        )
    plain = sizes.ffn_hidden == 4 * sizes.hidden
    note = f"{row.model or 'the model'}: of no known family, read as {'GPT' if plain else 'Llama'}"
    architecture = Architecture.GPT if plain else Architecture.LLAMA
    return _plain_model(sizes, architecture, tied=plain), (note,)


# (beginnings of names, groups of keys and values, vocabulary) of the models' own config.json files.
_PUBLISHED = (
    (("llama2-70b", "llama-2-70b"), 8, 32000),
    (("llama2", "llama-2"), None, 32000),
    (("llama3", "llama-3"), 8, 128256),
    (("mixtral-8x",), 8, 32000),
)


def _published(row: RunRow) -> RunRow:
    """The row with what it leaves out of a published model."""
    for beginnings, kv_heads, vocab in _PUBLISHED:
        if (row.model or "").lower().startswith(beginnings):
            return replace(row, kv_heads=row.kv_heads or kv_heads, vocab=row.vocab or vocab)
    return row


def _sizes(row: RunRow) -> _Sizes:
    row = _published(row)
    needed = ("layers", "hidden", "ffn_hidden", "heads", "vocab", "seq")
    missing = [name for name in needed if not getattr(row, name)]
    if missing:
        raise InputError(f"the row does not say {', '.join(missing)}")
    return _Sizes(
        name=row.model or "unnamed",
        kv_heads=row.kv_heads or row.heads or 0,
        num_experts=row.num_experts or 0,
        **{name: getattr(row, name) for name in needed},
    )


def _head_dim(sizes: _Sizes) -> int:
    if sizes.hidden % sizes.heads:
        raise InputError(f"heads {sizes.heads} do not divide hidden {sizes.hidden}")
    return sizes.hidden // sizes.heads


def _plain_model(sizes: _Sizes, architecture: Architecture, *, tied: bool = False) -> ModelSpec:
    if sizes.num_experts:
        raise InputError(f"model {sizes.name!a} is of a dense family and has experts")
    return plain_model(
        name=sizes.name,
        architecture=architecture,
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.ffn_hidden,
        num_attention_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=_head_dim(sizes),
        vocab_size=sizes.vocab,
        max_sequence_length=sizes.seq,
        tied_embeddings=tied,
    )


def _attention(sizes: _Sizes, *, head_dim: int = 0, **kind: bool) -> Attention:
    return Attention(
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=head_dim or _head_dim(sizes),
        **kind,
    )


def _qwen(sizes: _Sizes) -> ModelSpec:
    mlp: Mlp | Experts = Mlp(ffn_hidden_size=sizes.ffn_hidden, gated=True)
    if sizes.num_experts:
        # Inner width of an expert from config.json of Qwen3-235B-A22B and Qwen3-30B-A3B, by hidden;
        # eight experts per token, no shared ones (arXiv 2505.09388, table 2).
        widths = {4096: 1536, 2048: 768}
        if sizes.hidden not in widths:
            raise InputError(
                f"experts' width of a Qwen model of hidden {sizes.hidden} is not known"
            )
        mlp = Experts(
            num_experts=sizes.num_experts,
            experts_per_token=8,
            expert_ffn_hidden_size=widths[sizes.hidden],
        )
    if sizes.num_experts or sizes.name.lower().replace("_", "-").startswith("qwen3"):
        # Query and key norms instead of biases, heads of 128 (arXiv 2505.09388, section 2).
        attention = _attention(sizes, head_dim=128, qk_norm=True)
    else:
        # Biases of queries, keys and values (arXiv 2412.15115, section 2).
        attention = _attention(sizes, qkv_bias=True)
    return _of_layers(sizes, ((sizes.layers, _rms_layer(attention, mlp)),))


def _mixtral(sizes: _Sizes) -> ModelSpec:
    """Two experts per token, each of the full inner width (arXiv 2401.04088, section 2)."""
    experts = Experts(
        num_experts=sizes.num_experts or 8,
        experts_per_token=2,
        expert_ffn_hidden_size=sizes.ffn_hidden,
    )
    return _of_layers(sizes, ((sizes.layers, _rms_layer(_attention(sizes), experts)),))


def _deepseek(sizes: _Sizes) -> ModelSpec:
    """The first layers dense, the others of experts; by the hidden size, which tells them apart.

    DeepSeek-V2 arXiv 2405.04434 section 3.1.2, V2-Lite its appendix B, V3 arXiv 2412.19437 section
    4.2. A cut-down model keeps one dense layer (SimuMax's benchmark models do).
    """
    # hidden: queries' rank, experts per token, width of an expert, width of the shared ones.
    known: dict[int, tuple[int | None, int, int, int]] = {
        5120: (1536, 6, 1536, 2 * 1536),
        2048: (None, 6, 1408, 2 * 1408),
        7168: (1536, 8, 2048, 2048),
    }
    if sizes.hidden not in known or not sizes.num_experts:
        raise InputError(
            f"model {sizes.name!a} of hidden {sizes.hidden} and {sizes.num_experts} experts is no "
            "DeepSeek-V2, V2-Lite or V3"
        )
    query_rank, per_token, width, shared = known[sizes.hidden]
    attention = LatentAttention(
        num_heads=sizes.heads,
        query_rank=query_rank,
        kv_rank=512,
        nope_head_dim=128,
        rope_head_dim=64,
        value_head_dim=128,
    )
    dense = _rms_layer(attention, Mlp(ffn_hidden_size=sizes.ffn_hidden, gated=True))
    experts = Experts(
        num_experts=sizes.num_experts,
        experts_per_token=per_token,
        expert_ffn_hidden_size=width,
        shared_ffn_hidden_size=shared,
    )
    first = 3 if sizes.hidden == 7168 and sizes.layers == 61 else 1
    if sizes.layers == first:
        return _of_layers(sizes, ((first, dense),))
    return _of_layers(sizes, ((first, dense), (sizes.layers - first, replace(dense, mlp=experts))))


def _rms_layer(attention: Attention | LatentAttention, mlp: Mlp | Experts) -> TransformerLayer:
    return TransformerLayer(attention=attention, mlp=mlp, norm=Norm.RMS_NORM)


def _of_layers(sizes: _Sizes, runs: tuple[tuple[int, TransformerLayer], ...]) -> ModelSpec:
    return ModelSpec(
        name=sizes.name,
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocab,
        max_sequence_length=sizes.seq,
        layer_runs=tuple(LayerRun(count=count, layer=layer) for count, layer in runs),
        final_norm=Norm.RMS_NORM,
    )


_FAMILIES: tuple[tuple[tuple[str, ...], Callable[[_Sizes], ModelSpec]], ...] = (
    (("deepseek",), _deepseek),
    (("mixtral",), _mixtral),
    (("qwen",), _qwen),
    # Sailor's runs of OPT: layers of GPT, of hidden size throughout.
    (("opt",), partial(_plain_model, architecture=Architecture.GPT)),
    # Megatron-LM's GPT shares the embedding's matrix with the head (arXiv 1909.08053, section 3).
    (
        ("gpt", "megatron", "bloom", "mt-nlg"),
        partial(_plain_model, architecture=Architecture.GPT, tied=True),
    ),
    (
        ("llama", "mistral", "yi-", "baichuan"),
        partial(_plain_model, architecture=Architecture.LLAMA),
    ),
)
"""Beginnings of model names, in lower case."""
