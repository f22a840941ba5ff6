"""Which profile stores are here, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetplan.errors import HetplanError
from hetplan.files.shipped import shipped_folder
from hetplan.machine.values import MachineStore
from hetplan.profiling.store import read_populations


def find_stores(folders: Sequence[Path], problems: list[str]) -> tuple[MachineStore, ...]:
    """What each folder holds; one that cannot be read is a problem, not an error."""
    found = []
    for folder in folders:
        place = _place(folder)
        try:
            populations = read_populations(folder) if folder.is_dir() else ()
        except (HetplanError, OSError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            problems.append(f"{place}: cannot be read: {first.replace(str(folder), place)}")
            continue
        links = {sample.link for each in populations for sample in each.links}
        kinds = {
            provenance.device
            for each in populations
            if each.layers or each.operators
            for provenance in each.provenance
        }
        found.append(
            MachineStore(
                place=place,
                kinds=tuple(sorted(kinds)),
                links=tuple(sorted(links)),
                samples=sum(
                    len(each.layers) + len(each.operators) + len(each.links) for each in populations
                ),
            )
        )
    return tuple(found)


def _place(folder: Path) -> str:
    """The folder with `~` for the home folder, whose name may be its owner's."""
    if folder == shipped_folder("profiles"):
        return "shipped with hetplan"
    try:
        return f"~/{folder.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(folder)
