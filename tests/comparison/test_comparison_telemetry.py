"""Telemetry: what is read and refused, and who is accused of what (made-up telemetry only)."""

from __future__ import annotations

import json
import random
import socket
from dataclasses import asdict
from pathlib import Path

import pytest
from telemetry_cases import copies, csv_text, flows, run, stages_apart, timers, write
from typer.testing import CliRunner

from hetplan.cli.main import app
from hetplan.comparison.suspects import BLOCK, blocks, judge
from hetplan.comparison.telemetry import Run, Tail, read_telemetry
from hetplan.comparison.watch import watch
from hetplan.errors import InputError
from hetplan.launchers.run_folder import RunFolder
from hetplan.runtime import telemetry
from hetplan.runtime.loop import RankStep
from hetplan.runtime.telemetry import SCHEMA, Record, Recorder
from hetplan.search.files import save_result

RUN = run()
NODES = ("a-0", "a-1", "b-0", "b-1")
ACROSS = [(one, two) for one in NODES for two in NODES if one[0] != two[0]]
HEADER = "begin_seconds,window_seconds,source,target,bytes,busy_seconds,rank,step,part,seconds\n"


def named(records: list[Record], of: Run = RUN) -> list[tuple[str, str, str]]:
    return [(each.cause, each.kind, each.name) for each in judge(records, of).suspects]


# ---- who is accused


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_and_a_slow_host_are_told_apart(seed: int) -> None:
    rng = random.Random(seed)
    assert named(timers(RUN, rng, slow={3: 1.3})) == [("slow", "rank", "3 on a-0")]
    host = dict.fromkeys(range(4), 1.3)
    assert named(timers(RUN, rng, slow=host)) == [("slow", "host", "a-0")]


@pytest.mark.parametrize("noise", [0.02, 0.4])
def test_a_clean_run_accuses_nobody(noise: float) -> None:
    accused = 0
    for seed in range(60):
        rng = random.Random(seed)
        accused += bool(named(timers(RUN, rng, slow={}, noise=noise) + flows(ACROSS, rng)))
    assert accused <= 3  # 5 of 100


def test_who_waits_is_not_accused() -> None:
    """Ranks beside a slow one wait longer than they compute."""
    records = timers(RUN, random.Random(0), slow={0: 3.0})
    assert named(records) == [("slow", "rank", "0 on a-0")]


def test_a_host_that_alone_does_its_work_is_held_against_the_prediction() -> None:
    apart, rng = stages_apart(), random.Random(0)
    slow = dict.fromkeys(range(4), 3.0)
    assert named(timers(apart, rng, slow={}), apart) == []
    (suspect,) = judge(timers(apart, rng, slow=slow), apart).suspects
    assert (suspect.kind, suspect.name) == ("host", "a-0")
    assert "by the plan's prediction" in suspect.line


@pytest.mark.parametrize("way", [("a-0", "b-1"), ("b-1", "a-1")])
def test_a_slow_link_is_named_by_its_ends(way: tuple[str, str]) -> None:
    records = flows(ACROSS, random.Random(0), slow={way: 1.5})
    assert named(records) == [("slow", "link", " to ".join(way))]


def test_a_port_whose_flows_are_all_slow_is_the_nic() -> None:
    slow = {way: 1.6 for way in ACROSS if way[1] == "b-0"}
    records = flows(ACROSS, random.Random(0), slow=slow)
    assert named(records) == [("slow", "NIC", "b-0, what it receives")]


def test_a_lossy_link_hides_those_that_wait_for_it() -> None:
    records = flows(
        ACROSS, random.Random(0), lossy={ACROSS[0]: 0.02}, slow={ACROSS[0]: 1.5, ACROSS[3]: 1.3}
    )
    assert named(records) == [("lossy", "link", " to ".join(ACROSS[0]))]


def test_what_is_much_less_slow_than_the_slowest_waits_for_it() -> None:
    records = flows(ACROSS, random.Random(0), slow={ACROSS[0]: 2.5, ACROSS[3]: 1.3})
    assert named(records) == [("slow", "link", " to ".join(ACROSS[0]))]


def test_flows_without_busy_time_and_losses_say_so() -> None:
    rng = random.Random(0)
    assert named(flows(ACROSS, rng, busy=False)) == []
    records = [
        Record(**{**asdict(each), "resent_bytes": None})
        for each in flows(ACROSS, rng, slow={ACROSS[0]: 1.5})
    ]
    (suspect,) = judge(records, RUN).suspects
    assert suspect.note == "shaped or lossy cannot be told apart"


def test_a_flow_without_its_like_is_held_against_its_link() -> None:
    """The link between the islands: 1 GB/s for each of four devices, 5 ms."""
    size, window = 4e8, 10.0
    for rate, expected in ((3.5e9, []), (1e9, [("slow", "link", "a-0 to b-0")])):
        records = [
            Record(
                begin_seconds=at * window,
                window_seconds=window,
                source="a-0",
                target="b-0",
                bytes=size,
                busy_seconds=size / rate,
            )
            for at in range(20)
        ]
        assert named(records) == expected


def test_a_fault_of_a_part_of_the_run_is_found_with_its_block() -> None:
    rng = random.Random(0)
    clean, slow = (timers(RUN, rng, steps=60, slow=each) for each in ({}, {5: 1.5}))
    records = [
        one if 20 <= (one.step or 0) < 40 else other for one, other in zip(slow, clean, strict=True)
    ]
    (suspect,) = judge(records, RUN).suspects
    assert (suspect.name, suspect.first) == ("5 on a-1", 20)
    assert 0.999 < suspect.confidence < 1


def test_few_windows_accuse_nobody() -> None:
    verdict = judge(timers(RUN, random.Random(0), steps=7, slow={3: 9.0}), RUN)
    assert not verdict.suspects
    assert verdict.not_judged == 8


@pytest.mark.parametrize("steps", [1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK + 7, 3 * BLOCK + 8])
def test_blocks_hold_all_records_in_order(steps: int) -> None:
    records = timers(RUN, random.Random(0), steps=steps, slow={})
    parts = list(blocks(records))
    assert [each for part in parts for each in part] == records
    sizes = [len({each.step for each in part}) for part in parts]
    assert all(size == BLOCK for size in sizes[:-1])
    assert sizes[-1] < BLOCK + 8


def test_bytes_are_set_beside_the_ledger() -> None:
    apart, rng = stages_apart(), random.Random(0)
    records = timers(apart, rng, slow={}) + flows([("a-0", "a-1")], rng)
    ((link, measured, planned),) = judge(records, apart).carried
    assert (link, measured) == ("a, between nodes", 1e6)
    assert planned > 0


# ---- files


def test_csv_and_json_hold_the_same(tmp_path: Path) -> None:
    records = timers(RUN, random.Random(0), slow={}) + flows(ACROSS, random.Random(0))
    text = json.dumps({"schema": SCHEMA, "records": [asdict(each) for each in records]})
    files = [write(tmp_path, csv_text(records)), write(tmp_path, text, "telemetry.json")]
    assert [read_telemetry([file], RUN) for file in files] == [records, records]


def test_a_torn_last_line_is_left_for_later(tmp_path: Path) -> None:
    text = csv_text(flows(ACROSS[:1], random.Random(0), windows=3))
    path = write(tmp_path, text[:-5])
    tail = Tail(path)
    assert len(list(tail.more())) == 2
    path.write_text(text)
    assert [line for _, _, line in tail.more()] == [4]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1,1,nowhere,a-1,5,,,,,", "2: source: unknown node 'nowhere'"),
        ("1,1,\x1b[31m\u202e,a-1,5,,,,,", r"2: source: unknown node '\x1b[31m\u202e'"),
        ("1,1,a-0,a-1,-5,,,,,", "2: bytes: found -5"),
        ("1,1,a-0,a-1,nan,,,,,", "2: bytes: found nan"),
        ("1,1,a-0,a-1,,,,,,", "2: bytes: found nothing"),
        ("1,1,a-0,a-1,5,2,,,,", "2: busy_seconds: is longer than the window"),
        ("1,0,a-0,a-1,5,,,,,", "2: window_seconds: found 0"),
        (",1,a-0,a-1,5,,,,,", "2: begin_seconds: found nan"),
        ("1,1,,,,,8,0,compute,1", "2: rank: found 8; the plan has 8 ranks"),
        ("1,1,,,,,0,99,compute,1", "2: step: found 99; the run has 30 steps"),
        ("1,1,,,,,0.5,0,compute,1", "2: rank: found '0.5'; write a whole number"),
        ("1,1,,,,,0,0,,1", "2: part: found nothing"),
        ("1,1,a-0", "2: found 3 cells; the header has 10"),
        ("1,5,a-0,a-1,5,,,,,\n3,5,a-0,a-1,5,,,,,", "3: begin_seconds: the window overlaps"),
        ("1,5,,,,,0,0,compute,1\n1,5,,,,,0,0,compute,2", "3: begin_seconds: the window overlaps"),
    ],
)
def test_what_is_not_of_the_run_is_refused_with_its_place(
    tmp_path: Path, line: str, said: str
) -> None:
    path = write(tmp_path, f"{HEADER}{line}\n")
    short = Run(result=RUN.result, ranks=RUN.ranks, islands=RUN.islands, steps=30)
    with pytest.raises(InputError) as caught:
        read_telemetry([path], short)
    assert f"{path}:{said}" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["", "hello\n1\n", "bytes,bytes\n1,2\n", HEADER, "a\0b\n"])
def test_files_that_hold_no_telemetry_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError):
        read_telemetry([write(tmp_path, text)], RUN)


def test_the_recorder_writes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-2.telemetry"
    counts = iter([(0, 0, 0), (1_000_000, 40_000, 5_000)])
    monkeypatch.setattr(telemetry, "_counted", lambda: [(7, "10.1.0.3", next(counts))])
    monkeypatch.setattr(telemetry, "_host_names", lambda: {"10.1.0.3": "a-1"})
    names = type("names", (), {"nodename": "a-0"})
    monkeypatch.setattr(telemetry.os, "uname", names)
    recorder = Recorder(path, 2, compute_apart=True)
    figures = dict.fromkeys(RankStep.__dataclass_fields__, 0.0) | {
        "seconds": 1e-9, "busy_seconds": 0.5, "tensor_parallel_seconds": 0.1
    }  # fmt: skip
    recorder(4, RankStep(**figures))
    *parts, flow = read_telemetry([tmp_path], RUN)
    assert [(each.rank, each.step) for each in parts] == [(2, 4)] * 4
    assert {each.part: each.seconds for each in parts}["compute"] == pytest.approx(0.4)
    assert (flow.source, flow.target, flow.bytes) == ("a-0", "a-1", 1e6)
    assert flow.resent_bytes == 5_000


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux counts connections")
def test_connections_of_this_machine_are_no_flows() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()):
        assert list(telemetry._counted()) == []


def test_a_full_disk_ends_the_records_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "rank-0.telemetry", 0, compute_apart=True)
    monkeypatch.setattr(telemetry.os, "write", lambda handle, data: 3)
    for step in range(2):
        recorder(step, RankStep(**dict.fromkeys(RankStep.__dataclass_fields__, 1.0)))


# ---- watching and the command


def test_watching_tells_each_change_once(tmp_path: Path) -> None:
    rng = random.Random(0)
    clean, slow = (timers(RUN, rng, steps=100, slow=each) for each in ({}, {5: 1.5}))
    records = [
        one if 20 <= (one.step or 0) < 60 else other for one, other in zip(slow, clean, strict=True)
    ]
    write(tmp_path, csv_text(records), "rank-0.telemetry")
    RunFolder(tmp_path).report.touch()
    told: list[str] = []
    watch(tmp_path, RUN, told.append)
    assert len(told) == 2
    assert told[0].startswith("slow rank: 5 on a-1")
    assert told[1] == "slow rank: 5 on a-1 is over"


def test_the_command(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    save_result(copies(), plan)
    path = write(tmp_path, csv_text(timers(RUN, random.Random(0), slow={5: 1.5})))
    done = CliRunner().invoke(app, ["compare", str(plan), "--telemetry", str(path)])
    assert done.exit_code == 0
    assert done.stdout.startswith("slow rank: 5 on a-1 takes 1.")
    assert max(map(len, done.stdout.splitlines())) <= 80
    words = ["compare", "--plan", str(plan), "--telemetry", str(path), "--json"]
    (suspect,) = json.loads(CliRunner().invoke(app, words).stdout)["suspects"]
    assert (suspect["kind"], suspect["name"]) == ("rank", "5 on a-1")
    for wrong in (["--watch"], ["--telemetry", str(path), "--watch"], []):
        done = CliRunner().invoke(app, ["compare", str(plan), *wrong])
        assert done.exit_code == 2, done.output
