"""Forms in which people keep and show what the tools print: each is read, or refused by name."""

from __future__ import annotations

import json

import pytest

from hetplan.errors import InputError
from hetplan.importers import iperf3, nccl_tests, perftest, rccl_tests
from hetplan.importers.records import ImportContext, Imported

HEADER = "#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong"
UNITS = "#  (B)  (elements)  (us)  (GB/s)  (GB/s)  (us)  (GB/s)  (GB/s)"
# 1,000,000 bytes in 500 us are 2 GB/s, and 3.5 GB/s of bus among 8 ranks.
ROW = "  1000000  250000  float  sum  -1  500.0  2.00  3.50  0  400.0  2.50  4.38  0"
RANKS = "\n".join(
    f"#  Rank  {rank} Group  0 Pid  9{rank} on  alder device  {rank} [0x0{rank}] Acme X1"
    for rank in range(8)
)


def context(file: str = "run.log") -> ImportContext:
    return ImportContext(file=file, link="here")


def nccl(*parts: str, file: str = "run.log") -> Imported:
    return nccl_tests.parse("\n".join(parts) + "\n", context(file))


@pytest.mark.parametrize(
    "before",
    [
        "# nranks 8",
        "alder:9:12 [3] NCCL INFO comm 0x12 rank 3 nranks 8 cudaDev 3 - Init COMPLETE",
        RANKS.split("\n")[0] + "\n...\n# nranks 8",
    ],
)
def test_number_of_ranks_without_all_rank_lines(before: str) -> None:
    (sample,) = nccl(before, HEADER, UNITS, ROW).links
    assert (sample.group_size, sample.operation) == (8, "all_reduce")


def test_a_wrong_or_unclear_number_of_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="does not say which program"):
        nccl("# nranks 4", HEADER, UNITS, ROW)  # 3.5 is not 1.5 times 2
    with pytest.raises(InputError, match="add a line `# nranks 16`"):
        nccl("# nranks 4", "# nranks 8", HEADER, UNITS, ROW)
    with pytest.raises(InputError, match="rank 2 is missing"):
        nccl("\n".join(RANKS.split("\n")[:2] + RANKS.split("\n")[3:]), HEADER, UNITS, ROW)
    with pytest.raises(InputError, match="rank 0 is missing"):
        nccl(RANKS.split("\n")[7], "# nranks 7", HEADER, UNITS, ROW)  # rank 7 is the eighth


def test_rccl_json_with_one_object_per_line() -> None:
    def line(in_place: int, wrong: str = "0") -> str:
        values = {"#wrong": wrong, "algBw": 2.0, "busBw": 3.5, "gpus": 8, "inPlace": in_place}
        rest = {"name": "AllReduce", "redop": "sum", "size": 10**6, "time": 500.0, "type": "half"}
        return json.dumps(values | rest)

    imported = rccl_tests.parse("\n".join([line(0), line(1), line(0, "3")]) + "\n", context())
    (sample,) = imported.links
    assert (sample.group_size, sample.median_seconds) == (8, 500e-6)
    assert imported.skipped == ("line 3: 3 wrong elements",)


def test_perftest_of_2008_and_deep_indentation() -> None:
    text = (
        "          #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]\n"
        "               2        1000           1.40           7.00             1.50\n"
    )
    (path,) = perftest.parse(text, context()).paths
    assert (path.measured, path.latency_seconds) == ("Latency", 1.5e-6)


def test_perftest_without_its_title() -> None:
    text = "#bytes #iterations BW peak[Gb/sec] BW average[Gb/sec]\n 65536 5000 0.00 80.00\n"
    (path,) = perftest.parse(text, context()).paths
    assert (path.measured, path.bandwidth_bytes_per_second) == ("Bandwidth", 10e9)


def tcp() -> dict[str, dict[str, object]]:
    return {
        "start": {"version": "iperf 3.6", "test_start": {"protocol": "TCP", "num_streams": 2}},
        "end": {"streams": [], "sum_received": {"bits_per_second": 8e9}},
    }


def test_iperf3_repeats_the_buffer_sizes_per_stream() -> None:
    again = '"start": {"sock_bufsize": 0, "sndbuf_actual": 7, "sock_bufsize": 0, '
    text = json.dumps(tcp()).replace('"start": {', again)
    (path,) = iperf3.parse(text, context()).paths
    assert (path.bandwidth_bytes_per_second, path.streams) == (1e9, 2)
    with pytest.raises(InputError, match="this key is already"):
        iperf3.parse(text.replace("sock_bufsize", "version"), context())


def test_udp_of_old_versions_sums_what_was_sent() -> None:
    total = {"bits_per_second": 8e8, "lost_percent": 25.0}
    imported = iperf3.parse(json.dumps({"end": {"sum": total}}), context())
    assert imported.paths[0].bandwidth_bytes_per_second == 75e6
    assert imported.paths[0].loss_fraction == 0.25
    assert "less the loss" in imported.notes[0]


def test_udp_loss_above_all_packets_is_left_out() -> None:
    received = {"bits_per_second": 8e8, "lost_percent": 140.0}
    document = {"start": {"test_start": {"protocol": "UDP"}}, "end": {"sum_received": received}}
    imported = iperf3.parse(json.dumps(document), context())
    assert imported.paths[0].loss_fraction is None
    assert imported.paths[0].bandwidth_bytes_per_second == 1e8
    assert "140%" in imported.notes[0]


RULE = "- - - - - - - - - - - - -\n"
HEAD = "Connecting to host alder, port 5201\n"
INTERVALS = (
    "[  5]   0.00-1.00   sec   999 MBytes  7.00 Gbits/sec    0   1.00 MBytes\n"
    "[SUM]   0.00-1.00   sec   999 MBytes  7.00 Gbits/sec    0\n"
)


def test_printed_iperf3_with_streams() -> None:
    text = HEAD + RULE + INTERVALS + RULE
    for stream, sent, received in (("  5", 3.3, 3.2), ("  7", 5.1, 4.8), ("SUM", 8.4, 8.0)):
        text += f"[{stream}]   0.00-10.00  sec  9.00 GBytes  {sent:.2f} Gbits/sec   12   sender\n"
        text += f"[{stream}]   0.00-10.04  sec  9.00 GBytes  {received:.2f} Gbits/sec    receiver\n"
    imported = iperf3.parse(text + "\niperf Done.\n", context())
    (path,) = imported.paths
    assert (path.measured, path.streams) == ("TCP bandwidth", 2)
    assert path.bandwidth_bytes_per_second == pytest.approx(1e9)
    assert "-J" in imported.notes[0]


def test_printed_iperf3_in_reverse_and_both_ways() -> None:
    last = "[  5]{}   0.00-10.00  sec  1.00 GBytes   {}00 Mbits/sec   receiver\n"
    backwards = HEAD + "Reverse mode, remote host alder is sending\n" + last.format("", 8)
    both = HEAD + RULE + last.format("[TX-C]", 4) + last.format("[RX-C]", 2)
    paths = iperf3.parse(backwards + both, context()).paths
    rates = [path.bandwidth_bytes_per_second for path in paths]
    assert rates == pytest.approx([1e8, 5e7, 2.5e7])
    ways = [path.measured.endswith("server to client") for path in paths]
    assert ways == [True, False, True]


def test_printed_iperf3_whose_receiver_said_nothing() -> None:
    row = "[  5]   0.00-10.00  sec  9.00 GBytes  {} bits/sec   {}\n"
    text = HEAD + RULE + row.format("8.00 G", "0   sender").replace("G bits", "Gbits")
    imported = iperf3.parse(text + row.format("0.00", "receiver"), context())
    assert imported.paths[0].bandwidth_bytes_per_second == 1e9
    assert "what was sent" in imported.notes[1]


@pytest.mark.parametrize("side", ["", "receiver"])
def test_printed_udp(side: str) -> None:
    """A row without its side is what an old version sent."""
    text = (
        HEAD
        + "[ ID] Interval  Transfer  Bandwidth  Jitter  Lost/Total Datagrams\n"
        + RULE
        + f"[  5]   0.00-10.00  sec  9.00 MBytes  8.00 Mbits/sec  0.010 ms  10/100 (10%)  {side}\n"
    )
    (path,) = iperf3.parse(text, context()).paths
    assert (path.measured, path.loss_fraction) == ("UDP bandwidth", 0.1)
    assert path.bandwidth_bytes_per_second == pytest.approx(1e6 if side else 9e5)


def test_printed_iperf3_in_bytes() -> None:
    text = "[  5]   0.00-10.00  sec  9.00 GBytes  512 MBytes/sec   receiver\n"
    (path,) = iperf3.parse(text, context()).paths
    assert path.bandwidth_bytes_per_second == 2**29


@pytest.mark.parametrize("text", [HEAD + INTERVALS, HEAD + RULE + INTERVALS, "no such thing\n", ""])
def test_printed_iperf3_that_was_cut_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="run iperf3 with -J"):
        iperf3.parse(text, context())


def test_printed_iperf3_error() -> None:
    text = HEAD + "iperf3: error - unable to connect to server\n"
    with pytest.raises(InputError, match=r"run.log:2: iperf3 failed: .*unable to connect"):
        iperf3.parse(text, context())


def test_a_table_with_its_halves_exchanged_is_another_programs() -> None:
    swapped = "#                    in-place                     out-of-place"
    with pytest.raises(InputError, match=r"run\.log:10: .*another program"):
        nccl("# Collective test starting: all_reduce_perf", RANKS, swapped, HEADER, UNITS, ROW)
