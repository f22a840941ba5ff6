"""`node: NAME` in an island: what it fills in, what stands against it, and that all of it plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster, Island
from hetplan.cluster.templates import node_templates
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.library.verbs import plan
from hetplan.model.spec import Architecture, plain_model
from hetplan.predict.fit import FittedPredictor, with_shipped

HEAD = """schema: hetplan.cluster/3
name: nodes
regions:
  - name: here
    islands:
      - name: only
        nodes: 2
"""


def read(folder: Path, *lines: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(HEAD + "".join(f"        {line}\n" for line in lines))
    return load_cluster(path)


def only(folder: Path, *lines: str) -> Island:
    return read(folder, *lines).islands[0]


@pytest.mark.parametrize("name", node_templates())
def test_every_node_can_be_planned_for(tmp_path: Path, name: str) -> None:
    template = node_templates()[name]
    cluster = read(tmp_path, f"node: {name}")
    island = cluster.islands[0]
    assert (island.device.kind, island.devices_per_node) == (template.device, template.devices)
    assert island.nics is not None
    assert template.source
    whole = island.nics.per_node * island.nics.bandwidth_bytes_per_second
    link = cluster.link_between("only", "only")
    everyone = link.among(island.num_devices).bandwidth_bytes_per_second
    assert everyone * island.devices_per_node <= whole * (1 + 1e-9)
    # A fabric carries more inside a node than its network outside, but for PCIe beside fast NICs.
    if template.fabric != "pcie-tree":
        assert island.intra_node.bandwidth_bytes_per_second > everyone
    old = island.device.architecture == "sm70"  # which has no bfloat16
    model = plain_model(
        name="small",
        architecture=Architecture.LLAMA,
        num_layers=2,
        hidden_size=256,
        vocab_size=512,
        max_sequence_length=256,
        ffn_hidden_size=512,
        num_attention_heads=8,
        num_kv_heads=8,
        head_dim=32,
    )
    job = Job(
        name="small",
        global_batch_size=island.num_devices,
        sequence_length=256,
        precision=Precision.FLOAT16 if old else Precision.BFLOAT16,
        optimizer=Optimizer.ADAMW,
        target="megatron",
    )
    found = plan(model, cluster, job, with_shipped(FittedPredictor.datasheet_only()))
    assert found.estimate.step_seconds > 0


def test_what_the_island_says_itself_stands(tmp_path: Path) -> None:
    found = only(
        tmp_path,
        "node: mi300x-oam-8",
        "devices_per_node: 4",
        "intra_node: {bandwidth: 350 GB/s}",
        "inter_node: {bandwidth: 25 GB/s, latency: 9 us}",
    )
    assert (found.devices_per_node, found.nics) == (4, None)
    assert found.intra_node.bandwidth_bytes_per_second == 350e9
    assert found.intra_node.one_peer_bytes_per_second == 50e9
    assert (found.inter_node.bandwidth_bytes_per_second, found.inter_node.latency_seconds) == (
        25e9,
        9e-6,
    )


@pytest.mark.parametrize(
    ("lines", "field", "words"),
    [
        (("node: dgx-h10",), "node", "nearest: dgx-h100"),
        (("node: [1]",), "node", "write a text"),
        (("node: dgx-h100", "device: amd-mi300x"), "device", "has nvidia-h100-80gb-sxm"),
        (("node: dgx-h100", "devices_per_node: 16"), "devices_per_node", "has 8 devices"),
        (
            ("node: mi300x-oam-8", "intra_node: {bandwidth: 64 GB/s}"),
            "intra_node.bandwidth",
            "has 448 GB/s",
        ),
        (
            ("node: dgx-h100", "nics: {per_node: 8, bandwidth: 400 GB/s}"),
            "nics.bandwidth",
            "has 50 GB/s",
        ),
        (("devices_per_node: 8",), "device", "or node"),
    ],
)
def test_what_contradicts_its_node_is_refused(
    tmp_path: Path, lines: tuple[str, ...], field: str, words: str
) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, *lines)
    fault = next(each for each in error.value.faults if each.field.endswith(f".{field}"))
    # What an island without a known node lacks is not listed beside it.
    assert field != "node" or error.value.faults == (fault,)
    assert words in fault.message
    assert fault.line >= 5
