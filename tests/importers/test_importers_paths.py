"""perftest and iperf3: units, directions and round trips."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importers_golden_inputs import FOLDER
from importers_renderers import perftest_bandwidth, perftest_latency

from hetplan.errors import InputError
from hetplan.importers import iperf3, perftest
from hetplan.importers.records import ImportContext, PathFigures

CONTEXT = ImportContext(file="run.txt")
ROWS = st.lists(
    st.tuples(
        st.integers(min_value=1, max_value=23).map(lambda n: 2**n),
        st.integers(min_value=100, max_value=9_999_999),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=15, deadline=None)
@given(rows=ROWS, queues=st.integers(min_value=1, max_value=64), gbits=st.booleans())
def test_printed_bandwidths_come_back(
    rows: list[tuple[int, int]], queues: int, gbits: bool
) -> None:
    text = perftest_bandwidth(rows, verb="RDMA_Read", queues=queues, gbits=gbits)
    unit = 1e9 / 8 if gbits else 2**20
    assert perftest.parse(text, CONTEXT).paths == tuple(
        PathFigures(
            measured="RDMA_Read bandwidth",
            message_bytes=size,
            bandwidth_bytes_per_second=hundredths / 100 * unit,
            streams=queues,
        )
        for size, hundredths in rows
    )


@settings(max_examples=10, deadline=None)
@given(rows=ROWS, verb=st.sampled_from(("RDMA_Read", "RDMA_Write", "Send")))
def test_printed_latencies_come_back(rows: list[tuple[int, int]], verb: str) -> None:
    paths = perftest.parse(perftest_latency(rows, verb=verb), CONTEXT).paths
    for path, (size, hundredths) in zip(paths, rows, strict=True):
        seconds = hundredths / 100 / 1e6
        assert (path.measured, path.message_bytes) == (f"{verb} latency", size)
        if verb == "RDMA_Read":  # timed there and back
            assert (path.round_trip_seconds, path.latency_seconds) == (seconds, None)
        else:
            assert (path.latency_seconds, path.round_trip_seconds) == (seconds, 2 * seconds)


@pytest.mark.parametrize("gbits", [True, False])
def test_a_header_with_the_wrong_unit_is_found(gbits: bool) -> None:
    text = perftest_bandwidth([(65536, 9000)], verb="Send", queues=1, gbits=gbits)
    other = ("Gb/sec", "MB/sec") if gbits else ("MB/sec", "Gb/sec")
    with pytest.raises(InputError, match=r"run.txt:14: BW average is .* unit was changed"):
        perftest.parse(text.replace(*other), CONTEXT)


def test_both_directions_are_halved() -> None:
    rows = [(65536, 36000)]
    one = perftest.parse(
        perftest_bandwidth(rows, verb="RDMA_Write", queues=1, gbits=True), CONTEXT
    ).paths[0]
    both = perftest.parse(
        perftest_bandwidth(rows, verb="RDMA_Write Bidirectional", queues=1, gbits=True), CONTEXT
    ).paths[0]
    assert one.bandwidth_bytes_per_second == 45e9
    assert both.bandwidth_bytes_per_second == 22.5e9


def test_the_unit_of_json_follows_from_the_rate_of_messages() -> None:
    path = FOLDER / "perftest" / "write-bw-json.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    gbits = perftest.parse(json.dumps(document), CONTEXT).paths[0]
    assert gbits.bandwidth_bytes_per_second == 92.31 * 1e9 / 8
    document["results"]["BW_average"] = 11004.21  # the same, as the default unit says it
    mebibytes = perftest.parse(json.dumps(document), CONTEXT).paths[0]
    assert mebibytes.bandwidth_bytes_per_second == 11004.21 * 2**20
    document["results"]["BW_average"] = 500.0
    with pytest.raises(InputError, match="neither MiB/s nor Gb/s"):
        perftest.parse(json.dumps(document), CONTEXT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no row of results"),
        (" 65536      5000             86.36              86.31     0.16", "without the header"),
        (" #bytes #iterations BW peak[MB/sec] BW average[kB/sec] MsgRate[Mpps]\n", "'kB/sec'"),
        (" Couldn't connect to 10.0.0.1:18515\n", "perftest failed: \"Couldn't connect"),
    ],
)
def test_what_is_no_output_of_perftest_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        perftest.parse(text, CONTEXT)


def test_times_outside_their_own_range_are_refused() -> None:
    text = perftest_latency([(8, 250)], verb="Send").replace("2.50 ", "250.0", 1)
    with pytest.raises(InputError, match=r"run.txt:7: t_typical is 250, outside t_min 2.25"):
        perftest.parse(text, CONTEXT)


def iperf(name: str) -> dict:
    return json.loads((FOLDER / "iperf3" / name).read_text(encoding="utf-8"))


def parse(document: dict) -> tuple[PathFigures, ...]:
    return iperf3.parse(json.dumps(document, indent=1), CONTEXT).paths


def test_an_error_of_iperf_is_told_with_its_line() -> None:
    document = iperf("udp.json") | {"error": "unable to connect to server: Connection refused"}
    with pytest.raises(InputError, match=r"run.txt:\d+: iperf3 failed: 'unable to connect to"):
        parse(document)
    two = json.dumps(iperf("udp.json")) + "\n"
    with pytest.raises(InputError, match=r"run.txt:2: something follows the JSON document"):
        iperf3.parse(two + two, CONTEXT)
    with pytest.raises(InputError, match="run iperf3 with -J"):
        iperf3.parse("[ ID] Interval  Transfer  Bitrate\n", CONTEXT)


def test_loss_of_tcp_needs_the_segment_size() -> None:
    document = iperf("tcp-four-streams.json")
    sent = document["end"]["sum_sent"]
    (path,) = parse(document)
    segments = -(-sent["bytes"] // 1428)
    assert path.loss_fraction == pytest.approx(42 / (segments + 42))
    del document["start"]["tcp_mss_default"]
    assert parse(document)[0].loss_fraction is None


def test_a_client_that_was_stopped_says_only_what_it_sent() -> None:
    document = iperf("tcp-four-streams.json")
    document["end"]["sum_received"] |= {"bytes": 0, "bits_per_second": 0}
    imported = iperf3.parse(json.dumps(document), CONTEXT)
    sent = document["end"]["sum_sent"]["bits_per_second"]
    assert imported.paths[0].bandwidth_bytes_per_second == sent / 8
    assert "the receiver reported nothing" in imported.notes[0]


def test_reverse_and_old_udp() -> None:
    document = iperf("udp.json")
    document["start"]["test_start"]["reverse"] = 1
    del document["end"]["sum_received"], document["end"]["sum_sent"]
    (path,) = parse(document)
    assert path.measured == "UDP bandwidth, server to client"
    assert path.loss_fraction == 0.002
    del document["end"]["sum"]
    with pytest.raises(InputError, match="the run did not end"):
        parse(document)


@settings(max_examples=10, deadline=None)
@given(
    rate=st.floats(min_value=1e3, max_value=1e13),
    trip=st.integers(min_value=1, max_value=10**7),
    window=st.integers(min_value=1, max_value=2**31),
    streams=st.integers(min_value=1, max_value=16),
)
def test_figures_of_tcp_come_back(rate: float, trip: int, window: int, streams: int) -> None:
    document = iperf("tcp-four-streams.json")
    document["end"]["streams"] = [document["end"]["streams"][0]] * streams
    document["end"]["streams"][0]["sender"] |= {"mean_rtt": trip, "max_snd_cwnd": window}
    document["start"]["test_start"]["num_streams"] = streams
    document["end"]["sum_received"]["bits_per_second"] = rate
    (path,) = parse(document)
    assert path.bandwidth_bytes_per_second == rate / 8
    assert path.round_trip_seconds == pytest.approx(trip / 1e6)
    assert (path.window_bytes, path.streams) == (window, streams)
