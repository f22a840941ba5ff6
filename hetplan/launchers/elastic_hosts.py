"""Which hosts may a run use: those that answer, that reach each other, and that can be trusted?

A host that was gone must answer several probes in a row before it is used again, twice as many each
time that it was gone: a host that comes and goes costs a run less and less. A host that two faults
in a row are blamed on is left out in the same way even while it answers, as long as others are
left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

MAX_DOUBLINGS = 6
"""3 answers become at most 192: a host that was gone often is tried again after three minutes."""


@dataclass(slots=True)
class _Host:
    out: bool = False
    times_out: int = 0
    answers: int = 0
    """In a row, since it was left out."""


class HostBook:
    """What is known of every host of a run."""

    def __init__(self, hosts: Sequence[str], *, answers_needed: int) -> None:
        self._hosts = {name: _Host() for name in hosts}
        self._answers_needed = answers_needed
        self._blamed_last = ""

    @property
    def usable(self) -> tuple[str, ...]:
        """Hosts that were not left out, or have come back."""
        return tuple(name for name, host in self._hosts.items() if not host.out)

    @property
    def out(self) -> tuple[str, ...]:
        """Hosts that are left out."""
        return tuple(name for name, host in self._hosts.items() if host.out)

    @property
    def returning(self) -> tuple[str, ...]:
        """Hosts that are left out and answered the last probe."""
        return tuple(name for name, host in self._hosts.items() if host.out and host.answers)

    def needed(self, name: str) -> int:
        """Answers in a row that bring this host back."""
        doublings = min(max(0, self._hosts[name].times_out - 1), MAX_DOUBLINGS)
        return int(self._answers_needed * 2**doublings)

    def leave_out(self, names: Collection[str]) -> None:
        """These did not answer."""
        for name in names:
            host = self._hosts[name]
            host.out, host.answers = True, 0
            host.times_out += 1

    def blame(self, names: Sequence[str]) -> str:
        """A fault names these hosts; the one that is left out for it now, empty for none.

        One host that two faults in a row name is, unless no other may be used. Of a link between
        two hosts nobody knows whose fault it is.
        """
        name = names[0] if len(names) == 1 else ""
        again = bool(name) and name == self._blamed_last
        self._blamed_last = name
        if not again or self._hosts[name].out or self.usable == (name,):
            return ""
        self.leave_out((name,))
        self._blamed_last = ""
        return name

    def heard(self, asked: Collection[str], answered: Collection[str]) -> tuple[str, ...]:
        """Hosts that were left out were asked, and these of them answered; those that may be used
        again from now on.
        """
        back = []
        for name in asked:
            host = self._hosts[name]
            if not host.out:
                continue
            host.answers = host.answers + 1 if name in answered else 0
            if host.answers >= self.needed(name):
                host.out, host.answers = False, 0
                back.append(name)
        return tuple(back)


def joined(hosts: Sequence[str], reaches: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Hosts of which each reaches each other, as many as can be found by leaving out, one after
    the other, the one that lacks most (of several the last in order).

    `reaches` has the others that each host reached; a host without an entry did not answer.
    """
    left = [name for name in hosts if name in reaches]
    while True:
        lacking = {
            one: sum(
                one != two and not (two in reaches[one] and one in reaches[two]) for two in left
            )
            for one in left
        }
        worst = max(reversed(left), key=lambda name: lacking[name], default="")
        if not worst or not lacking[worst]:
            return tuple(left)
        left.remove(worst)
