"""Topologies and lists of hosts as people paste them: what a terminal, a log and a page add."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topologies_rendered import (
    npu_topologies,
    nvidia_topologies,
    render_npu,
    render_nvidia,
    rocm_topologies,
)

from hetplan.errors import InputError
from hetplan.importers import hostfile, npu_topo, nvidia_topo, rocm_topo, slurm_nodes
from hetplan.importers.records import ImportContext, NodeTopology

CONTEXT = ImportContext(file="paste")
few = settings(max_examples=40, deadline=None)

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


def read(text: str) -> NodeTopology | None:
    return nvidia_topo.parse(text, CONTEXT).topology


def glued(text: str, column: int, rows: int) -> str:
    """The first `rows` lines with the tab before this column lost, as at a terminal's edge."""
    lines = text.split("\n")
    for at in range(rows):
        cells = lines[at].split("\t")
        cells[column - 1 : column + 1] = ["".join(cells[column - 1 : column + 1])]
        lines[at] = "\t".join(cells)
    return "\n".join(lines)


@few
@given(topology=nvidia_topologies, data=st.data())
def test_two_columns_that_ran_together_are_told_apart(
    topology: NodeTopology, data: st.DataObject
) -> None:
    size = len(topology.devices) + len(topology.nics)
    if size < 2:
        return
    text = render_nvidia(topology, separator="\t", escapes=False, legend=True)
    column = data.draw(st.integers(2, size))
    rows = data.draw(st.sampled_from([1, size + 1]))
    if rows == 1:  # the header alone, as where rows are shorter
        assert read(glued(text, column, 1)) == topology
    else:
        assert read(glued(text.replace(" X ", "X"), column, rows)) == topology


@few
@given(topology=nvidia_topologies)
def test_a_path_that_ran_into_the_cores_is_read_right_or_refused(topology: NodeTopology) -> None:
    size = len(topology.devices) + len(topology.nics)
    text = render_nvidia(topology, separator="\t", escapes=False, legend=True)
    pasted = glued(text, size + 1, 1 + len(topology.devices))
    nvlink = any(path.path.startswith("NV") for path in topology.paths)
    try:
        found = read(pasted)
    except InputError:
        found = None
    # NV1 and 0-15 may be NV10 and -15: that is refused, and everything else is read.
    assert found == topology or (found is None and nvlink)


@few
@given(
    topology=nvidia_topologies,
    before=st.sampled_from(
        ["> ", "INFO 2026-03-04T05:06:07.123456789Z ", "3: ", "[node7] 12:30:01 I | "]
    ),
)
def test_what_a_log_or_a_mail_puts_before_each_line_is_left_out(
    topology: NodeTopology, before: str
) -> None:
    text = render_nvidia(topology, separator="\t", escapes=False, legend=True)
    assert read("\n".join(before + line for line in text.split("\n"))) == topology
    assert read("GPU topology: " + text) == topology  # a title before the column names alone


@pytest.mark.parametrize(("start", "end"), [("\ufffd[4m", "\ufffd[0m"), ("^[[4m", "^[[0m")])
def test_an_escape_that_became_other_characters_is_left_out(start: str, end: str) -> None:
    head, _, rest = BOX.partition("\n")
    assert read(f"{start}{head}{end}\n{rest}") == read(BOX)
    assert read(f"{start[-3:]}{head}{end[-3:]}\n{rest}") == read(BOX)


def test_a_fence_behind_the_last_word_is_left_out() -> None:
    assert read("```\n" + BOX.rstrip("\n") + "```") == read(BOX)
    assert read("```" + BOX + "```") == read(BOX)


def test_a_heading_that_a_terminal_broke_within_a_word_is_read() -> None:
    assert read(BOX.replace("NUMA Affinity", "NUMA Affini\nty", 1)) == read(BOX)


def test_swallowed_tabs_between_the_numa_node_and_na() -> None:
    assert read(BOX.replace("\t\tN/A", "N/A")) == read(BOX)


def test_a_legend_that_was_drawn_twice_is_read_and_two_legends_are_not() -> None:
    again = "  NIC0: mlx5_3   NIC1: mlx5_7\n"
    assert read(BOX + again) == read(BOX)
    with pytest.raises(InputError, match="keep one legend"):
        read(BOX + "  NIC0: mlx5_4\n")


def test_the_numa_node_of_a_device_whose_memory_has_one_too() -> None:
    grace = BOX.replace("0\t\tN/A", "0,4-7\t\t2").replace("1\t\tN/A", "1,12-15\t\t10")
    topology = read(grace)
    assert topology is not None
    assert [device.numa_node for device in topology.devices] == [0, 1]
    two = read(BOX.replace("\t0\t\tN/A", "\t0-1\t\tN/A"))  # cores of two nodes: not one node
    assert two is not None
    assert [device.numa_node for device in two.devices] == [None, 1]


def test_what_cannot_be_told_apart_is_refused() -> None:
    for wrong in ("NV4PIXX", "NVPIX", "PIXPIXPIX", "PI"):
        with pytest.raises(InputError):
            read(BOX.replace("NV4\tPIX", wrong, 1))
    with pytest.raises(InputError, match="one direction only"):
        read(BOX.replace("NIC0\tPIX\tSYS", "NIC0\tNODE\tSYS"))


@few
@given(topology=npu_topologies)
def test_npu_matrices_are_read_out_of_a_quoted_fence(topology: NodeTopology) -> None:
    text = "```text\n" + render_npu(topology) + "```"
    quoted = "\n".join("> " + line for line in text.split("\n"))
    assert npu_topo.parse(quoted, CONTEXT).topology == topology


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
@given(topology=rocm_topologies, before=st.sampled_from(["", "> "]))
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


PAIR = "\n".join(
    [
        "==== Weight between two GPUs ====",
        "       GPU0         GPU1         ",
        "GPU0   0            N/A          ",
        "GPU1   40           0            ",
        "==== Link Type between two GPUs ====",
        "       GPU0         GPU1         ",
        "GPU0   0            XGMI         ",
        "GPU1   XGMI         0            ",
    ]
)


def test_a_weight_that_the_tool_could_not_read_is_that_of_the_other_direction() -> None:
    topology = rocm_topo.parse(PAIR, CONTEXT).topology
    assert topology is not None
    assert topology.paths[0].weight == 40
    assert topology.paths[0].path == "XGMI"


def test_rocm_tables_that_were_cut_off_are_refused() -> None:
    for size in range(PAIR.index("Link Type") + 30, PAIR.rindex("0 ")):
        with pytest.raises(InputError):
            rocm_topo.parse(PAIR[:size], CONTEXT)


@pytest.mark.parametrize(
    ("old", "new", "line", "word"),
    [
        ("GPU1   XGMI", "GPU1   PCIE", 8, "other direction"),
        ("GPU1   XGMI", "GPU1   NVLK", 8, "expected"),
        ("GPU0   0            XGMI", "GPU0   XGMI         0   ", 7, "meets itself"),
        ("GPU1   40", "GPU1   x1", 4, "a number"),
        ("GPU0   0            N/A", "GPU0   0               ", 3, "1 entries for 2"),
        ("GPU1   XGMI", "GPU2   XGMI", 8, "row of GPU1"),
        ("Interface", "", 0, ""),
    ],
)
def test_faults_of_rocm_tables_name_their_line(old: str, new: str, line: int, word: str) -> None:
    if not line:
        with pytest.raises(InputError, match="neither JSON nor a table"):
            rocm_topo.parse("==== Numa Nodes ====\nGPU[0] : (Topology) Numa Node: 0\n", CONTEXT)
        return
    with pytest.raises(InputError, match=word) as caught:
        rocm_topo.parse(PAIR.replace(old, new, 1), CONTEXT)
    assert caught.value.faults[0].line == line


def test_one_device_has_a_table_of_one_entry() -> None:
    text = "== Link Type between two GPUs ==\n       GPU0 \nGPU0   0 \n== End ==\n"
    topology = rocm_topo.parse(text, CONTEXT).topology
    assert topology is not None
    assert [device.name for device in topology.devices] == ["GPU0"]


def test_slurm_variables_are_found_among_others_and_in_a_quote() -> None:
    text = "\n".join(
        [
            "> SLURM_CONF=/etc/slurm.conf",
            "> __LMOD_STACK_SLURM_MPI=L29wdC9z",
            "> SLURMD_NODENAME=gh004",
            "> SLURM_JOB_NODELIST=gh[004-006]",
            "> SLURM_JOB_NUM_NODES=3",
            "> ```",
        ]
    )
    imported = slurm_nodes.parse(text, CONTEXT)
    assert [host.name for host in imported.hosts] == ["gh004", "gh005", "gh006"]


def test_a_hostfile_is_read_out_of_a_quote_and_a_fence() -> None:
    text = "> ```\n> gpu-a slots=4\n> gpu-b slots=2\n> ```\n"
    hosts = hostfile.parse(text, CONTEXT).hosts
    assert [(host.name, host.slots) for host in hosts] == [("gpu-a", 4), ("gpu-b", 2)]
