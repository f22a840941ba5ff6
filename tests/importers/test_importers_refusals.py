"""What no importer may take for a measurement: a clean error with the line, and what to do."""

from __future__ import annotations

import json

import pytest
from importers_golden_inputs import FOLDER

from hetplan.errors import InputError
from hetplan.importers.table import import_text

HEADER = "#  size  count  type  redop  root  time  algbw  busbw  #wrong"
ROW = "  1000000  250000  float  sum  -1  500.0  2.00  3.50  0"
RUN = f"{HEADER}\n{ROW}\n"
RANKS = "".join(
    f"#  Rank  {rank} Group  0 Pid  9{rank} on  alder device  {rank} [0x0{rank}] Acme X1\n"
    for rank in range(8)
)
PERFTEST = " #bytes  #iterations  BW peak[Gb/sec]  BW average[Gb/sec]  MsgRate[Mpps]\n"
PRINTED = "Connecting to host alder, port 5201\n"
INTERVAL = "[  5]   0.00-1.00   sec   999 MBytes  7.00 Gbits/sec    0   1.00 MBytes\n"
ROCM_TABLE = (
    "================ ROCm System Management Interface ================\n"
    "============= Link Type between two GPUs =============\n"
    "       GPU0   GPU1\nGPU0   0      XGMI\nGPU1   XGMI   0\n"
)
TEXTS = (
    ("hostfile", "node1 slots=0", ":1: slots: found '0'"),
    ("hostfile", "node1 slots=8 slots=8", "'slots' is given twice"),
    ("hostfile", "node1 slots=8 max_slots=4", "max_slots is 4, less than slots, 8"),
    ("hostfile", "\nnode1 slot=8", ":2: found 'slot=8'; a hostfile has slots"),
    ("hostfile", "node1 type=A100\nnode1 type=H100", ":2: node1 has the types A100 and H100"),
    ("hostfile", "^node1", "a host name or an address"),
    ("hostfile", "# nothing", "names no host"),
    ("slurm-nodes", "node[1-999999999]", "stands for 999999999 hosts; 2097152 are read at most"),
    ("slurm-nodes", "[1,0]" * 20000, "stands for 10**18 or more hosts"),
    ("slurm-nodes", "node[1-4", "a bracket is not closed"),
    ("slurm-nodes", "node[4-1]", "the range 4-1 ends before it begins"),
    ("slurm-nodes", "node1,,node2", "an empty name"),
    ("slurm-nodes", "node[1-3] 8(x2)", "there are 2 counts for 3 nodes"),
    ("slurm-nodes", "node[1-2] 8(x999999999)", "counts are written as in 2(x3),1"),
    ("slurm-nodes", "SLURM_JOB_NODELIST=n[1-3]\nSLURM_NNODES=4", ":2: there are 4 nodes by this"),
    ("slurm-nodes", "SLURM_NODELIST=a1\nSLURM_JOB_NODELIST=a2", "is not the list of SLURM_NODE"),
    ("slurm-nodes", "SLURM_JOB_ID=4", "names no node"),
    ("nccl-tests", f"# nranks 4\n{RUN}", "does not say which program"),  # 3.5 is not 1.5 times 2
    ("nccl-tests", RANKS.replace("Rank  2", "Rank  9") + RUN, "rank 2 is missing"),
    ("nccl-tests", RANKS + RANKS.splitlines(True)[0] + RUN, "make MPI=1"),
    ("nccl-tests", ROW, "without the header"),
    ("nccl-tests", f"{RANKS}a: Test NCCL failure common.cu:1012\n", "Test NCCL failure common.cu"),
    (
        "nccl-tests",
        f"{RANKS}#      in-place      out-of-place\n{RUN}",
        ":9: in-place stands before out-of-place; this is another program's table",
    ),
    ("rccl-tests", "numCycle,collective,gpus,size,type\n# rccl-tests", "-Z json"),
    ("perftest", "", "no row of results"),
    ("perftest", PERFTEST.replace("Gb", "kB"), "'kB/sec'"),
    ("perftest", " Couldn't connect to 10.0.0.1:18515\n", "perftest failed: \"Couldn't connect"),
    ("iperf3", PRINTED + INTERVAL, "run it again with -J"),
    ("rocm-topo", ROCM_TABLE, "rocm-smi --showtopo --json"),
    ("iperf3", '{"start": {"version": "3", "version": "3"}}', "this key is already"),
    ("iperf3", '{"end": {}}\n{"end": {}}\n', ":2: something follows the JSON document"),
    ("npu-topo", "This device does not support querying topo.\n", "does not support"),
    ("nvidia-topo", ROCM_TABLE, "looks like rocm-topo"),
)
"""(kind, text, part of the error)."""
EDITS = (
    ("nvidia-topo/a100-8.txt", "NV12\tNV12\tNV12", "NV12\tFOO\tNV12", "FOO"),
    ("nvidia-topo/a100-8.txt", "\tGPU1\t", "\tGPU0\t", "twice"),
    ("nvidia-topo/a100-8.txt", "NIC1: mlx5_1", "NIC1: mlx5_0", "mlx5_0"),
    ("nvidia-topo/a100-8.txt", "  NIC4: mlx5_4\n", "", "NIC4"),
    ("nvidia-topo/a100-8.txt", "\nGPU2\tNV12", "\nGPU2\tSYS", ":4: GPU2 to GPU0 is SYS, but"),
    ("perftest/write-bw.txt", "average[MB/", "average[Gb/", "a number or a unit was changed"),
    (
        "nccl-tests/rows-without-a-time.txt",
        "   51.23",
        "    fast",
        ":18: time: found 'fast'; a num",
    ),
    ("nccl-tests/rows-without-a-time.txt", "concluded: all_reduce", "concluded: reduce", "several"),
    ("nccl-tests/several-devices-per-process.json", '"ngpus": 4', '"ngpus": 2', "busbw is"),
    ("iperf3/udp-reverse-old.json", '"sum"', '"none"', "the run did not end"),
)
"""(golden input, what stands there, what is put there, part of the error)."""


def refused(kind: str, text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        import_text(text, "f", kind=kind, link="l")
    assert all(fault.file == "f" for fault in caught.value.faults)
    return caught.value


@pytest.mark.parametrize(("kind", "text", "message"), TEXTS, ids=lambda text: str(text)[:30])
def test_a_wrong_text_is_refused(kind: str, text: str, message: str) -> None:
    assert message in str(refused(kind, text))


@pytest.mark.parametrize(("name", "old", "new", "message"), EDITS, ids=lambda text: str(text)[:30])
def test_a_changed_output_is_refused(name: str, old: str, new: str, message: str) -> None:
    path = FOLDER / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    assert message in str(refused(path.parent.name, text.replace(old, new, 1)))


def test_an_output_that_was_cut_is_refused() -> None:
    text = (FOLDER / "nvidia-topo" / "a100-8.txt").read_text(encoding="utf-8")
    end = text.index("\n\nLegend")
    # The last row's last label is whole with its last letter; what follows is only empty cells.
    for size in range(len("\x1b[4m\tGPU0"), text.rindex("X", 0, end)):
        assert all(fault.line >= 1 for fault in refused("nvidia-topo", text[:size]).faults), size
    pairs = json.loads((FOLDER / "rocm-topo" / "mi210-8.json").read_text(encoding="utf-8"))
    del pairs["system"]["(Topology) Link type between DRM devices 2 and 3"]
    assert "2 and 3" in str(refused("rocm-topo", json.dumps(pairs)))


def test_escapes_of_a_hostile_log_never_reach_the_terminal() -> None:
    text = (FOLDER / "nccl-tests" / "rows-without-a-time.txt").read_text(encoding="utf-8")
    text = text.replace("NVIDIA H100", "\x1b]0;evil\x07")
    text = text.replace("version 2", "version 2\x1b]0;evil\x07")
    imported = import_text(text, "f", kind="nccl-tests", link="l")
    texts = [imported.device_name, imported.tool_version, *imported.notes, *imported.skipped]
    assert all(each.isprintable() for each in texts)
    assert "\\x1b" in imported.device_name
