"""Which outputs of other tools hetplan reads: the table of importers, and the verb `import_file`.

An importer is one module of this room with two functions: `detect(text)`, whether a text comes from
its tool, and `parse(text, context)`, its records. To add one: write the module, add its line to
`IMPORTERS`, and put an output into tests/golden/importers/<kind>/ (docs/extending.md).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType

from hetplan.errors import Fault, InputError, printable
from hetplan.files.reading import read_bytes, text_of
from hetplan.files.settings import given_path
from hetplan.importers.records import ImportContext, Imported

_MAX_NAME_LENGTH = 100  # of a name in a cluster file
_PARQUET = b"PAR1"
_HEAD = 1 << 16  # characters; every tool names itself at the beginning


class Gives(StrEnum):
    """What an importer's records are for."""

    SAMPLES = "samples"
    """Measured times of links and operators, for the profile store."""
    LINKS = "links"
    """Bandwidth and latency of a path, for a link of a cluster file."""
    TOPOLOGY = "topology"
    """The parts of a node, for a cluster file."""
    HOSTS = "hosts"
    """The nodes of a cluster, for a cluster file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """One kind of output; its module is called like the kind, with underscores."""

    kind: str
    gives: Gives
    title: str
    """What it reads, in one line."""

    @property
    def module(self) -> ModuleType:
        """The module with `detect` and `parse`, imported when it is first used."""
        return import_module(f"hetplan.importers.{self.kind.replace('-', '_')}")

    def detects(self, text: str) -> bool:
        """Whether the text comes from this tool."""
        return bool(self.module.detect(text))

    def parse(self, text: str, context: ImportContext) -> Imported:
        """The text's records, with texts that a terminal can show."""
        return _printable(self.module.parse(text, context))


IMPORTERS = (
    Importer(kind="rocm-topo", gives=Gives.TOPOLOGY, title="rocm-smi --showtopo --json"),
    Importer(kind="iperf3", gives=Gives.LINKS, title="iperf3 -J"),
    Importer(kind="npu-topo", gives=Gives.TOPOLOGY, title="npu-smi info -t topo"),
    Importer(kind="nvidia-topo", gives=Gives.TOPOLOGY, title="nvidia-smi topo -m"),
    Importer(
        kind="aiconfigurator",
        gives=Gives.SAMPLES,
        title="AIConfigurator's gemm_perf.txt and nccl_perf.txt",
    ),
    Importer(kind="rccl-tests", gives=Gives.SAMPLES, title="rccl-tests, printed or JSON"),
    Importer(kind="nccl-tests", gives=Gives.SAMPLES, title="nccl-tests, printed or JSON"),
    Importer(
        kind="perftest",
        gives=Gives.LINKS,
        title="perftest (ib_write_bw, ib_read_lat, ...), printed",
    ),
    Importer(kind="hostfile", gives=Gives.HOSTS, title="hostfile of MPI, DeepSpeed, FlagScale"),
    Importer(kind="slurm-nodes", gives=Gives.HOSTS, title="Slurm node list: node[001-016,020]"),
)
"""Every importer; the first that detects its tool reads a text, so specific ones come first."""


def importer_called(kind: str) -> Importer:
    """The importer of this kind; an InputError names the nearest, or all."""
    kinds = {each.kind: each for each in IMPORTERS}
    if kind in kinds:
        return kinds[kind]
    near = get_close_matches(kind, kinds, n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(kinds)}"
    raise InputError(f"unknown kind {kind[:60]!a}; {hint}")


def importer_of(text: str) -> Importer | None:
    """The importer whose tool wrote this text; None where no importer knows it."""
    head = text[:_HEAD]
    return next((each for each in IMPORTERS if each.detects(head)), None)


def import_file(
    kind: str | None, path: str | Path, *, link: str | None = None, device: str | None = None
) -> Imported:
    """What the file says, in hetplan's records and base units; nothing is stored.

    `kind` is a kind of `IMPORTERS`; None: it is detected. `link` names link samples; left out, the
    file's name does, which a note says. `device` is the kind that was measured, where the file does
    not say it. Raises InputError with every fault and its line.
    """
    text = output_text(str(path), read_bytes(given_path(path, "path")))
    return import_text(
        text, str(path), kind=kind, said=ImportContext(file="", link=link, device=device)
    )


def output_text(file: str, data: bytes) -> str:
    """The output as text; a parquet table as CSV."""
    if not data.startswith(_PARQUET):
        return text_of(file, data)
    import pandas

    try:
        return pandas.read_parquet(io.BytesIO(data)).to_csv(index=False)
    except ImportError as error:
        message = "is parquet, which pyarrow reads: `pip install pyarrow`, or save it as CSV"
        raise InputError(Fault(file=file, message=message)) from error
    except (ValueError, OSError) as error:
        message = "begins as parquet and cannot be read as such: fetch it again"
        raise InputError(Fault(file=file, message=message)) from error


def import_text(
    text: str,
    file: str,
    *,
    kind: str | None = None,
    link: str | None = None,
    said: ImportContext | None = None,
    gives: Iterable[Gives] = tuple(Gives),
) -> Imported:
    """As `import_file` of a text; `gives` limits the importers that may be detected.

    `said` has what else the user says; its file does not count.
    """
    allowed = [each for each in IMPORTERS if each.gives in set(gives)]
    likely = importer_of(text)
    if kind is not None:
        importer = importer_called(kind)
        if importer not in allowed:
            raise InputError(_wrong_command(file, importer, allowed))
    elif likely is None:
        # Plain lists of hosts have no words of their own.
        importer = next((each for each in allowed if each.kind == "slurm-nodes"), None) or _unknown(
            file, allowed
        )
    elif likely not in allowed:
        raise InputError(_wrong_command(file, likely, allowed))
    else:
        importer = likely
    if link is not None and not link.isprintable():
        raise InputError(Fault(field="--link", message=f"{link[:60]!a} cannot be printed"))
    said = said or ImportContext(file=file)
    link = link or said.link
    context = replace(said, file=file, link=link or _link_name(file))
    try:
        imported = importer.parse(text, context)
    except InputError as error:
        if kind is None or likely is None or likely is importer:
            raise
        message = f"this looks like {likely.kind}; leave --kind out"
        raise InputError(Fault(file=file, message=message), *error.faults) from error
    if link is not None or not imported.links:
        return imported
    note = f"the samples' link is named {context.link} after the file; --link gives another name"
    return replace(imported, notes=(*imported.notes, note))


def _unknown(file: str, allowed: Sequence[Importer]) -> Importer:
    kinds = ", ".join(each.kind for each in allowed)
    message = f"no tool is recognised in it; if it is one of {kinds}, name it with --kind"
    raise InputError(Fault(file=file, message=message))


def _wrong_command(file: str, importer: Importer, allowed: Sequence[Importer]) -> Fault:
    kinds = ", ".join(each.kind for each in allowed)
    command = Gives.TOPOLOGY if importer.gives is Gives.HOSTS else importer.gives
    message = (
        f"this is {importer.kind}, which `hetplan import {command}` reads; one of {kinds} is "
        "expected here"
    )
    return Fault(file=file, message=message)


def _link_name(file: str) -> str:
    """The file's name as a link's: a word that can stand in a cluster file."""
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(file).stem, flags=re.ASCII).lstrip("._-")
    return word[:_MAX_NAME_LENGTH] or "link"


def _printable(imported: Imported) -> Imported:
    """The same, without control characters, which a terminal would obey."""
    return replace(
        imported,
        tool_version=printable(imported.tool_version),
        device_name=printable(imported.device_name),
        notes=tuple(map(printable, imported.notes)),
        skipped=tuple(map(printable, imported.skipped)),
    )
