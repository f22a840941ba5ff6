"""What ended a run: what kind of fault, on which host, of which rank, in which operation?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hetplan.errors import LaunchError


class FaultKind(StrEnum):
    """What is wrong, as far as it can be told from outside."""

    RANK_DIED = "rank-died"
    """A signal ended the process."""
    RANK_FAILED = "rank-failed"
    """The process ended by itself, with an error."""
    RANK_HANGS = "rank-hangs"
    """The process is silent, or computes without an end."""
    HOST_HANGS = "host-hangs"
    """All ranks of the host are silent."""
    LINK_DOWN = "link-down"
    """Ranks on several hosts are alive, wait for each other, and nothing arrives."""
    NO_PROGRESS = "no-progress"
    """Nothing goes on, and none of the above can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFault:
    """The first thing that went wrong in a run."""

    kind: FaultKind
    host: str
    """Of the first of `ranks`."""
    hosts: tuple[str, ...]
    """All hosts that it may be due to: of a link both ends."""
    ranks: tuple[int, ...]
    """Those that died, failed, hang or wait for each other."""
    operation: str
    """What the first of them did when it was last heard of."""
    peers: tuple[int, ...]
    """Ranks that it did this with."""
    seconds: float
    """From the fault to when it was noticed, as far as it is known."""
    message: str
    """In one line, for a person."""


class RunFailed(LaunchError):  # noqa: N818
    """A run was ended because of a fault; its other processes are gone."""

    def __init__(self, fault: RunFault, text: str = "") -> None:
        self.fault = fault
        super().__init__(text or fault.message)
