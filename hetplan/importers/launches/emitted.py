"""A folder that hetplan emitted, or one like it: its script, its list of agents, its hostfile."""

from __future__ import annotations

from pathlib import Path

from hetplan.files.reading import read_document, read_text
from hetplan.importers.launches.values import LaunchHost, Setting
from hetplan.importers.lines import fault_at, shown, text_lines, whole_number

SCRIPT = "start-here.sh"
AGENTS = "agents.tsv"
_VARIABLES = "agents-environment.tsv"
_NOT_OF_THE_PLAN = (
    "\n# ---------------------------------------------------------------- what follows is"
)
"""Begin of the line of an emitted script after which every plan's is the same."""
MANIFEST = "hetplan-emitted.json"
EXPERIMENT = "flagscale.yaml"
_NEEDED = ("host", "local devices")
_MAX_DEVICES = 4096


def emitted_target(folder: Path) -> str | None:
    """The target in the folder's manifest; None where there is none."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return None
    return read_document(manifest).word(("target",))


def agents_of(path: Path) -> tuple[LaunchHost, ...]:
    """A host for each agent, in the order of node ranks; an InputError where the file is broken."""
    lines = text_lines(read_text(path))
    names = [name.strip().lower().replace("_", " ") for name in lines[0].text.split("\t")]
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        message = f"its first line has no column {missing[0]!a}; columns are separated by tabs"
        raise fault_at(str(path), 1, message)
    found: list[LaunchHost] = []
    for line in lines[1:]:
        if not line.text.strip() or line.text.startswith("#"):
            continue
        cells = line.text.split("\t")
        if len(cells) != len(names):
            message = f"{len(cells)} columns; the first line has {len(names)}"
            raise fault_at(str(path), line.number, message)
        row = dict(zip(names, (cell.strip() for cell in cells), strict=True))
        local = tuple(
            _device(str(path), line.number, each) for each in row["local devices"].split(",")
        )
        if not row["host"] or len(local) > _MAX_DEVICES:
            raise fault_at(str(path), line.number, f"{len(local)} devices of {shown(row['host'])}")
        found.append(
            LaunchHost(
                name=row["host"],
                devices=len(local),
                type=row.get("type", ""),
                local_devices=local,
                file=str(path),
                line=line.number,
            )
        )
    if not found:
        raise fault_at(str(path), 0, "names no agent")
    return tuple(found)


def plan_part(text: str) -> str:
    """What of an emitted script is the plan's: settings and lists, without what starts them."""
    return text.partition(_NOT_OF_THE_PLAN)[0] + "\n"


def variables_of(folder: Path, hosts: tuple[LaunchHost, ...]) -> tuple[Setting, ...]:
    """Variables of single agents, each named HOST.NAME; none where the folder has no such table.

    Rows are `node rank, NAME=VALUE`; the node rank is a place among the hosts.
    """
    path = folder / _VARIABLES
    if not path.is_file():
        return ()
    found: list[Setting] = []
    for line in text_lines(read_text(path))[1:]:
        rank, _, text = line.text.partition("\t")
        name, equals, value = text.partition("=")
        at = whole_number(rank.strip())
        if at is None or not 0 <= at < len(hosts) or not equals:
            continue  # start-here.sh passes over rows of no agent, too
        name = f"{hosts[at].name}.{name}"
        found.append(Setting(name=name, values=(value,), file=str(path), line=line.number))
    return tuple(found)


def _device(file: str, line: int, text: str) -> int:
    number = whole_number(text.strip())
    if number is None or not 0 <= number < _MAX_DEVICES:
        raise fault_at(file, line, f"found {shown(text)}; a device number is expected here")
    return number
