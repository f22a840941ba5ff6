"""What the readers of unit data share: labels of devices, notes on unused rows, populations.

Nothing is invented: a row that its source or the folder's README marks as wrong is not used and is
counted in the notes under its reason. A file that is not there is a note, a file that is damaged an
error: so any other folder in the same forms can be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas

from hetplan.errors import Fault, InputError
from hetplan.profiling.samples import (
    LayerSample,
    LinkSample,
    OperatorSample,
    ProfileSet,
    Provenance,
)
from hetplan.version import __version__

KINDS = (
    # vTrain's tables say A100; its runs and paper name 80 GB cards (runs/vtrain_multi_node.csv).
    ("A100", "nvidia-a100-80gb-sxm"),
    ("A100-40", "nvidia-a100-40gb-sxm"),
    ("A100-80", "nvidia-a100-80gb-sxm"),
    ("a100_pcie", "nvidia-a100-80gb-pcie"),  # SimuMax configs/system/a100_pcie.json: mem_gbs 80
    ("b200_bf16_ceperm", "nvidia-b200-180gb-sxm"),
    ("B200", "nvidia-b200-180gb-sxm"),
    ("B200-SXM", "nvidia-b200-180gb-sxm"),
    ("GH-96", "nvidia-gh200-96gb"),
    ("RTX-2080", "nvidia-rtx-2080-ti-11gb"),  # Sailor's name; products above a 2080's peak
    ("RTX-3090", "nvidia-rtx-3090-24gb"),
    ("Titan-RTX", "nvidia-titan-rtx-24gb"),
    ("V100-16", "nvidia-v100-16gb-sxm"),
    ("A100-80GB-SXM", "nvidia-a100-80gb-sxm"),
    ("H100", "nvidia-h100-80gb-sxm"),
    ("H100-96GB-HBM2e-500W", "nvidia-h100-96gb-hbm2e"),
    ("MI300X", "amd-mi300x"),
    ("MI325X", "amd-mi325x"),
    ("MI355X", "amd-mi355x"),
)
"""Labels of the tables and the catalogue's kinds that they mean."""


MICROSECOND = 1e-6
Row = Any
"""A row of a table, by the names of its columns."""


@dataclass(slots=True)
class Notes:
    """What a reader says beside its samples."""

    unused: Counter[str] = field(default_factory=Counter)
    """Rows per reason."""
    words: dict[str, None] = field(default_factory=dict)

    def kind(self, label: str) -> str:
        """The catalogue's kind; the label itself, with a note, where the catalogue has none."""
        found = dict(KINDS).get(label)
        if found is None:
            self.words[f"{label} is no kind of the catalogue: its samples keep that name"] = None
        return found or label

    def lines(self) -> tuple[str, ...]:
        """One line per reason and per word of warning."""
        counted = (
            f"{count} row{'s' if count != 1 else ''} not used: {reason}"
            for reason, count in self.unused.items()
        )
        return (*counted, *self.words)


def read_rows(
    path: Path,
    notes: Notes,
    *,
    words: Sequence[str],
    needed: Sequence[str] = (),
    others: Sequence[str] = (),
) -> pandas.DataFrame:
    """The table's rows with every `needed` number; empty, with a note, where there is no such file.

    `words`: columns of text. `others`: numbers that a row may lack. An InputError with
    file and line where the file is another table or cells of it are wrong.
    """
    if not path.exists():
        notes.words[f"{path.parent.name}/{path.name} is not there: nothing read from it"] = None
        return pandas.DataFrame(columns=[*words, *needed, *others], dtype=str)
    try:
        texts = pandas.read_csv(path, dtype=str)
        table = texts[list(words)].fillna("")
        for name in (*needed, *others):
            table[name] = texts[name].map(float, na_action="ignore").astype(float)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise InputError(Fault(file=str(path), message=message)) from None
    except (
        KeyError,
        UnicodeDecodeError,
        pandas.errors.ParserError,
        pandas.errors.EmptyDataError,
    ):
        message = "the header is of no table of measurements that is known; restore the columns"
        raise InputError(Fault(file=str(path), line=1, message=message)) from None
    except ValueError:
        wrong = pandas.to_numeric(texts[name], errors="coerce").isna() & texts[name].notna()
        found = texts[name][wrong].iloc[0]
        message = f"found {found[:60]!a}; write a number"
        line = int(wrong.argmax()) + 2
        raise InputError(Fault(file=str(path), line=line, field=name, message=message)) from None
    whole = table[list(needed)].notna().all(axis=1)
    if not whole.all():
        notes.unused[f"{path.name}: no {' or no '.join(needed)}"] += int((~whole).sum())
    return table[whole]


def each_row(table: pandas.DataFrame) -> Iterator[Row]:
    """One after another."""
    yield from table.itertuples()


def population(
    device: str,
    label: str,
    *,
    tool: str,
    file: Path | str,
    words: str,
    layers: Sequence[LayerSample] = (),
    operators: Sequence[OperatorSample] = (),
    links: Sequence[LinkSample] = (),
) -> ProfileSet:
    """Samples of one table, and as much of their origin as it says: no date, driver or version."""
    origin = Provenance(
        device=device,
        device_name=label,
        backend="cuda",
        measured_on="",
        hetplan_version=__version__,
        torch_version="",
        driver="",
        threads=0,
        paced="",
        tool=tool,
        command=f"read from {file}",
        notes=words,
    )
    return ProfileSet(
        layers=tuple(layers),
        operators=tuple(operators),
        links=tuple(links),
        provenance=(origin,),
    )
