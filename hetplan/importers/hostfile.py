"""Hostfiles of MPI, DeepSpeed and FlagScale to hosts.

    node1 slots=8                    Open MPI, DeepSpeed
    node2 slots=16 max_slots=16      Open MPI
    node3 slots=8 type=A100          FlagScale
    node4:8                          MPICH
    [fe80::1]:8                      MPICH, by address
    node5                            all of them; twice: two slots, as in Open MPI

A word after `#` or `//` is a comment, and spaces around `=` are allowed. Where a host is on
several lines its slots add up, with a note. A host with max_slots and no slots has as
many slots, as in Open MPI (`hostfile.c` there).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from hetplan.importers.lines import fault_at, shown, text_lines, whole_number
from hetplan.importers.records import Host, ImportContext, Imported

MAX_SLOTS = 10**6
"""Processes of one host; no machine has as many devices."""
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)
# What is matched is never given back (`++`): blanks without end take one look each.
_SIGN = re.compile(
    r"^[ \t]*+[\w.@-]{1,253}+(?:[ \t]++(?:slots|max_slots)[ \t]*+=|:[ \t]*+\d++[ \t]*+$)",
    re.MULTILINE,
)
_SLOTS = ("slots", "count", "cpu", "cpus")  # Open MPI knows all four
_MAX_SLOTS = ("max_slots", "max-slots", "slots_max", "slots-max")
_EQUALS = re.compile(r"[ \t]{0,40}=[ \t]{0,40}")
_IGNORED = ("ifname", "binding", "port", "ssh_port", "username", "user_name", "user-name", "user")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    line: int
    name: str
    slots: int | None
    device: str | None


def detect(text: str) -> bool:
    """Whether a line gives slots to a host; a bare list of names could be anything."""
    return _SIGN.search(text) is not None


def is_host_name(text: str) -> bool:
    """Whether it is a name or an address that can stand for a host."""
    return bool(_HOST_NAME.fullmatch(text)) or _is_ipv6(text)


def _is_ipv6(text: str) -> bool:
    if ":" not in text or len(text) > 60 or not text.isascii():
        return False
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def parse(text: str, context: ImportContext) -> Imported:
    """One Host per name, in the order of their first lines.

    Raises InputError for a key that no hostfile knows, and for hosts and numbers that are none.
    """
    entries: dict[str, list[_Entry]] = {}
    ignored: dict[str, int] = {}
    for line in text_lines(text):
        words = _EQUALS.sub("=", line.text.partition("#")[0]).split()
        if words and not words[0].startswith("//"):
            entry = _entry(line.number, words, context.file, ignored)
            entries.setdefault(entry.name, []).append(entry)
    if not entries:
        raise fault_at(context.file, 0, "names no host; write a line such as `node1 slots=8`")
    notes = [_note(lines) for lines in entries.values() if len(lines) > 1]
    notes += [f"{key}= is ignored, first on line {at}" for key, at in ignored.items()]
    return Imported(
        kind="hostfile",
        hosts=tuple(_host(lines, context.file) for lines in entries.values()),
        notes=tuple(notes),
    )


def _entry(line: int, words: list[str], file: str, ignored: dict[str, int]) -> _Entry:
    name, slots = _name(line, words[0], file)
    most: int | None = None
    device: str | None = None
    seen: set[str] = set()
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise fault_at(file, line, f"found {shown(word)}; write key=value, as in slots=8")
        kind = "slots" if key in _SLOTS else "max_slots" if key in _MAX_SLOTS else key
        if kind in seen or (kind == "slots" and slots is not None):
            raise fault_at(file, line, f"{shown(key)} is given twice; keep one of the two")
        seen.add(kind)
        if kind == "slots":
            slots = _count(line, key, value, file)
        elif kind == "max_slots":
            most = _count(line, key, value, file)
        elif key == "type" and value.isascii() and value.isprintable() and 0 < len(value) <= 60:
            device = value
        elif key in _IGNORED:
            ignored.setdefault(key, line)
        else:
            known = ", ".join(("slots", "max_slots", "type", *_IGNORED))
            message = f"found {shown(word)}; a hostfile has {known}, each with a value"
            raise fault_at(file, line, message)
    if most is not None and most < (slots or 1):
        raise fault_at(file, line, f"max_slots is {most}, less than slots, {slots or 1}")
    return _Entry(line=line, name=name, slots=slots or most, device=device)


def _note(entries: list[_Entry]) -> str:
    lines = ", ".join(str(entry.line) for entry in entries[:10])
    return (
        f"{entries[0].name} is on lines {lines}: its slots add up; Open MPI, MPICH and DeepSpeed "
        "do not agree on such files"
    )


def _name(line: int, word: str, file: str) -> tuple[str, int | None]:
    """Host and slots of the first word: `node1`, `user@node1`, `node1:4` or an address."""
    if word.startswith("["):
        name, closed, rest = word[1:].partition("]")
        if closed and _is_ipv6(name) and (not rest or rest.startswith(":")):
            return name, _count(line, "slots", rest[1:], file) if rest else None
    elif word.count(":") >= 2:
        if _is_ipv6(word):
            return word, None
    else:
        # Open MPI lets a line say as whom to log in.
        name, colon, count = word.rpartition("@")[2].partition(":")
        if is_host_name(name):
            return name, _count(line, "slots", count, file) if colon else None
    raise fault_at(file, line, f"found {shown(word)}; a host name or an address is expected here")


def _count(line: int, key: str, value: str, file: str) -> int:
    number = whole_number(value)
    if number is None or not 1 <= number <= MAX_SLOTS:
        message = f"found {shown(value)}; a whole number from 1 to {MAX_SLOTS} is expected here"
        raise fault_at(file, line, message, key)
    return number


def _host(entries: list[_Entry], file: str) -> Host:
    name = entries[0].name
    devices = list(dict.fromkeys(entry.device for entry in entries if entry.device is not None))
    if len(devices) > 1:
        message = f"{name} has the types {' and '.join(devices)}; a host has one"
        raise fault_at(file, entries[-1].line, message)
    slots = entries[0].slots
    if len(entries) > 1:
        slots = sum(entry.slots or 1 for entry in entries)
    return Host(name=name, slots=slots, device=devices[0] if devices else None)
