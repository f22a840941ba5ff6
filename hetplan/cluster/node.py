"""What is inside a node (NIC, PCIe switch and NUMA node of each device), and how nodes are named.

A name is a word, or a range such as `node[001-016,020]` as launchers write it: one pair of
brackets per entry; the numbers of a range are as wide as its first one is written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hetplan.errors import Fault, InputError
from hetplan.files.quantities import Count, Positive, check_limits

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ENTRY = re.compile(
    r"(?P<before>[A-Za-z0-9][A-Za-z0-9._-]*)?"
    r"(?:\[(?P<ranges>[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)\](?P<after>[A-Za-z0-9._-]*))?",
    re.ASCII,
)
_MAX_DIGITS = 9

NODE_NAMES_PATTERN = (
    rf"^(?:{_WORD}|(?:{_WORD})?\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\][A-Za-z0-9._-]*)$"
)
"""Regular expression of one entry, for JSON Schema."""


def _ranges(entry: str) -> tuple[str, list[tuple[str, int, int]], str]:
    """(text before, (first number as written, first, last) of every range, text after)."""
    found = _ENTRY.fullmatch(entry)
    if not entry or found is None:
        raise InputError(
            f"found the text {entry[:60]!a}; write a name or a range, such as node[001-016]"
        )
    ranges = []
    for part in (found["ranges"] or "").split(","):
        first, _, last = part.partition("-")
        if len(first) > _MAX_DIGITS or len(last) > _MAX_DIGITS:
            raise InputError(f"{entry[:60]!a} has a number of more than {_MAX_DIGITS} digits")
        if part:
            low, high = int(first), int(last or first)
            if high < low:
                raise InputError(f"{entry[:60]!a}: the range {part} ends before it begins")
            ranges.append((first, low, high))
    return found["before"] or "", ranges, found["after"] or ""


def count_names(entry: str) -> int:
    """Nodes that an entry stands for; an InputError where it is neither a name nor a range."""
    _, ranges, _ = _ranges(entry)
    return sum(high - low + 1 for _, low, high in ranges) if ranges else 1


def expand_names(entries: Sequence[str]) -> Iterator[str]:
    """Every name, in order; an InputError where an entry is neither a name nor a range."""
    for entry in entries:
        before, ranges, after = _ranges(entry)
        if not ranges:
            yield before
        for first, low, high in ranges:
            for number in range(low, high + 1):
                yield f"{before}{number:0{len(first)}d}{after}"


def spread_evenly(count: int, devices: int) -> tuple[int, ...]:
    """Which of `count` switches or NUMA nodes each device has; `count` divides `devices`."""
    each = devices // count
    return tuple(device // each for device in range(devices))


class RingNics(StrEnum):
    """NICs by which collectives of groups with several, but not all, devices of a node leave it."""

    OWN = "own"
    """Those of the group's devices."""
    FIRST_DEVICE = "first-device"
    """That of the group's first device in the node."""
    ONE = "one"
    """The node's first, all such groups together; groups of three and more whole nodes likewise."""


def nic_faults(
    per_node: int, of_device: Sequence[int], rails: int | None, rings: object
) -> Iterator[Fault]:
    """Figures of a node's NICs that do not go together; `rings` is a `RingNics` value or None."""
    for position, nic in enumerate(of_device):
        if not 0 <= nic < per_node:
            message = f"there is no NIC {nic}; a node has 0 to {per_node - 1}"
            yield Fault(field=f"of_device[{position}]", message=message)
            break
    if rails is not None and per_node % rails:
        message = f"{rails} rails do not divide the {per_node} NICs of a node"
        yield Fault(field="rails", message=message)
    if rails is not None and rings in (RingNics.FIRST_DEVICE.value, RingNics.ONE.value):
        message = (
            f"{rings} with {rails} rails; a ring stays on the rail of its devices: leave one of "
            "the two out"
        )
        yield Fault(field="rings", message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nics:
    """NICs (network cards) of one node that its devices share."""

    per_node: Count
    bandwidth_bytes_per_second: Positive
    """Of one NIC, in one direction."""
    most_per_device: Count = 1
    """NICs that one device sends over at the same time, where there are more than devices."""
    rails: Count | None = None
    """Separate networks: NIC n of every node is on rail n modulo this; None: one network."""
    of_device: tuple[int, ...] = ()
    """The NIC of each device; empty: spread evenly, in order."""
    rings: RingNics | None = None
    """Which NICs the rings of a collective use; None: see `ring_nics`."""

    def __post_init__(self) -> None:
        check_limits(self)
        faults = tuple(nic_faults(self.per_node, self.of_device, self.rails, self.rings))
        if faults:
            raise InputError(*faults)

    def of(self, local: int, devices_per_node: int) -> tuple[int, ...]:
        """NICs that the device of this number in its node sends over."""
        if self.of_device:
            return (self.of_device[local],)
        if devices_per_node >= self.per_node:
            return (local * self.per_node // devices_per_node,)
        each = self.per_node // devices_per_node
        return tuple(range(local * each, local * each + min(each, self.most_per_device)))

    def share_bytes_per_second(self, devices_per_node: int) -> float:
        """What one device can count on while all devices of its node send.

        Where the NICs are not spread evenly, the devices of the fullest NIC have this little.
        """
        if self.of_device:
            return self.bandwidth_bytes_per_second / max(Counter(self.of_device).values())
        if devices_per_node >= self.per_node:
            return self.bandwidth_bytes_per_second / -(-devices_per_node // self.per_node)
        return self.bandwidth_bytes_per_second * len(self.of(0, devices_per_node))

    def own_bytes_per_second(self, devices_per_node: int) -> float:
        """What one device sends at most, the others of its node being silent."""
        return self.bandwidth_bytes_per_second * len(self.of(0, devices_per_node))

    def by_senders(self, devices_per_node: int) -> tuple[float, ...]:
        """What each of one, two, ... devices of a node gets that send, on the fullest NIC."""
        found, used = [], Counter[int]()
        for local in range(devices_per_node):
            nics = self.of(local, devices_per_node)
            used.update(nics)
            most = max(used.values())
            found.append(self.bandwidth_bytes_per_second * len(nics) / most)
        return tuple(found)

    def ring_nics(self, devices_per_node: int) -> RingNics:
        """Which NICs rings use: as described, else that of the first device where devices share
        NICs and there are no rails (`hetplan.cost.network.group_shares`).
        """
        if self.rings is not None:
            return self.rings
        shared = devices_per_node > self.per_node and self.rails is None
        return RingNics.FIRST_DEVICE if shared else RingNics.OWN

    def rail(self, nic: int) -> int:
        """The rail of a NIC; 0 where all NICs are on one network."""
        return nic % self.rails if self.rails else 0
