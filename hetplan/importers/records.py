"""What an importer returns: records in hetplan's own words and base units.

`parse(text, context) -> Imported` of an importer is a pure function: it reads no clock, no
environment and no file but the device catalogue. What it cannot use it refuses (`InputError` with
file and line); rows that the tool itself marks as failed are named in `skipped`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.profiling.samples import LinkSample, OperatorSample

IMPORT_SCHEMA = "hetplan.import/5"
"""Schema of `Imported` as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportContext:
    """What the user says about an output."""

    file: str
    """Name of the input, for error messages."""
    link: str | None = None
    """Name that link samples get."""
    device: str | None = None
    """Device kind that was measured, where the output's own word is not to count."""
    framework: str | None = None
    """Rows of this program only, in tables that hold several."""
    version: str | None = None
    """Rows of this version only; None: of each shape the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFigures:
    """What a tool measured of one path between two hosts: figures for a link of a cluster file."""

    measured: str
    """What was measured, in the tool's words, as in `RDMA_Write bandwidth`."""
    message_bytes: int | None = None
    bandwidth_bytes_per_second: float | None = None
    """One direction, all streams together."""
    latency_seconds: float | None = None
    """One way."""
    round_trip_seconds: float | None = None
    streams: int | None = None
    """Connections or queue pairs that ran at the same time."""
    window_bytes: float | None = None
    """Most bytes that one stream had under way."""
    loss_fraction: float | None = None
    """Packets sent again over packets sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyDevice:
    """One accelerator of a node."""

    index: int
    name: str
    """What the tool calls it, as in `GPU0`."""
    numa_node: int | None = None
    """None: the tool does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyNic:
    """One network card of a node."""

    name: str
    """As in `mlx5_0`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyPath:
    """How two parts of a node reach each other."""

    between: tuple[str, str]
    """Names of devices or NICs, the earlier of the tool's order first."""
    path: str
    """The tool's word for it, as in `NV12`, `PIX`, `XGMI`, `HCCS`."""
    hops: int | None = None
    weight: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTopology:
    """One node as its driver's tool describes it."""

    vendor: str
    """A vendor of the device catalogue, as in `nvidia`."""
    devices: tuple[TopologyDevice, ...]
    nics: tuple[TopologyNic, ...] = ()
    paths: tuple[TopologyPath, ...] = ()
    """Every pair once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of a list of hosts."""

    name: str
    slots: int | None = None
    """Processes, and so devices, of the host; None: the list does not say."""
    device: str | None = None
    """What the list calls the device's type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Everything that one importer read; most fill one or two of the fields."""

    kind: str
    """The importer: a kind of `hetplan.importers.table`."""
    tool_version: str = ""
    """As the output says it; empty where it does not."""
    device_name: str = ""
    """What the output calls the device; empty where it does not."""
    links: tuple[LinkSample, ...] = ()
    operator_samples: tuple[OperatorSample, ...] = ()
    """Their device is the kind, or what the output calls it where no kind is called so."""
    paths: tuple[PathFigures, ...] = ()
    topology: NodeTopology | None = None
    hosts: tuple[Host, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader of the records must know, as in `seconds are means, not medians`."""
    skipped: tuple[str, ...] = ()
    """Rows that the tool itself marks as failed, each with its line."""

    @staticmethod
    def from_older_form(data: dict[str, object]) -> dict[str, object]:
        """Without what forms 1 to 3 had of other planners' profiles, which are no longer read."""
        gone = ("layers", "devices", "operators")
        return {key: value for key, value in data.items() if key not in gone}
