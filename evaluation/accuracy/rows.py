"""Which training steps did somebody measure, and with what configuration?

Rows of `runs/*.csv` in a folder of reference data. A file may have more columns than are read here,
or lack some; a cell may be empty, `n/a` or not a number. Nothing of that ends the reading: a row
keeps what is wrong with it, and whoever predicts it says so (`evaluation.accuracy.models`
and its neighbours ask for the fields that they need).

A row is suspect where its source says so (`SUSPECT` in `other`), or where it is one of those whose
step time nothing in their configuration explains (`SLOW_ROWS`): 8 to 98 % above rows beside them.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hetplan.errors import Fault
from hetplan.job.spec import ProductFormat

RUNS_FOLDER = "runs"
SUSPECT_MARK = "SUSPECT"

_WHOLE = (
    "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "seq", "num_experts", "gpus",
    "gpus_per_node", "tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "global_batch",
)  # fmt: skip
_TEXTS = (
    "source", "source_ref", "model", "gpu", "intra_bw_note", "inter_bw_note", "dtype", "recompute",
    "other", "step_time_kind",
)  # fmt: skip
_FLAGS = ("seq_parallel", "dist_opt")
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
    dist_opt: bool | None = None
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
    def said(self) -> dict[str, str]:
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

    @property
    def configuration_hash(self) -> str:
        """sha256 of everything but the results, so equal in any order of rows and files."""
        left_out = {"file", "line", "step_seconds", "peak_memory_gib", "faults", "source_ref"}
        parts = [
            f"{each.name}={getattr(self, each.name)}"
            for each in fields(self)
            if each.name not in left_out
        ]
        return hashlib.sha256(";".join(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """All rows of a folder's runs."""

    rows: tuple[RunRow, ...]
    faults: tuple[Fault, ...]
    """Files that could not be read at all, and cells that hold no number."""


def csv_files(folder: Path) -> tuple[Path, ...]:
    """Files of a folder that end in .csv, in any case, by name; none where there is no folder."""
    if not folder.is_dir():
        return ()
    return tuple(sorted(each for each in folder.iterdir() if each.suffix.lower() == ".csv"))


def read_runs(folder: Path) -> RunFiles:
    """Every row of the tables in `folder/runs`, and of those in `folder` itself; files by name.

    Bytes that are no UTF-8 become a mark in the text that they stand in.
    """
    rows: list[RunRow] = []
    faults: list[Fault] = []
    for path in (*csv_files(folder / RUNS_FOLDER), *csv_files(folder)):
        try:
            with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
                table = csv.DictReader(file)
                names = table.fieldnames or ()
                found = [(table.line_num, row) for row in table]
        except (OSError, csv.Error) as fault:
            faults.append(Fault(file=path.name, message=f"cannot be read: {fault}"))
            continue
        if "step_time_s" not in names:
            if path.parent == folder:
                continue  # a table of another kind, which the reader of unit data names
            message = "has no column step_time_s; it is no table of runs"
            faults.append(Fault(file=path.name, message=message))
            continue
        for line, cells in found:
            row = run_row(path.name, line, cells)
            rows.append(row)
            faults += [Fault(file=path.name, line=line, message=each) for each in row.faults]
    return RunFiles(rows=tuple(rows), faults=tuple(faults))


def run_row(file: str, line: int, cells: Mapping[str, str]) -> RunRow:
    """One line of a table, by the names of its columns."""
    faults: list[str] = []

    def text(name: str) -> str:
        return (cells.get(name) or "").strip()

    def whole(name: str) -> int | None:
        found = text(name)
        if found.lower() in _NOTHING:
            return None
        try:
            number = float(found)
        except ValueError:
            faults.append(f"{name} is {found!a}, not a whole number")
            return None
        if number != number // 1 or not 0 <= number <= _MAX_WHOLE:
            faults.append(f"{name} is {found!a}, not a whole number")
            return None
        return int(number)

    def positive(name: str) -> float | None:
        found = text(name)
        if found.lower() in _NOTHING:
            return None
        try:
            number = float(found)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            faults.append(f"{name} is {found!a}, not a number above 0")
            return None
        return number

    def flag(name: str) -> bool | None:
        found = text(name).lower()
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if found and found not in known and found not in _NOTHING:
            faults.append(f"{name} is {found!a}; it is 0, 1 or empty")
        return known.get(found)

    values: dict[str, Any] = {name: text(name) for name in _TEXTS}
    values |= {name: whole(name) for name in _WHOLE}
    values |= {name: flag(name) for name in _FLAGS}
    values |= {"step_seconds": positive("step_time_s"), "peak_memory_gib": positive("peak_mem_gib")}
    return RunRow(file=file, line=line, faults=tuple(faults), **values)
