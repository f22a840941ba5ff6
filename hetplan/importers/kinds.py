"""Which kinds of foreign output hetplan reads, and where the reader of each is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TypeAlias, cast

from hetplan.importers.records import ImportContext, Imported

Parse: TypeAlias = Callable[[str, ImportContext], Imported]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImporterKind:
    """One kind of output."""

    kind: str
    title: str
    """What it reads, in one line."""
    module: str
    """Module of this room whose `parse` reads it."""
    needs: tuple[str, ...] = ()
    """Fields of ImportContext that the output does not say and the reader must be given."""

    @property
    def parse(self) -> Parse:
        """The reader, imported when it is first used."""
        return cast(Parse, import_module(f"hetplan.importers.{self.module}").parse)


KINDS: tuple[ImporterKind, ...] = (
    ImporterKind(
        kind="nccl-tests",
        title="nccl-tests, text or JSON (-J): collectives and send/recv by size",
        module="nccl_tests",
        needs=("link",),
    ),
    ImporterKind(
        kind="rccl-tests",
        title="rccl-tests, text or JSON: collectives and send/recv by size",
        module="rccl_tests",
        needs=("link",),
    ),
    ImporterKind(
        kind="perftest",
        title="perftest (ib_write_bw, ib_read_lat, ...): bandwidth or latency of RDMA",
        module="perftest",
    ),
    ImporterKind(
        kind="iperf3",
        title="iperf3, printed or -J: TCP or UDP bandwidth, round trip, loss",
        module="iperf3",
    ),
    ImporterKind(
        kind="nvidia-topo",
        title="nvidia-smi topo -m: devices, NICs and paths of a node",
        module="nvidia_topo",
    ),
    ImporterKind(
        kind="rocm-topo",
        title="rocm-smi --showtopo, tables or --json: devices and paths of a node",
        module="rocm_topo",
    ),
    ImporterKind(
        kind="npu-topo",
        title="npu-smi info -t topo: devices and paths of a node",
        module="npu_topo",
    ),
    ImporterKind(
        kind="hostfile",
        title="hostfile of MPI, DeepSpeed (slots=) or FlagScale (slots= type=)",
        module="hostfile",
    ),
    ImporterKind(
        kind="slurm-nodes",
        title="Slurm node list, as in node[001-016,020], with or without counts",
        module="slurm_nodes",
    ),
)
"""Every kind, in the order in which `hetplan import --help` shows them."""
