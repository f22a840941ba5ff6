"""Where measurements are kept: a folder per device kind and link, a population per circumstances.

    <store>/<device kind>/<population>/layers.csv + provenance.json
    <store>/links/<link name>/<population>/links.csv + provenance.json

A **population** is everything measured under the same circumstances: device, driver, torch,
threads and pace. Its folder is named by a hash of those, so a second run with the same ones adds
to it (and skips what it has) and a run with others starts another. Rows are written one at a time
and reach the disk one at a time; a kill at any moment leaves a store that can be read.

`read_populations` returns one ProfileSet per population, each with exactly one provenance: so
every sample can be traced, and whoever fits chooses among several populations of one kind.
`read_store` returns all of them together. Where a kind or a link has several populations nothing
is preferred here: choosing (the newest by `measured_on`, say) is the fit's business.
Any folder may be named: a whole store, one device's folder or one population.

File of provenance: schema `hetplan.provenance/2`, fields as in `Provenance`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from itertools import chain
from pathlib import Path

from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import append_line, write_atomically
from hetplan.profiling.samples import LayerSample, LinkSample, ProfileSet, Provenance
from hetplan.profiling.samples_csv import header, read_samples, row

SCHEMA = "hetplan.provenance/2"
PROVENANCE_FILE = "provenance.json"
LAYERS_FILE = "layers.csv"
LINKS_FILE = "links.csv"
LINKS_FOLDER = "links"

_LOGGER = logging.getLogger(__name__)


def read_store(*folders: Path) -> ProfileSet:
    """Every sample and provenance under these folders."""
    populations = read_populations(*folders)
    return ProfileSet(
        layers=tuple(chain.from_iterable(population.layers for population in populations)),
        links=tuple(chain.from_iterable(population.links for population in populations)),
        provenance=tuple(chain.from_iterable(each.provenance for each in populations)),
    )


def read_populations(*folders: Path) -> tuple[ProfileSet, ...]:
    """One ProfileSet per population under these folders, in the order of folders and paths."""
    found: dict[Path, ProfileSet] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: there is no such folder; name a profile store")
        for path in sorted(folder.rglob(PROVENANCE_FILE)):
            found.setdefault(path.parent.resolve(), read_population(path.parent))
        # Provenance is written first, so samples without it are not a kill's doing.
        for name in (LAYERS_FILE, LINKS_FILE):
            for path in sorted(folder.rglob(name)):
                if not (path.parent / PROVENANCE_FILE).exists():
                    raise InputError(
                        f"{path}: there is no {PROVENANCE_FILE} beside it; restore it, or remove "
                        "samples of which nobody knows where they were measured"
                    )
    return tuple(found.values())


def read_population(folder: Path) -> ProfileSet:
    """The samples of one population's folder."""
    provenance = decode(read_document(folder / PROVENANCE_FILE), Provenance, schema=SCHEMA)
    layers, links = folder / LAYERS_FILE, folder / LINKS_FILE
    return ProfileSet(
        layers=read_samples(layers, LayerSample) if layers.exists() else (),
        links=read_samples(links, LinkSample) if links.exists() else (),
        provenance=(provenance,),
    )


def population_name(provenance: Provenance) -> str:
    """Name of the folder of everything measured on this device under these circumstances."""
    common = (provenance.device, *provenance.circumstances)
    digest = hashlib.sha256("\0".join(common).encode()).hexdigest()
    # 48 bits: populations of one device number a few dozen.
    return f"{provenance.backend}-{digest[:12]}"


class LayerWriter:
    """Adds layer samples to their population, one row on disk at a time."""

    def __init__(self, store: Path, provenance: Provenance) -> None:
        _check_name("device kind", provenance.device)
        self.folder = store / provenance.device / population_name(provenance)
        self._path = _open_population(self.folder, provenance, LAYERS_FILE, header(LayerSample))
        self.samples = read_samples(self._path, LayerSample)
        """What the population held when it was opened."""

    def append(self, sample: LayerSample) -> None:
        """Add a row; it is on disk when this returns."""
        append_line(self._path, row(sample))


class LinkWriter:
    """Adds link samples to their population, one row on disk at a time."""

    def __init__(self, store: Path, link: str, provenance: Provenance) -> None:
        _check_name("link", link)
        self.folder = store / LINKS_FOLDER / link / population_name(provenance)
        self._path = _open_population(self.folder, provenance, LINKS_FILE, header(LinkSample))
        self.samples = read_samples(self._path, LinkSample)
        """What the population held when it was opened."""

    def append(self, sample: LinkSample) -> None:
        """Add a row; it is on disk when this returns."""
        append_line(self._path, row(sample))


def _check_name(what: str, name: str) -> None:
    """A name becomes a folder: it must not lead out of the store or into another part of it."""
    if not name or name != Path(name).name or name.startswith(".") or "\n" in name:
        raise InputError(f"{what} is {name!r}; it names a folder, so it needs a plain word")
    if what == "device kind" and name == LINKS_FOLDER:
        raise InputError(f"{what} is {name!r}; the store keeps links under that name")


def _open_population(folder: Path, provenance: Provenance, name: str, first_line: str) -> Path:
    """Path of the samples file, ready for rows: provenance and header written, torn end cut off."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be made ({error.strerror}); name a store you may write to"
        ) from error
    if not (folder / PROVENANCE_FILE).exists():
        write_atomically(folder / PROVENANCE_FILE, encode(provenance, schema=SCHEMA))
    path = folder / name
    if path.exists():
        _cut_torn_line(path)
    else:
        write_atomically(path, first_line + "\n")
    return path


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        _LOGGER.warning("%s: a torn last line was cut off: %r", path, data[whole:][:60])
        with path.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())
