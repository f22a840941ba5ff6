"""A small job over four emulated hosts in two regions, and what the tests do to such hosts."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import runtime_cases
from emulation_cases import four_hosts
from runtime_cases import gpt

from hetplan.cluster.spec import Cluster
from hetplan.emulation import namespaces
from hetplan.emulation.running import start
from hetplan.emulation.values import Emulation
from hetplan.job.spec import Job, Pins
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.predict.fit import fit_stores
from hetplan.predict.predictor import Predictor
from hetplan.profiling.pacing import Pace, PacedKind, PaceEntry
from hetplan.search.result import SearchResult
from hetplan.search.search import search

KINDS = (("emulated-fast", 3), ("emulated-medium", 2), ("emulated-slow", 2))
"""Relative speeds."""
LAYER_SECONDS = 0.008
"""Of a sample's forward pass through one layer at speed 1."""
BATCH = 8


def cluster() -> Cluster:
    """The shipped one with devices so slow that every host is worth its link, and with what
    datasheet figures need to price plans.
    """
    shipped, speeds = four_hosts(), dict(KINDS)
    islands = []
    for island in shipped.islands:
        device = replace(
            island.device,
            peak_flops_per_second=(("float32", 1e8 * speeds[island.device.kind]),),
            memory_bandwidth_bytes_per_second=10e9,
        )
        islands.append(replace(island, device=device))
    return replace(shipped, islands=tuple(islands))


def model() -> ModelSpec:
    return gpt(num_layers=8, vocab_size=128, max_sequence_length=32)


def job() -> Job:
    pins = Pins(
        pipelines=1, same_degrees=True, virtual_stages=1, depth=0, sharded_optimizer=False, dp=1
    )
    return runtime_cases.job(BATCH, sequence_length=32, pin=pins)


def predictor() -> tuple[Predictor, str]:
    """Datasheet figures alone."""
    return fit_stores()


def planned() -> SearchResult:
    asks, digest = predictor()
    return search(model(), cluster(), job(), asks, sha256=(("predictor", digest),))


def pace() -> Pace:
    """Every pass takes its kind's time: steps of some tenths of a second on any machine."""
    return Pace(
        kinds=tuple(
            PacedKind(
                device=kind,
                slow_down=1.0,
                entries=tuple(
                    PaceEntry(
                        layer=layer,
                        phase=phase,
                        microbatch_size=size,
                        tp=1,
                        seconds=size * LAYER_SECONDS * weight * times / speed,
                    )
                    for layer, weight in (
                        (LayerKind.EMBEDDING, 0.1),
                        (LayerKind.TRANSFORMER, 1.0),
                        (LayerKind.HEAD, 0.3),
                    )
                    for phase, times in (("forward", 1.0), ("backward", 2.0))
                    for size in (1, 2, 4, 8)
                ),
            )
            for kind, speed in KINDS
        )
    )


def processes_on(emulation: Emulation, *hosts: str) -> tuple[int, ...]:
    """On these hosts, or on all."""
    spaces = [host.namespace for host in emulation.hosts if not hosts or host.name in hosts]
    inodes = {os.stat(namespaces.path_of(space)).st_ino for space in spaces}
    return namespaces.processes_in(inodes)


def set_link(emulation: Emulation, host: str, state: str, interface: str = "eth0") -> None:
    command = ("ip", "link", "set", interface, state)
    assert start(emulation, host, command, stderr=subprocess.DEVNULL).wait(30) == 0
