"""What a measurement is: samples of layers and of links, and where they came from.

A sample is one row of a CSV file; all rows of one population (same device, driver, library
versions, threads) stand in one folder with its provenance. Seconds are medians over `repeats`
runs of which `outliers` lie more than three interquartile ranges above the median; none is
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Part of a training step that a layer takes part in."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    FORWARD_BACKWARD = "forward_backward"
    """Both in one time, as some tools write it; `predict.combined` splits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """Measured time of one phase of one layer on one tensor-parallel rank, communication apart."""

    device: str
    """Device kind."""
    architecture: str
    layer: str
    """A `LayerKind` value."""
    phase: str
    """A `Phase` value; an optimizer's name follows after a colon, as in `optimizer:adamw`."""
    precision: str
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sequence_length: int
    microbatch_size: int
    tp: int
    copies: int = 1
    """Layers that the phase ran over; optimizer rows also update several at once."""
    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    repeats: int
    outliers: int
    steady: bool
    """Whether warm-up reached a steady time before its limit."""
    activation_bytes: float
    """Bytes of tensors that autograd kept for the backward pass (forward rows; 0 elsewhere)."""
    peak_memory_bytes: float
    """Most device memory allocated during the phase above what was allocated before it."""
    clock_hertz: float
    """Device clock during the measurement; 0 where the device does not tell."""
    measured_on: str = ""
    """ISO date of this row; empty: the date of its population."""

    @property
    def shape(self) -> tuple[str | int, ...]:
        """What was measured: everything but the device and the result."""
        return (
            self.architecture,
            self.layer,
            self.phase,
            self.precision,
            self.hidden_size,
            self.ffn_hidden_size,
            self.num_attention_heads,
            self.num_kv_heads,
            self.head_dim,
            self.vocab_size,
            self.sequence_length,
            self.microbatch_size,
            self.tp,
            self.copies,
        )


class OperatorPhase(StrEnum):
    """Which pass of one operator was measured.

    A product with weights has two backward products: frameworks and tools often publish one.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    """All of it, where the operator has one backward kernel or its two were measured together."""
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSample:
    """Measured time of one pass of one operator (a kernel, or a few that always run together)."""

    device: str
    """Device kind."""
    operator: str
    """A `hetplan.model.operators.OperatorClass` value."""
    phase: str
    """An `OperatorPhase` value."""
    precision: str
    """Of its inputs; a `hetplan.job.spec.Precision` value."""
    output_precision: str
    """Of what it writes: gradients of weights are often float32."""
    batch: int
    """Products of one shape in one launch; 1 where nothing is batched."""
    m: int
    """Rows of the result; of an operator that is no product: tokens (rows)."""
    n: int
    """Columns of the result; of an operator that is no product: elements per token."""
    k: int
    """Summed over; 0 where the operator is no product."""
    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    repeats: int
    outliers: int
    measured_on: str = ""
    """ISO date of this row; empty: the date of its population."""

    @property
    def shape(self) -> tuple[str | int, ...]:
        """What was measured: everything but the device and the result."""
        return (
            self.operator,
            self.phase,
            self.precision,
            self.output_precision,
            self.batch,
            self.m,
            self.n,
            self.k,
        )


class LinkOperation(StrEnum):
    """What was measured on a link.

    `send_recv` has both sides posting together, `send_recv_late` the receiver well before.
    """

    SEND_RECV = "send_recv"
    SEND_RECV_LATE = "send_recv_late"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


SENDS = (LinkOperation.SEND_RECV, LinkOperation.SEND_RECV_LATE)
"""Messages from one device to another; their difference is the rendezvous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """Measured time of one communication operation among `group_size` ranks."""

    link: str
    """Name under which cluster files refer to these samples."""
    operation: str
    """A `LinkOperation` value."""
    backend: str
    group_size: int
    message_bytes: int
    """Bytes of the full tensor: what all_reduce reduces, what all_gather ends with, what
    reduce_scatter starts with, what each rank starts with in all_to_all."""
    median_seconds: float
    """Time of the slowest rank from the last rank's start to its own end."""
    p10_seconds: float
    p90_seconds: float
    repeats: int
    outliers: int
    measured_on: str = ""
    """ISO date of this row; empty: the date of its population."""
    nodes: int = 1
    """Nodes that the ranks stand in, equally many in each."""
    groups: int = 1
    """Groups of this shape that communicated at the same time on the same nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a population of samples was measured, and with what."""

    device: str
    device_name: str
    """What the driver or the operating system calls it."""
    backend: str
    """torch device type: `cpu`, `cuda` (ROCm too), ..."""
    measured_on: str
    """ISO date of the first sample."""
    hetplan_version: str
    torch_version: str
    driver: str
    """Driver and runtime versions as the backend reports them; the kernel release on a CPU."""
    threads: int
    paced: str
    """Empty, or how the device was slowed down on purpose."""
    together: int = 1
    """Processes of the machine that measured the same at the same time; 1 measured alone."""
    tool: str = "hetplan"
    """What measured: hetplan, or the program whose output was imported (nccl-tests, sailor)."""
    clocks: str = ""
    """Clock and power settings that somebody chose, as in `sm 1410 MHz locked, 300 W`; empty: as
    the device came, or not known."""
    command: str
    """The command line that measured it."""
    notes: str = ""

    @property
    def circumstances(self) -> tuple[str, ...]:
        """What a population has in common beside its device kind: times of others do not mix.

        Date, command, notes and hetplan's own version are no circumstances.
        """
        return (
            self.device_name,
            self.backend,
            self.torch_version,
            self.driver,
            str(self.threads),
            self.paced,
            # Only where they say something: populations from before these fields keep their names.
            *((f"{self.together} together",) if self.together > 1 else ()),
            *((f"by {self.tool}",) if self.tool != "hetplan" else ()),
            *((self.clocks,) if self.clocks else ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSet:
    """Samples that belong together in one fit: everything a store holds, or a part of it."""

    layers: tuple[LayerSample, ...]
    links: tuple[LinkSample, ...]
    provenance: tuple[Provenance, ...]
    operators: tuple[OperatorSample, ...] = ()
