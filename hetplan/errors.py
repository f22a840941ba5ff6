"""What can go wrong, as one tree; the command line turns each branch into an exit code.

HetplanError                      1  (a fault of hetplan itself, or of the machine)
  InputError                      2  something the user gave is wrong: file, line, field, mend
  InfeasibleError                 3  the question is well put and has no answer
  LimitError, OutOfTimeError      4  stopped at a limit before there was anything to show
  ProfileError, LaunchError       1  a measurement or a training run failed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class HetplanError(Exception):
    """Base of every error that hetplan raises on purpose."""

    exit_code = 1


class Severity(StrEnum):
    """How much a fault matters."""

    ERROR = "error"
    """Nothing is done."""
    WARNING = "warning"
    """It is done, and is probably not what was meant."""
    NOTE = "note"
    """Worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong or doubtful in one place of what the user gave."""

    message: str
    """What was found and what to do, in one line."""
    file: str = ""
    line: int = 0
    """1-based line in `file`; 0 where no line can be named."""
    field: str = ""
    """Path of the field, as in `regions[0].islands[1].device`."""
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        # Names of files and fields, and what is quoted of them, are other people's.
        parts = (place, _shortened(self.field), _shortened(self.message))
        return printable(": ".join(part for part in parts if part))


class InputError(HetplanError):
    """The user's input is wrong; every fault that could be found is listed, one line each."""

    exit_code = 2

    def __init__(self, *faults: Fault | str) -> None:
        self.faults: tuple[Fault, ...] = tuple(
            Fault(message=fault) if isinstance(fault, str) else fault for fault in faults
        )
        super().__init__("\n".join(str(fault) for fault in self.faults))


class InfeasibleError(HetplanError):
    """No plan satisfies the constraints; `reasons` says which, in the user's words."""

    exit_code = 3

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join(self.reasons))


class LimitError(HetplanError):
    """A time or memory limit was reached before any plan was found."""

    exit_code = 4


class OutOfTimeError(HetplanError):
    """The time limit was reached; what was found so far stands (`hetplan.deadline`)."""

    exit_code = LimitError.exit_code

    def __init__(self) -> None:
        super().__init__("the time limit came before there was anything to show; raise it")


class ProfileError(HetplanError):
    """A measurement could not be made or could not be read back."""


class LaunchError(HetplanError):
    """A training run did not start or did not finish."""


_LONGEST = 2000
"""Characters of a field or a message; one that is longer quotes a value that nobody reads."""


def _shortened(text: str) -> str:
    """Without its middle, where it is long: the advice is at the end."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


def printable(text: str) -> str:
    """The text without what a terminal obeys: a name from a file may hold it."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class FaultList:
    """Faults of parts that do not depend on each other, so that all are reported at once."""

    def __init__(self) -> None:
        self.found: list[Fault] = []

    def add(self, field: str, message: str) -> None:
        """One more."""
        self.found.append(Fault(field=field, message=message))

    def of(self, make: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """What `make` returns; None where it raises an InputError, whose faults are kept."""
        try:
            return make(*args, **kwargs)
        except InputError as error:
            self.found += error.faults
            return None

    def stop(self) -> None:
        """An InputError with the faults, each once, where there are any."""
        if self.found:
            raise InputError(*dict.fromkeys(self.found))
