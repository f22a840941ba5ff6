"""Which figures the links of a draft get.

An option counts more than measured samples, samples more than a file that was named for this link,
and that more than the catalogue's figures over a topology.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hetplan.cli.import_draft import DraftRequest
from hetplan.cli.import_parts import Faults, IslandParts, guess, quantity, split_by_island
from hetplan.cli.options import stores_to_read
from hetplan.errors import Fault, InputError
from hetplan.importers.draft import NicsDraft
from hetplan.importers.draft_figures import (
    Figure,
    LinkFigures,
    best_bandwidth,
    from_samples,
    from_topology,
    least_latency,
)
from hetplan.importers.node_places import nic_layout
from hetplan.profiling.samples import LinkSample
from hetplan.units import Dimension

_PATHS = ("perftest", "iperf3")
_RDMA = "perftest"


@dataclass(slots=True)
class Links:
    """The links of a draft; faults go to `faults`, and what they concern stays empty."""

    request: DraftRequest
    names: tuple[str, ...]
    faults: Faults
    stored: dict[str, list[LinkSample]] | None = None

    def intra(self, island: IslandParts) -> LinkFigures:
        """Inside a node of the island."""
        figures = self._said(island.name, "intra")
        if island.topology is not None:
            pair = from_topology(island.topology, island.device)
            if not self._of("intra-bandwidth", island.name):
                figures = figures.of_one_pair(pair.bandwidth)
            figures = figures.over(pair)
        return figures

    def inter(self, island: IslandParts) -> tuple[LinkFigures, NicsDraft | None]:
        """Between nodes of the island, and the NICs that they send over."""
        figures = self._said(island.name, "inter", devices_per_node=island.devices_per_node)
        texts = self._of("nic-bandwidth", island.name)
        card = self._figure("nic-bandwidth", texts[0] if texts else None, Dimension.BANDWIDTH)
        for path in self._of("inter-node", island.name, many=True):
            found = self.faults.of(guess, "inter-node", path, _PATHS)
            if found is None:
                continue
            source = Path(path).name
            if found.kind == _RDMA:
                card = card or best_bandwidth(found.paths, source=source)
                bandwidth = None
            else:
                # TCP crosses whatever the hosts have between them, whoever sends.
                share = island.devices_per_node
                bandwidth = best_bandwidth(found.paths, source=source, share=share)
            latency = least_latency(found.paths, source=source)
            figures = figures.over(LinkFigures(bandwidth=bandwidth, latency=latency))
        return figures, self.faults.of(self._nics, island, card)

    def _nics(self, island: IslandParts, card: Figure | None) -> NicsDraft | None:
        """The NICs of a node, where the bandwidth of one is known."""
        numbers = self._of("nics-per-node", island.name)
        layout = nic_layout(island.topology) if island.topology is not None else None
        if card is None:
            if numbers:
                message = "the bandwidth of one card is needed too: --nic-bandwidth, --inter-node"
                raise InputError(Fault(field="--nics-per-node", message=message))
            return None
        if numbers:
            text = numbers[0]
            if not re.fullmatch(r"[1-9][0-9]{0,5}", text, re.ASCII):
                message = f"found {text[:60]!a}; write a number of cards, at least 1"
                raise InputError(Fault(field="--nics-per-node", message=message))
            number = int(text)
            return NicsDraft(
                per_node=number,
                bandwidth=card,
                layout=layout if layout is not None and number == len(layout.nics) else None,
            )
        if layout is None:
            raise InputError(
                f"{island.name}: nobody said how many cards a node has; give --nics-per-node N"
            )
        return NicsDraft(per_node=len(layout.nics), bandwidth=card, layout=layout)

    def across(self, islands: tuple[IslandParts, ...]) -> LinkFigures:
        """Between islands; empty where there is one."""
        request = self.request
        said = (
            request.across_bandwidth,
            request.across_latency,
            request.across_samples,
            request.across_shared,
        )
        if len(islands) == 1:
            if request.across or any(said):
                message = "there is one island, so nothing lies between islands"
                self.faults.found.append(Fault(field="--across", message=message))
            return LinkFigures()
        figures = self._figures("across", *said[:3])
        figures = figures.over(
            LinkFigures(shared=self._figure("across-shared", said[3], Dimension.BANDWIDTH))
        )
        for path in request.across:
            found = self.faults.of(guess, "across", path, _PATHS)
            if found is not None:
                source = Path(path).name
                figures = figures.over(
                    LinkFigures(
                        shared=best_bandwidth(found.paths, source=source),
                        latency=least_latency(found.paths, source=source),
                    )
                )
        return figures

    def _of(self, option: str, island: str, *, many: bool = False) -> list[str]:
        """Values of an option for this island."""
        values: tuple[str, ...] = getattr(self.request, option.replace("-", "_"))
        split = self.faults.of(split_by_island, option, values, self.names) or {}
        found = split.get(island, [])
        if len(found) > 1 and not many:
            message = f"{island} has {len(found)} of them; give one"
            self.faults.found.append(Fault(field=f"--{option}", message=message))
        return found

    def _said(self, island: str, where: str, *, devices_per_node: int | None = None) -> LinkFigures:
        """What the options say of this link of this island."""
        bandwidth, latency, samples = (
            next(iter(self._of(f"{where}-{what}", island)), None)
            for what in ("bandwidth", "latency", "samples")
        )
        return self._figures(where, bandwidth, latency, samples, devices_per_node=devices_per_node)

    def _figures(
        self,
        where: str,
        bandwidth: str | None,
        latency: str | None,
        samples: str | None,
        *,
        devices_per_node: int | None = None,
    ) -> LinkFigures:
        figures = LinkFigures(
            bandwidth=self._figure(f"{where}-bandwidth", bandwidth, Dimension.BANDWIDTH),
            latency=self._figure(f"{where}-latency", latency, Dimension.TIME),
        )
        if samples is not None:
            found = self.faults.of(self._samples, where, samples)
            if found:
                figures = figures.over(
                    from_samples(found, samples, devices_per_node=devices_per_node)
                )
        return figures

    def _figure(self, option: str, text: str | None, dimension: Dimension) -> Figure | None:
        if text is None:
            return None
        value = self.faults.of(quantity, option, text, dimension)
        return Figure(value=value or 0.0, source=f"given (--{option})")

    def _samples(self, where: str, name: str) -> list[LinkSample]:
        """Samples of the link of this name: of the newest population, as a fit takes them."""
        if self.stored is None:
            from hetplan.predict.populations import choose
            from hetplan.profiling.store import read_populations

            store = self.request.store
            folders = stores_to_read(None if store is None else [store])
            self.stored = {}
            for sample in choose(read_populations(*folders)).links:
                self.stored.setdefault(sample.link, []).append(sample)
        if name in self.stored:
            return self.stored[name]
        have = ", ".join(sorted(self.stored)[:20]) or "none"
        message = (
            f"the store has no link samples {name[:60]!a} (it has: {have}); add them with `hetplan "
            f"import nccl-tests FILE --link NAME`"
        )
        raise InputError(Fault(field=f"--{where}-samples", message=message))
