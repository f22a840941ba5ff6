"""What real tools write that a strict reader would refuse or misread."""

from __future__ import annotations

import json

import pytest

from hetplan.errors import InputError
from hetplan.importers.records import Imported
from hetplan.importers.table import import_text


def read(kind: str, text: str, link: str | None = None) -> Imported:
    """What the importer makes of a text."""
    return import_text(text, "input", kind=kind, link=link)


def slots(text: str) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in read("hostfile", text).hosts]


def test_open_mpi_takes_spaces_comments_of_slashes_and_max_slots_alone() -> None:
    assert slots("node1 slots = 4\nnode2 slots= 2 max_slots =8\n") == [("node1", 4), ("node2", 2)]
    assert slots("// racks 1 and 2\nnode1 slots=4\n  // node2 slots=4\n") == [("node1", 4)]
    assert slots("node1 max_slots=4\nnode2 slots=2 max-slots=4\n") == [("node1", 4), ("node2", 2)]


NODES = ["node1", "node2", "node3"]


@pytest.mark.parametrize(
    "text",
    [
        'declare -x SLURM_JOB_NODELIST="node[1-3]"\ndeclare -x SLURM_JOB_NAME="my job"\n',
        "NODELIST\nnode[1-3]\n",
        "HOSTNAMES\nnode1\nnode2\nnode3\n",
    ],
)
def test_what_other_slurm_commands_print_has_the_same_nodes(text: str) -> None:
    assert [host.name for host in read("slurm-nodes", text).hosts] == NODES


PAIR = json.dumps(
    {
        "system": {"(Topology) Link type between DRM devices 0 and 1": "XGMI"},
        "card0": {"(Topology) Numa Node": "0"},
        "card1": {"(Topology) Numa Node": "1"},
    }
)


@pytest.mark.parametrize("indent", [None, 2])
def test_warnings_around_the_json_are_passed_over(indent: int | None) -> None:
    text = json.dumps(json.loads(PAIR), indent=indent)
    imported = read("rocm-topo", f"WARNING: one\n{text}\n\nWARNING: low-power state\n")
    assert imported.topology is not None
    assert [path.path for path in imported.topology.paths] == ["XGMI"]


def test_the_table_of_rocm_smi_is_not_taken_for_one_of_nvidia_smi() -> None:
    text = (
        "================ ROCm System Management Interface ================\n"
        "============= Link Type between two GPUs =============\n"
        "       GPU0   GPU1\nGPU0   0      XGMI\nGPU1   XGMI   0\n"
    )
    with pytest.raises(InputError) as caught:
        read("nvidia-topo", text)
    assert "looks like rocm-topo" in str(caught.value)
    assert read("rocm-topo", text).topology is not None


HEAD = """\
# Collective test starting: {name}_perf
# nThread 1 nGpus 4 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#  Rank  0 Group  0 Pid     41 on      node1 device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid     41 on      node1 device  1 [0x08] NVIDIA A100-SXM4-80GB
#  Rank  2 Group  0 Pid     41 on      node1 device  2 [0x09] NVIDIA A100-SXM4-80GB
#  Rank  3 Group  0 Pid     41 on      node1 device  3 [0x0a] NVIDIA A100-SXM4-80GB
#       size         count      type   redop    root     time   algbw   busbw #wrong
"""


COLUMNS = " #bytes  #iterations  BW peak[Gb/sec]  BW average[Gb/sec]  MsgRate[Mpps]\n"


def test_each_side_of_report_both_is_not_halved_once_more() -> None:
    text = (
        "                    RDMA_Write Bidirectional BW Test\n"
        + COLUMNS
        + " 65536   5000   390.00   380.00   0.724792\n\n Local results: \n"
        + COLUMNS
        + " 65536   5000   195.00   188.00   0.358582\n\n Remote results: \n"
        + COLUMNS
        + " 65536   5000   195.00   192.00   0.366211\n"
    )
    imported = read("perftest", text)
    rates = [path.bandwidth_bytes_per_second for path in imported.paths]
    assert rates == [190e9 / 8, 188e9 / 8, 192e9 / 8]
    assert any("local side" in note for note in imported.notes)


def test_the_next_test_of_a_file_has_no_side() -> None:
    title = "                    RDMA_Write Bidirectional BW Test\n"
    row = " 65536   5000   390.00   380.00   0.724792\n"
    text = title + COLUMNS + row + " Local results: \n" + COLUMNS + row + title + COLUMNS + row
    rates = [path.bandwidth_bytes_per_second for path in read("perftest", text).paths]
    assert rates == [190e9 / 8, 380e9 / 8, 190e9 / 8]


def test_a_decimal_comma_is_refused_with_its_column() -> None:
    text = COLUMNS + " 65536   5000   390,00   380,00   0,724792\n"
    with pytest.raises(InputError, match="BW peak: found '390,00'"):
        read("perftest", text)


def test_escapes_of_a_hostile_log_never_reach_the_terminal() -> None:
    evil = "\x1b]0;evil\x07"
    row = "     4194304  1048576  float  sum  -1  100.0  41.94  62.91  0\n"
    text = "nccl-tests version 2" + evil + "\n" + HEAD.format(name="all_reduce") + row
    text = text.replace("device  1 [0x08] NVIDIA", f"device  1 [0x08] {evil}")
    text = text.replace("device  0 [0x07] NVIDIA", f"device  0 [0x07] {evil}")
    imported = read("nccl-tests", text, link="nvlink")
    said = [imported.device_name, imported.tool_version, *imported.notes, *imported.skipped]
    assert all(each.isprintable() for each in said)
    assert "\\x1b" in imported.device_name
