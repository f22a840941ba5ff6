"""What a look at a machine found; nothing here names the machine, its owner or its addresses.

0 and empty texts mean that the machine did not tell. The JSON form is `hetplan.doctor/1`.
"""

from __future__ import annotations

from dataclasses import dataclass

DOCTOR_SCHEMA = "hetplan.doctor/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineDevice:
    """Devices of one name."""

    name: str
    """What the driver or torch calls them."""
    count: int
    memory_bytes: float
    """Of one device, as its driver tells it."""
    driver: str
    """Version of the driver."""
    tool: str
    """Driver tool that lists them; empty: none does."""
    torch_device: str
    """torch's device type; empty: torch does not see them."""
    kind: str
    """Catalogue kind; empty: not in the catalogue."""
    nearest: tuple[str, ...]
    """Catalogue kinds that may be meant, where `kind` is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTorch:
    """What torch can do here."""

    version: str
    """Empty: torch cannot be imported."""
    runtime: str
    """What it was built for: `cuda 12.8`, `hip 6.4`, `cpu`."""
    backends: tuple[str, ...]
    """torch.distributed backends that can be used."""
    device_types: tuple[str, ...]
    """Device types of which torch sees a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProcessor:
    """Processor and memory, and what of them this process may use."""

    model: str
    cores: int
    """Of the machine."""
    usable_cores: int
    """This process may run on (cpuset)."""
    cpu_quota_cores: float
    """The control group's limit in cores; 0: none."""
    numa_nodes: int
    memory_bytes: float
    available_bytes: float
    memory_limit_bytes: float
    """The control group's limit; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineInterface:
    """Network interfaces that look alike."""

    names: tuple[str, ...]
    """With hexadecimal addresses in them replaced."""
    state: str
    """`up`, `down` or what the kernel says."""
    bits_per_second: float
    driver: str
    physical: bool
    """False: a bridge, a tunnel or a virtual pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRdma:
    """RDMA ports that look alike."""

    devices: tuple[str, ...]
    state: str
    """`ACTIVE`, `DOWN`, `INIT`, ..."""
    bits_per_second: float
    link_layer: str
    """`InfiniBand` or `Ethernet` (RoCE)."""
    numa_nodes: tuple[int, ...]
    """Of the devices, each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Limits of the container or login that stop a training run."""

    container: str
    """`docker`, `kubernetes`, ...; empty: none seen."""
    shared_memory_bytes: float
    """Size of /dev/shm."""
    locked_memory_bytes: float
    """Most that may be pinned; 0 with `locked_unlimited`."""
    locked_unlimited: bool
    open_files: int
    rdma_visible: bool
    """/dev/infiniband is there."""
    gpu_direct: str
    """Module that lets a NIC read a GPU's memory; empty: none loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTool:
    """A program that hetplan reads the output of."""

    name: str
    present: bool
    purpose: str
    get: str
    """How to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStore:
    """A profile store and what it holds."""

    place: str
    """With `~` for the home folder."""
    kinds: tuple[str, ...]
    links: tuple[str, ...]
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMeasurement:
    """Something that hetplan can or cannot measure here."""

    what: str
    possible: bool
    how: str
    """The command; or what is missing and how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """Everything that was found."""

    system: str
    """Operating system and kernel."""
    processor: MachineProcessor
    devices: tuple[MachineDevice, ...]
    torch: MachineTorch
    interfaces: tuple[MachineInterface, ...]
    rdma: tuple[MachineRdma, ...]
    limits: MachineLimits
    tools: tuple[MachineTool, ...]
    stores: tuple[MachineStore, ...]
    measurements: tuple[MachineMeasurement, ...]
    advice: tuple[str, ...]
    """Limits that would hold a run up, and how to raise them."""
    problems: tuple[str, ...]
    """What could not be looked at, and why."""
