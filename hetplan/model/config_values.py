"""Values of one configuration, each checked for its type and range, with a fault where it is not.

A getter never raises: it notes the fault and gives a value that lets reading go on, so that all
faults of a file are found at once. `raise_faults` ends the reading of a file that had any.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.reading import Document, describe
from hetplan.model.layers import MAX_PER_SIZE
from hetplan.model.numerics import MAX_CONSTANT
from hetplan.model.spec import MAX_LAYERS

_ABSENT = object()


class ConfigValues:
    """The mapping at one place of a file."""

    def __init__(self, document: Document, place: Path) -> None:
        self.document = document
        self.place = place
        self.faults: list[Fault] = []
        self._wrong: set[str] = set()

    def at(self, key: str) -> object:
        """The raw value; None where there is none."""
        return self.document.at(*self.place, key)

    def fault(self, key: str, message: str, *, beside: Sequence[str] = ()) -> None:
        """Note a fault of this key.

        `beside`: other keys that the fault speaks of. Where one of them, or the key itself, has a
        fault already, its value is not what the file says, and nothing is noted.
        """
        if beside and not self._wrong.isdisjoint((key, *beside)):
            return
        self._wrong.add(key)
        self.faults.append(self.document.fault((*self.place, key), message))

    def raise_faults(self) -> None:
        """Raise one InputError with every fault, in the order of the file's lines."""
        if self.faults:
            found = dict.fromkeys(self.faults)
            raise InputError(*sorted(found, key=lambda fault: (fault.line, fault.field)))

    def key_of(self, *names: str) -> str:
        """The first of these names that the file has, else the first of all.

        Two names of one value that say different things are a fault.
        """
        present = [name for name in names if self._raw(name) is not _ABSENT]
        for other in present[1:]:
            if self.at(other) != self.at(present[0]):
                self.fault(
                    other,
                    f"found {describe(self.at(other))}, but {present[0]} is "
                    f"{describe(self.at(present[0]))}; both mean the same, keep one",
                )
        return present[0] if present else names[0]

    def _raw(self, key: str) -> object:
        parent = self.document.at(*self.place) if self.place else self.document.root
        return parent.get(key, _ABSENT) if isinstance(parent, dict) else _ABSENT

    def count(
        self, *names: str, default: int | None, least: int = 1, most: int = MAX_PER_SIZE
    ) -> int:
        """A whole number; `default` where it is missing, a fault where that is None."""
        found = self.count_or_none(*names, default=default, least=least, most=most)
        if found is None:
            key = self.key_of(*names)
            if not any(fault.field.endswith(key) for fault in self.faults):
                self.fault(key, "found nothing; write a whole number")
            return max(least, 1)
        return found

    def count_or_none(
        self, *names: str, default: int | None, least: int = 1, most: int = MAX_PER_SIZE
    ) -> int | None:
        """A whole number, or None where the file says null; `default` where it is missing."""
        key = self.key_of(*names)
        value = self._raw(key)
        if value is _ABSENT:
            return default
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self.fault(key, f"found {describe(value)}; write a whole number")
            return max(least, 1)
        if not least <= value <= most:
            wanted = f"at least {least}" if value < least else f"at most {most:,}"
            found = str(value) if abs(value) < 10**18 else "a number of more than 18 digits"
            self.fault(key, f"found {found}; it must be {wanted}")
            return max(least, 1)
        return value

    def number(self, *names: str, default: float | None, zero: bool = False) -> float | None:
        """A number above 0 (or 0); `default` where it is missing or null."""
        key = self.key_of(*names)
        value = self._raw(key)
        if value is _ABSENT or value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fault(key, f"found {describe(value)}; write a number")
            return default
        if not (0 <= value <= MAX_CONSTANT if zero else 0 < value <= MAX_CONSTANT):
            above = "0 or more" if zero else "above 0"
            found = f"{value:g}" if abs(value) < 10**18 else "a number of more than 18 digits"
            self.fault(key, f"found {found}; it must be {above} and at most {MAX_CONSTANT:g}")
            return default
        return float(value)

    def layers(self, *names: str, default: int) -> int:
        """The number of transformer layers."""
        return self.count(*names, default=default, most=MAX_LAYERS)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false; null is false."""
        value = self._raw(key)
        if value is _ABSENT:
            return default
        if value is None or isinstance(value, bool):
            return bool(value)
        self.fault(key, f"found {describe(value)}; write true or false")
        return default

    def indices(self, key: str, limit: int) -> frozenset[int]:
        """A list of layer numbers, each below `limit`; empty where it is missing or null."""
        value = self.at(key)
        if value is None:
            return frozenset()
        wrong = "write a list of whole numbers"
        if not isinstance(value, list):
            self.fault(key, f"found {describe(value)}; {wrong}")
            return frozenset()
        found = set()
        for entry in value:
            if not isinstance(entry, int) or isinstance(entry, bool):
                self.fault(key, f"found {describe(entry)} in the list; {wrong}")
            elif not 0 <= entry < limit:
                shown = entry if abs(entry) < 10**18 else "a number of more than 18 digits"
                message = f"found {shown}; layers are 0 to {limit - 1}"
                self.fault(key, message, beside=("num_hidden_layers",))
            else:
                found.add(entry)
        return frozenset(found)

    def words(self, key: str, limit: int, known: Sequence[str]) -> tuple[str, ...] | None:
        """A list of `limit` of the known words; None where it is missing or null."""
        value = self.at(key)
        if value is None:
            return None
        if not isinstance(value, list):
            self.fault(key, f"found {describe(value)}; write a list of {', '.join(known)}")
            return None
        for entry in value:
            if entry not in known:
                message = f"found {describe(entry)} in the list; known: {', '.join(known)}"
                self.fault(key, message)
                return None
        if len(value) != limit:
            message = f"has {len(value)} entries for {limit} layers; make them equal"
            self.fault(key, message, beside=("num_hidden_layers",))
            return None
        return tuple(value)

    def refuse(self, key: str, why: str) -> None:
        """A fault where the file says true to what hetplan cannot count."""
        if self.at(key) not in (None, False):
            self.fault(key, f"found {describe(self.at(key))}; {why}")
