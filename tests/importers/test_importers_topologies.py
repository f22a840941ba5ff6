"""Topologies: what is rendered is read back, and what is not whole is refused with its line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from topologies_rendered import (
    npu_topologies,
    nvidia_topologies,
    render_npu,
    render_nvidia,
    render_rocm,
    rocm_topologies,
)

from hetplan.errors import InputError
from hetplan.importers import npu_topo, nvidia_topo, rocm_topo
from hetplan.importers.records import ImportContext, NodeTopology
from hetplan.importers.table import importer_called

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "importers"
CONTEXT = ImportContext(file="topo")
few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@few
@given(
    topology=nvidia_topologies,
    separator=st.sampled_from(["\t", "   "]),
    escapes=st.booleans(),
    legend=st.booleans(),
)
def test_nvidia_reads_what_is_rendered(
    topology: NodeTopology, separator: str, escapes: bool, legend: bool
) -> None:
    text = render_nvidia(topology, separator=separator, escapes=escapes, legend=legend)
    assert nvidia_topo.parse(text, CONTEXT).topology == topology


@few
@given(topology=npu_topologies)
def test_npu_reads_what_is_rendered(topology: NodeTopology) -> None:
    assert npu_topo.parse(render_npu(topology), CONTEXT).topology == topology


@few
@given(topology=rocm_topologies, before=st.sampled_from(["", "WARNING: low power\n\n"]))
def test_rocm_reads_what_is_rendered(topology: NodeTopology, before: str) -> None:
    imported = rocm_topo.parse(render_rocm(topology, before), CONTEXT)
    assert imported.topology == topology


def _refused(kind: str, text: str) -> InputError:
    parse = importer_called(kind).parse
    with pytest.raises(InputError) as caught:
        parse(text, CONTEXT)
    assert all(fault.file == "topo" for fault in caught.value.faults)
    return caught.value


def a100() -> str:
    return (GOLDEN / "nvidia-topo" / "a100-8.txt").read_text(encoding="utf-8")


def test_every_truncation_of_the_matrix_is_refused_with_a_line() -> None:
    text = a100()
    end = text.index("\n\nLegend")
    # The last row's last label is whole with its last letter; what follows is only empty cells.
    for size in range(len("\x1b[4m\tGPU0"), text.rindex("X", 0, end)):
        error = _refused("nvidia-topo", text[:size])
        assert all(fault.line >= 1 for fault in error.faults), (size, str(error))


def test_a_cut_legend_of_nics_is_refused() -> None:
    error = _refused("nvidia-topo", a100().replace("  NIC4: mlx5_4\n", ""))
    assert "NIC4" in str(error)


def test_an_asymmetric_matrix_names_both_lines() -> None:
    lines = a100().split("\n")
    lines[3] = lines[3].replace("NV12", "SYS", 1)
    error = _refused("nvidia-topo", "\n".join(lines))
    assert "line 2 says" in str(error)
    assert error.faults[0].line == 4


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("NV12\tNV12\tNV12", "NV12\tFOO\tNV12", "FOO"),
        (" X \tNV12", "NV12\tNV12", "lost"),
        ("\tGPU1\t", "\tGPU0\t", "twice"),
        ("CPU Affinity", "CPU Affin", "cut off"),
        ("NIC1: mlx5_1", "NIC1: mlx5_0", "mlx5_0"),
        ("GPU3\tNV12", "GPU4\tNV12", "GPU3"),
    ],
)
def test_what_is_wrong_in_a_matrix_is_named(old: str, new: str, word: str) -> None:
    assert old in a100()
    assert word in str(_refused("nvidia-topo", a100().replace(old, new, 1)))


def test_rocm_pairs_must_be_there_and_agree() -> None:
    text = (GOLDEN / "rocm-topo" / "mi210-8.json").read_text(encoding="utf-8")
    data = json.loads(text)
    kind = "(Topology) Link type between DRM devices"
    missing = json.loads(text)
    del missing["system"][f"{kind} 2 and 3"]
    assert "2 and 3" in str(_refused("rocm-topo", json.dumps(missing)))
    data["system"][f"{kind} 3 and 2"] = "PCIE"
    assert "other direction" in str(_refused("rocm-topo", json.dumps(data)))
    data["system"][f"{kind} 3 and 2"] = "XGMI"
    assert rocm_topo.parse(json.dumps(data), CONTEXT).topology is not None


def test_a_device_that_cannot_be_asked_says_so() -> None:
    error = _refused("npu-topo", "This device does not support querying topo.\n")
    assert "does not support" in str(error)


def _tables(topology: NodeTopology, *, types_only: bool = False) -> str:
    """As rocm-smi --showtopo without --json; with `types_only` as --showtopotype."""
    size = len(topology.devices)
    bar = "=" * 25
    lines = ["", f"{bar} ROCm System Management Interface {bar}"]
    what = [("Link Type", [path.path for path in topology.paths])]
    if not types_only:
        what.insert(0, ("Hops", [str(path.hops) for path in topology.paths]))
        what.insert(0, ("Weight", [str(path.weight) for path in topology.paths]))
    names = [f"GPU{device.index}" for device in topology.devices]
    for title, cells in what:
        value = dict(zip([path.between for path in topology.paths], cells, strict=True))
        lines += [f"{bar} {title} between two GPUs {bar}"]
        lines += [" " * 7 + "".join(name.ljust(13) for name in names)]
        for low in range(size):
            row = [names[low].ljust(7)]
            for high in range(size):
                ends = topology.devices[min(low, high)].name, topology.devices[max(low, high)].name
                row.append(("0" if low == high else value[ends]).ljust(13))
            lines.append("".join(row))
        lines.append("")
    if not types_only:
        lines.append(f"{bar} Numa Nodes {bar}")
        for device in topology.devices:
            node = -1 if device.numa_node is None else device.numa_node
            lines.append(f"GPU[{device.index}]\t\t: (Topology) Numa Node: {node}")
            lines.append(f"GPU[{device.index}]\t\t: (Topology) Numa Affinity: {node}")
    return "\n".join([*lines, f"{bar} End of ROCm SMI Log {bar}", ""])


def _in_tables(topology: NodeTopology) -> NodeTopology:
    """The same topology under the names that the tables have."""

    def name(card: str) -> str:
        return card.replace("card", "GPU")

    return dataclasses.replace(
        topology,
        devices=tuple(dataclasses.replace(each, name=name(each.name)) for each in topology.devices),
        paths=tuple(
            dataclasses.replace(each, between=(name(each.between[0]), name(each.between[1])))
            for each in topology.paths
        ),
    )


@few
@given(topology=rocm_topologies, before=st.sampled_from(["", "  "]))
def test_rocm_tables_are_read_as_the_json_is(topology: NodeTopology, before: str) -> None:
    text = "\n".join(before + line for line in _tables(topology).split("\n"))
    assert rocm_topo.parse(text, CONTEXT).topology == _in_tables(topology)


@few
@given(topology=rocm_topologies)
def test_the_table_of_link_types_alone_is_enough(topology: NodeTopology) -> None:
    found = rocm_topo.parse(_tables(topology, types_only=True), CONTEXT).topology
    assert found is not None
    assert [each.path for each in found.paths] == [each.path for each in topology.paths]
    assert all(each.numa_node is None for each in found.devices)


BOX = "\n".join(
    [
        "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID",
        "GPU0\t X \tNV4\tPIX\tSYS\t0-11,24-35\t0\t\tN/A",
        "GPU1\tNV4\t X \tSYS\tPIX\t12-23,36-47\t1\t\tN/A",
        "NIC0\tPIX\tSYS\t X \tSYS",
        "NIC1\tSYS\tPIX\tSYS\t X ",
        "",
        "Legend:",
        "",
        "  X    = Self",
        "",
        "NIC Legend:",
        "",
        "  NIC0: mlx5_3",
        "  NIC1: mlx5_7",
        "",
    ]
)


def test_the_numa_node_of_a_device_whose_memory_has_one_too() -> None:
    grace = BOX.replace("0\t\tN/A", "0,4-7\t\t2").replace("1\t\tN/A", "1,12-15\t\t10")
    topology = nvidia_topo.parse(grace, CONTEXT).topology
    assert topology is not None
    assert [device.numa_node for device in topology.devices] == [0, 1]
    two = nvidia_topo.parse(
        BOX.replace("\t0\t\tN/A", "\t0-1\t\tN/A"), CONTEXT
    ).topology  # cores of two nodes: not one node
    assert two is not None
    assert [device.numa_node for device in two.devices] == [None, 1]
