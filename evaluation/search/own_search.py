"""hetplan's own search of a case: its cost of Sailor's profiles, memory by the rule of Sailor's
simulator.

One microbatch size at a time, so that every plan has Sailor's form. Sailor's formula scores the
best plan of every family afterwards (`evaluation.search.peers`).

`ProfilePredictor` gives the cost model Sailor's profiles and fits. It looks up and fits nothing:
layers by (GPU, microbatch size, tp) as they were profiled, sends and reductions by the fits of the
path that a link's `samples` names. Profiled times hold the tensor-parallel communication, so
collectives inside a node cost nothing here. What was not profiled takes so long that no plan has
it: nothing is carried over from other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from evaluation.search.sailor import NAME_OF_KIND, SailorFiles, rank_bytes, room_bytes
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link
from hetplan.cost.arrays import Ints
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.kernels import clock
from hetplan.model.spec import LayerKind
from hetplan.predict.predictor import MEASURED, LayerQuery, Prediction, SendLaw
from hetplan.profiling.samples import LinkOperation
from hetplan.search.journal import Journal
from hetplan.search.result import Inputs
from hetplan.search.scheduler import Scheduler
from hetplan.search.solver import Best
from hetplan.search.solvers import solver_of
from hetplan.search.space.family import Family, Mesh
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, MIDDLE, StageTable
from hetplan.search.table_maker import TableMaker

NEVER_SECONDS = 1e5
"""Of a layer that was not profiled."""
_NOTHING_SECONDS = 1e-12
"""Of what Sailor charges nothing for; predictions are above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePredictor:
    """Sailor's measurements of one model."""

    files: SailorFiles

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        """Seconds of one pass of one layer, its tensor-parallel communication with it."""
        found = self.files.times.get(
            (NAME_OF_KIND.get(device.kind, ""), query.microbatch_size, query.tp)
        )
        if found is None:
            return _prediction(NEVER_SECONDS)
        seconds = found.backward_seconds if query.is_backward else found.forward_seconds
        return _prediction(_of(query.layer, seconds))

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """The profiled update, whatever the number of parameters: Sailor has one time of each."""
        gpu = NAME_OF_KIND.get(device.kind, "")
        updates = [
            max(each.update_seconds)
            for (name, _, tp), each in self.files.times.items()
            if name == gpu and tp == 1
        ]
        return _prediction(max(updates, default=NEVER_SECONDS))

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        """By the fit of the link's path; a straight line through that message."""
        seconds = self._path_seconds(link, message_bytes)
        return SendLaw(
            rendezvous_latency_seconds=0.0,
            wire_latency_seconds=0.0,
            seconds_per_byte=seconds / message_bytes if message_bytes else 0.0,
            log_halfwidth=0.0,
            source=MEASURED,
        )

    def collective(
        self,
        link: Link,
        operation: str,
        group_size: int,
        message_bytes: float,
        *,
        nodes: int = 1,
        groups: int = 1,
    ) -> Prediction:
        """A ring over the link's path; nothing inside a node."""
        if group_size < 2 or not message_bytes or link.samples is None:
            return _prediction(_NOTHING_SECONDS)
        rounds = 2 if operation == LinkOperation.ALL_REDUCE else 1
        part = self._path_seconds(link, message_bytes / group_size)
        return _prediction(rounds * (group_size - 1) * part)

    def _path_seconds(self, link: Link, size_bytes: float) -> float:
        if not size_bytes:
            return 0.0
        if link.samples is None:
            return size_bytes / link.bandwidth_bytes_per_second
        zone, gpu, to_zone, to_gpu = link.samples.split(" ")
        fit = self.files.fit((zone, gpu, 1), (to_zone, to_gpu, 1))
        try:
            return fit.seconds(size_bytes)
        except InputError:
            # Below the sizes that were measured the parabola falls under zero.
            return size_bytes / link.bandwidth_bytes_per_second


def _of(layer: LayerKind, seconds: tuple[float, ...]) -> float:
    if layer is LayerKind.EMBEDDING:
        return seconds[0]
    if layer is LayerKind.HEAD:
        return seconds[-1]
    return sum(seconds[1:-1]) / len(seconds[1:-1])


def _prediction(seconds: float) -> Prediction:
    return Prediction(seconds=seconds, log_halfwidth=0.0, source=MEASURED)


_MUCH_MEMORY = 16
"""Times the memory of a device: hetplan's own rule is to exclude nothing."""


@dataclass(frozen=True, kw_only=True)
class OwnMaker(TableMaker):
    """hetplan's stage tables of one microbatch size, with the layers that fit by Sailor's rule."""

    files: SailorFiles
    _most: dict[tuple[str, int, int, int], Ints] = field(
        default_factory=dict, repr=False, compare=False
    )

    def profiled_families(self) -> Iterator[Family]:
        """The families without meshes of a (microbatch size, tp) that was not profiled."""
        for family in self.families:
            meshes = tuple(mesh for mesh in family.meshes if self._is_profiled(mesh))
            if meshes:
                yield replace(family, meshes=meshes)

    def _is_profiled(self, mesh: Mesh) -> bool:
        return all(
            (self._gpu(island), shape.microbatch_size, shape.tp) in self.files.times
            and shape.tp in self.files.sizes
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
        )

    def _gpu(self, island: int) -> str:
        return NAME_OF_KIND.get(self.cluster.islands[island].device.kind, "")

    def space(self, family: Family) -> StageTable:
        """hetplan's, with other `most_layers`."""
        table = super().space(family)
        most = np.zeros_like(table.most_layers)
        for m, mesh in enumerate(family.meshes):
            for flight in range(1, most.shape[3]):
                parts = zip(mesh.islands, mesh.shapes, strict=True)
                most[:, :, m, flight] = np.min(
                    [
                        self._layers_that_fit(
                            self._gpu(island), shape.tp, shape.microbatch_size, flight
                        )
                        for island, shape in parts
                    ],
                    axis=0,
                )
        return table._replace(most_layers=most)

    def _layers_that_fit(self, gpu: str, tp: int, microbatch_size: int, in_flight: int) -> Ints:
        """[4] most transformer layers on a rank, by role; wherever in the model they lie."""
        key = gpu, tp, microbatch_size, in_flight
        if key not in self._most:
            layers = self.files.num_layers - 2
            found = np.zeros(4, dtype=np.int64)
            for n in range(1, layers + 1):
                starts = {
                    FIRST: [0],
                    LAST: [layers + 1 - n],
                    BOTH: [0] if n == layers else [],
                    MIDDLE: range(2, layers - n + 1),
                }
                for role, begins in starts.items():
                    size = n + (role & FIRST > 0) + (role & LAST > 0)
                    spans = (slice(at, at + size) for at in begins)
                    if any(
                        rank_bytes(self.files, tp, microbatch_size, in_flight, span)
                        <= room_bytes(gpu)
                        for span in spans
                    ):
                        found[role] = n
            self._most[key] = found
        return self._most[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSearch:
    """What the search of a case found."""

    best: Best
    families: int
    searched: int
    """Families."""


def own_search(inputs: Inputs, files: SailorFiles) -> OwnSearch:
    """Plans and bounds over all microbatch sizes that were profiled; within the job's gap."""
    islands = tuple(
        replace(each, memory_bytes=_MUCH_MEMORY * each.memory_bytes)
        for each in inputs.cluster.islands
    )
    families = []
    for size in sorted({key[1] for key in files.times}):
        maker = OwnMaker(
            model=inputs.model,
            cluster=replace(inputs.cluster, islands=islands),
            job=replace(inputs.job, pin=replace(inputs.job.pin, microbatch_size=size)),
            predictor=ProfilePredictor(files=files),
            files=files,
        )
        families += [(family, maker) for family in maker.profiled_families()]
    solvers = [solver_of(at, *each) for at, each in enumerate(families)]
    rough = [solver.order_free for solver in solvers]
    best = Best(
        gap=inputs.job.gap, bounds=[each.bound_seconds for each in rough], seed=inputs.job.seed
    )
    drive = Scheduler(
        best=best,
        journal=Journal(path=None, started=clock(), best=best),
        solvers=solvers,
        estimates=[each.estimate_seconds for each in rough],
        ticks=[family.samples for family, _ in families],
    )
    drive.run()
    return OwnSearch(best=best, families=len(families), searched=len(drive.improved | drive.proven))
