"""What Slurm says about a job's nodes to hosts.

    node[001-016,020],gpu[1-4]-ib              a node list; rack[1-2]n[1-4] has 8 hosts
    node[1-2] 8(x2)                            with tasks per node
    SLURM_JOB_NODELIST=node[1-3]               `env | grep SLURM` of a job
    SLURM_TASKS_PER_NODE=4(x2),2
    SLURM_GPUS_ON_NODE=8
    node1                                      one per line: `scontrol show hostnames`

Devices per node come from the GPU variables where there are any, else from the tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, product, repeat

from hetplan.importers.hostfile import MAX_SLOTS, is_host_name
from hetplan.importers.lines import fault_at, shown, text_lines, whole_number
from hetplan.importers.records import Host, ImportContext, Imported

MAX_HOSTS = 1 << 21
"""No machine has two million nodes: a list that stands for more is a slip of the pen."""

# A step may use a part of the job: SLURM_STEP_* variables are not the job's.
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_TASKS_PER_NODE",)
_DEVICES = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
# `env | grep SLURM` also shows SLURMD_NODENAME, module files' own variables and paths.
_VARIABLE = re.compile(r"(?:export |declare -x )?([A-Z_][A-Z0-9_]{1,90})=(.*)", re.ASCII)
_SIGN = re.compile(r"^[ \t]*(?:[\w.-]{0,253}\[[\d,-]+\]|SLURM_\w+=)", re.MULTILINE)
_HEADINGS = ("NODELIST", "HOSTNAMES")  # that sinfo and squeue print above their lists
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,7})(?:\(x(\d{1,7})\))?", re.ASCII)


@dataclass(slots=True)
class _JobFacts:
    """What the input says of the job."""

    names: list[str] = field(default_factory=list)
    first_line: int = 0
    variable: str = ""
    tasks: list[int] = field(default_factory=list)
    tasks_line: int = 0
    devices: int | None = None
    device: str | None = None
    nodes: dict[int, int] = field(default_factory=dict)
    """Line of a variable that says how many nodes there are: how many."""


def detect(text: str) -> bool:
    """Whether the text has a range of nodes or a variable of Slurm."""
    return _SIGN.search(text) is not None


def parse(text: str, context: ImportContext) -> Imported:
    """One Host per node, in the order of the list.

    Raises InputError for a list that is none or stands for more than 2**21 hosts, and where
    counts and hosts do not go together.
    """
    facts = _JobFacts()
    for line in text_lines(text):
        content = line.text.strip()
        if content and not content.startswith("#"):
            _read(content, line.number, facts, context.file)
    if not facts.names:
        raise fault_at(context.file, 0, "names no node; write a list such as node[001-016]")
    notes: list[str] = []
    names = _unique(facts, notes, context.file)
    for line_number, count in facts.nodes.items():
        if count != len(names):
            message = f"there are {count} nodes by this line, the list has {len(names)}"
            raise fault_at(context.file, line_number, message)
    slots = _slots(facts, len(names), notes, context.file)
    return Imported(
        kind="slurm-nodes",
        hosts=tuple(
            Host(name=name, slots=count, device=facts.device)
            for name, count in zip(names, slots, strict=True)
        ),
        notes=tuple(notes),
    )


def _read(content: str, line: int, facts: _JobFacts, file: str) -> None:
    variable = _VARIABLE.fullmatch(content)
    if variable:
        _variable(variable.group(1), variable.group(2).strip("\"'; "), line, facts, file)
        return
    words = content.split()
    if words[0] in _HEADINGS and len(words) == 1:
        return
    if len(words) > 2:
        message = f"found {shown(content)}; a node list and, at most, its tasks per node"
        raise fault_at(file, line, message)
    _add_names(words[0], line, facts, file)
    if len(words) == 2:
        room = len(facts.names) - len(facts.tasks)
        facts.tasks += _counts(words[1], line, room, file)
        facts.tasks_line = line


def _variable(name: str, value: str, line: int, facts: _JobFacts, file: str) -> None:
    if name in _LISTS:
        if facts.variable:
            # Slurm sets the same list under its old and its new name.
            again = _JobFacts()
            _add_names(value, line, again, file)
            if again.names != facts.names:
                raise fault_at(file, line, f"{name} is not the list of {facts.variable}; keep one")
            return
        _add_names(value, line, facts, file)
        facts.variable = name
    elif name in _TASKS:
        facts.tasks = _counts(value, line, MAX_HOSTS, file)
        facts.tasks_line = line
    elif name in _DEVICES:
        kind, _, number = value.rpartition(":")
        count = whole_number(number)
        if count is None or not 1 <= count <= MAX_SLOTS or (kind and not is_host_name(kind)):
            raise fault_at(file, line, f"found {shown(value)}; a number of devices", name)
        if facts.devices is not None and facts.devices != count:
            raise fault_at(file, line, f"{name} is {count}, another line says {facts.devices}")
        facts.devices, facts.device = count, kind or facts.device
    elif name in _NODES:
        count = whole_number(value)
        if count is None or count < 1:
            raise fault_at(file, line, f"found {shown(value)}; a number of nodes", name)
        facts.nodes[line] = count


def _add_names(text: str, line: int, facts: _JobFacts, file: str) -> None:
    facts.first_line = facts.first_line or line
    for part in _parts(text, line, file):
        pieces = _pieces(part, line, file)
        count = 1
        for piece in pieces:
            # The product of many brackets has thousands of digits.
            count = min(count * sum(each.count for each in piece), 10**18)
        if count + len(facts.names) > MAX_HOSTS:
            found = count if count < 10**18 else "10**18 or more"
            message = f"{shown(part)} stands for {found} hosts; {MAX_HOSTS} are read at most"
            raise fault_at(file, line, message)
        first = len(facts.names)
        alternatives = [chain.from_iterable(each.words() for each in piece) for piece in pieces]
        facts.names += ("".join(words) for words in product(*alternatives))
        if not all(is_host_name(name) for name in (facts.names[first], facts.names[-1])):
            raise fault_at(file, line, f"found {shown(part)}; a node name is expected here")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One alternative of a part of a name: a word, or a range of numbers."""

    text: str
    """The word, or the first number as it is written."""
    numbers: range | None = None

    @property
    def count(self) -> int:
        return 1 if self.numbers is None else self.numbers.stop - self.numbers.start

    def words(self) -> Iterator[str]:
        if self.numbers is None:
            return iter((self.text,))
        # A leading zero says how wide every number of the range is.
        width = len(self.text) if self.text.startswith("0") else 0
        return (str(number).zfill(width) for number in self.numbers)


def _parts(text: str, line: int, file: str) -> Iterator[str]:
    """The list split at the commas that stand outside brackets."""
    depth = start = 0
    for at, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            message = f"found {shown(text[: at + 1][-40:])}; brackets do not nest, and open first"
            raise fault_at(file, line, message)
        if character == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if depth:
        raise fault_at(file, line, f"found {shown(text[start:])}; a bracket is not closed")
    yield text[start:]


def _pieces(part: str, line: int, file: str) -> list[list[_Part]]:
    """`n[1-2,4]-ib` as the pieces `n`, 1 to 2 or 4, `-ib`."""
    pieces: list[list[_Part]] = []
    rest = part
    while rest:
        plain, opened, after = rest.partition("[")
        if plain:
            pieces.append([_Part(text=plain)])
        if not opened:
            break
        inside, _, rest = after.partition("]")
        pieces.append([_range(each, line, file) for each in inside.split(",")])
    if not pieces:
        raise fault_at(file, line, "an empty name between two commas, or at an end of the list")
    return pieces


def _range(text: str, line: int, file: str) -> _Part:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise fault_at(file, line, f"found {shown(text)} in brackets; a range is 1-4 or 001-016")
    first = int(found.group(1))
    last = int(found.group(2) or first)
    if last < first:
        raise fault_at(file, line, f"the range {text} ends before it begins")
    return _Part(text=found.group(1), numbers=range(first, last + 1))


def _counts(text: str, line: int, room: int, file: str) -> list[int]:
    """`2(x3),1` as 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if found is None or not 1 <= int(found.group(1)) <= MAX_SLOTS:
            raise fault_at(file, line, f"found {shown(part)}; counts are written as in 2(x3),1")
        times = int(found.group(2) or 1)
        if times < 1 or times + len(counts) > room:
            message = f"found {shown(text)}; these are more counts than nodes"
            raise fault_at(file, line, message)
        counts += repeat(int(found.group(1)), times)
    return counts


def _unique(facts: _JobFacts, notes: list[str], file: str) -> list[str]:
    names = list(dict.fromkeys(facts.names))
    if len(names) < len(facts.names):
        twice = len(facts.names) - len(names)
        if facts.tasks:
            message = f"{twice} nodes are in the list twice; then tasks per node are ambiguous"
            raise fault_at(file, facts.first_line, message)
        notes.append(f"{twice} nodes are in the list more than once and are taken once")
    return names


def _slots(facts: _JobFacts, count: int, notes: list[str], file: str) -> list[int | None]:
    if facts.tasks and len(facts.tasks) != count:
        message = f"there are {len(facts.tasks)} counts for {count} nodes"
        raise fault_at(file, facts.tasks_line, message)
    if facts.devices is None:
        return list(chain(facts.tasks, repeat(None, count - len(facts.tasks))))
    notes.append("devices per node are those of the node that printed them, taken for all")
    if any(tasks != facts.devices for tasks in facts.tasks):
        notes.append("tasks per node differ from the devices; slots are the devices")
    return [facts.devices] * count
