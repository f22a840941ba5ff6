"""What a campaign asks for, as it stands in `campaign.json`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetplan.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def _check_words(*words: str) -> None:
    """Names stand in commands that people copy into a shell: they must be plain words."""
    for word in words:
        if _NAME.fullmatch(word) is None:
            raise InputError(
                f"found the name {word[:60]!a}; the file was changed by hand, use the one that "
                "hetplan wrote"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignKind:
    """Layers to be measured on one device kind."""

    kind: str
    script: str
    """File name of its script."""
    units: tuple[tuple[tuple[str | int, ...], ...], ...]
    """Per unit of the script, in its order: the shapes of its samples (`LayerSample.shape`)."""
    seconds: float | None
    """Expected duration; None where nothing is known of the kind."""

    def __post_init__(self) -> None:
        _check_words(self.kind, self.script)


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignLink:
    """One link to be measured."""

    name: str
    is_named: bool
    """Whether the cluster file refers to it by this name already."""
    where: str
    """Where it is, for a person."""
    kinds: tuple[str, str]
    """Device kinds at its ends."""
    nodes: int
    processes_per_node: int
    cases: tuple[tuple[str, int, int], ...]
    """(operation, group size, message bytes) of every sample."""
    seconds: float

    def __post_init__(self) -> None:
        _check_words(self.name, *self.kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Everything that is to be measured."""

    campaign: str
    """Hash of what is measured; results name it."""
    cluster: str
    """Name of the cluster."""
    model: str
    """Name of the model; empty: a default grid."""
    job: str
    """Name of the job; empty: a default grid."""
    kinds: tuple[CampaignKind, ...]
    links: tuple[CampaignLink, ...]

    def __post_init__(self) -> None:
        if not self.campaign:
            raise InputError("campaign is empty; it names what results belong to")

    def kind(self, name: str) -> CampaignKind | None:
        """The kind of this name; None where the campaign does not ask for it."""
        return next((kind for kind in self.kinds if kind.kind == name), None)
