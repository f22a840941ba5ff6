"""A small job over four emulated hosts in two regions, and the plans for parts of them."""

from __future__ import annotations

from pathlib import Path

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job, Optimizer, Pins, Precision
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.predict.fit import fit_stores
from hetplan.predict.predictor import Predictor
from hetplan.profiling.pacing import Pace, PacedKind, PaceEntry
from hetplan.search.result import SearchResult
from hetplan.search.search import search

KINDS = (("played-fast", 3), ("played-medium", 2), ("played-slow", 2))
"""Relative speeds."""
LAYER_SECONDS = 0.008
"""Of a sample's forward pass through one layer at speed 1."""
BATCH = 8


def cluster_text() -> str:
    devices = "".join(
        f"  - {{kind: {kind}, vendor: generic, memory: 1 GiB, memory_bandwidth: 10 GB/s, "
        f"peak: {{float32: {speed / 10} GFLOP/s}}, provenance: measured, source: played}}\n"
        for kind, speed in KINDS
    )
    link = "{bandwidth: 2 Gbit/s, latency: 50 us, transport: host-staged}"

    def island(name: str, kind: str, names: str, nodes: int) -> str:
        return (
            f"      - name: {name}\n        device: {kind}\n        nodes: {nodes}\n"
            f"        node_names: [{names}]\n        devices_per_node: 1\n"
            f"        intra_node: {link}\n        inter_node: {link}\n"
        )

    return (
        f"schema: hetplan.cluster/2\nname: elastic-test\ndevices:\n{devices}regions:\n"
        "  - name: north\n    islands:\n"
        + island("fast", "played-fast", "north1, north2", 2)
        + "  - name: south\n    islands:\n"
        + island("medium", "played-medium", "south1", 1)
        + island("slow", "played-slow", "south2", 1)
        + "links_default:\n"
        "  within_region: "
        "{bandwidth_per_device: 2 Gbit/s, latency: 50 us, transport: host-staged}\n"
        "  across_regions: {bandwidth_shared: 1 Gbit/s, round_trip: 2 ms, transport: host-staged}\n"
    )


def cluster(folder: Path) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(cluster_text())
    return load_cluster(path)


def model() -> ModelSpec:
    return plain_model(
        name="elastic-test",
        architecture=Architecture.GPT,
        num_layers=8,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_kv_heads=4,
        head_dim=8,
        vocab_size=128,
        max_sequence_length=32,
    )


def job() -> Job:
    return Job(
        name="elastic-test",
        global_batch_size=BATCH,
        sequence_length=32,
        precision=Precision.FLOAT32,
        optimizer=Optimizer.ADAMW,
        target="native",
        pin=Pins(
            pipelines=1,
            same_degrees=True,
            virtual_stages=1,
            depth=0,
            sharded_optimizer=False,
            dp=1,
        ),
    )


def predictor() -> tuple[Predictor, str]:
    """Datasheet figures alone."""
    return fit_stores()


def planned(folder: Path) -> SearchResult:
    asks, digest = predictor()
    return search(model(), cluster(folder), job(), asks, sha256=(("predictor", digest),))


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
