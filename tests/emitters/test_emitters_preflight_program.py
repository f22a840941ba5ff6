"""check.py on real sockets, with outputs of vendors' tools as they are documented."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from preflight_cases import free_ports, sheet_for, two_host_result

from hetplan.emitters.preflight import SCHEMA, CheckSheet, program_files
from hetplan.emitters.preflight_program import check, check_devices, check_host, check_network
from hetplan.emitters.preflight_program.check_report import combined, part_of, report_text
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.files.encoding import encode, to_plain

TOKEN = "abc"

# ---- devices

NVIDIA = "NVIDIA A100-SXM4-80GB, 81920, 3\nNVIDIA A100-SXM4-80GB, 81920, 40000\n"
ROCM = json.dumps(
    {
        "card0": {
            "Card Series": "AMD Instinct MI300X OAM",
            "VRAM Total Memory (B)": "206141652992",
            "VRAM Total Used Memory (B)": "297586688",
        },
        "system": {"Driver version": "6.3.6"},
    }
)
AMD_STATIC = '{"gpu_data": [{"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X"}}]}'
AMD_METRIC = json.dumps(
    [
        {
            "gpu": 0,
            "mem_usage": {
                "total_vram": {"value": 196592, "unit": "MB"},
                "used_vram": {"value": 283, "unit": "MB"},
            },
        }
    ]
)
NPU = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 23.0.rc3                 Version: 23.0.rc3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 94.7        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3346 / 65536         |
+===========================+===============+====================================================+
"""
MIB = 2.0**20


def test_the_vendors_tools_are_read() -> None:
    one, two = check_devices.nvidia_devices(NVIDIA)
    assert one == {
        "name": "NVIDIA A100-SXM4-80GB",
        "total_bytes": 81920 * MIB,
        "used_bytes": 3 * MIB,
    }
    assert two["used_bytes"] == 40000 * MIB
    (card,) = check_devices.rocm_devices("WARNING: low power\n" + ROCM)
    assert card["name"] == "AMD Instinct MI300X OAM"
    assert (card["total_bytes"], card["used_bytes"]) == (206141652992.0, 297586688.0)
    (gpu,) = check_devices.amd_devices(AMD_STATIC, AMD_METRIC)
    assert (gpu["name"], gpu["total_bytes"]) == ("AMD Instinct MI300X", 196592 * MIB)
    (npu,) = check_devices.npu_devices(NPU)
    assert npu == {"name": "Ascend910B3", "total_bytes": 65536 * MIB, "used_bytes": 3346 * MIB}


@pytest.mark.parametrize("text", ["", "No devices were found\n", "{", "[1, 2]", "a,b\n", "| 1 |"])
def test_other_texts_have_no_devices(text: str) -> None:
    for read in (
        check_devices.nvidia_devices,
        check_devices.rocm_devices,
        check_devices.npu_devices,
        lambda text: check_devices.amd_devices(text, text),
    ):
        assert read(text) == []


HOST = {
    "name": "one",
    "address": "127.0.0.1",
    "device_kind": "nvidia-a100-80gb-sxm",
    "vendor": "nvidia",
    "devices": [0, 1],
    "memory_bytes": 60 * 1024 * MIB,
    "interface": "",
    "fabric_devices": [],
    "container": False,
    "needs_data": True,
    "first_port": 0,
}


def device_findings(text: str, **changes: object) -> list[tuple[str, str]]:
    host = HOST | changes
    found = check_devices.check_devices(host, check_devices.nvidia_devices(text), "")
    return [(each["status"], each["found"]) for each in found]


def test_devices_must_be_there_of_their_kind_and_free() -> None:
    free = NVIDIA.splitlines()[0] + "\n"
    assert device_findings(free * 2) == [("ok", "2 x nvidia-a100-80gb-sxm, free")]
    assert device_findings(free) == [("fail", "1 devices are here; the plan uses 0-1")]
    ((status, words),) = device_findings(NVIDIA)
    assert status == "fail"
    assert words == "device 1 has 39.06 GiB of 80 GiB in use; the plan needs 60 GiB there"
    # Enough is left: somebody should look all the same.
    assert device_findings(NVIDIA, memory_bytes=1e9)[0][0] == "note"
    ((status, words),) = device_findings(free * 2, device_kind="nvidia-h200", devices=[1])
    assert (status, words[:9]) == ("fail", "device 1 ")
    unknown = "NVIDIA A100-SXM4-80GB, [N/A], [N/A]\n"
    assert device_findings(unknown, devices=[0])[0][0] == "note"


def test_a_missing_tool_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for vendor, tool in (("nvidia", "nvidia-smi"), ("amd", "rocm-smi"), ("huawei", "npu-smi")):
        devices, why = check_devices.listed_devices(vendor)
        assert devices is None
        assert f"{tool} is not here" in why
        (found,) = check_devices.check_devices(HOST | {"vendor": vendor}, devices, why)
        assert found["status"] == "fail"
    devices, why = check_devices.listed_devices("other")
    (found,) = check_devices.check_devices(HOST | {"vendor": "other"}, devices, why)
    assert found["status"] == "note"


def test_tools_are_run_and_their_failures_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{NVIDIA}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    devices, why = check_devices.listed_devices("nvidia")
    assert (len(devices or ()), why) == (2, "")
    tool.write_text("#!/bin/sh\necho 'cannot talk to the driver' >&2\nexit 9\n")
    assert check_devices.listed_devices("nvidia") == (
        None,
        "nvidia-smi ended with 9: cannot talk to the driver",
    )


@pytest.mark.parametrize(
    ("kind", "name", "same"),
    [
        ("nvidia-a100-80gb-sxm", "NVIDIA A100-SXM4-80GB", True),
        ("nvidia-a100-80gb-sxm", "A100-SXM4-80GB", True),
        ("nvidia-h200", "NVIDIA H200", True),
        ("amd-mi300x", "AMD Instinct MI300X OAM", True),
        ("huawei-910b3", "Ascend910B3", True),
        ("nvidia-h100", "NVIDIA A100-SXM4-80GB", False),
    ],
)
def test_kinds_are_matched_by_model(kind: str, name: str, same: bool) -> None:
    assert check_devices.same_kind(kind, name) is same


# ---- the host


def sheet(**changes: object) -> dict:
    plain = {
        "data": [],
        "save": "",
        "load": "",
        "checkpoint_bytes": 1e3,
        "python": sys.executable,
        "needs_torch": True,
        "program": "",
        "trainer_folder": "",
        "hosts": [HOST],
        "token": TOKEN,
    }
    return plain | changes


def statuses(found: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(each["check"], each["status"]) for each in found]


def test_data_is_wanted_where_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "text.idx").touch()
    asked = sheet(data=["0.3", str(tmp_path / "text"), "0.7", str(tmp_path / "more")])
    found = check_host.check_paths(asked, HOST)
    assert statuses(found) == [("data", "ok"), ("data", "fail")]
    assert found[1]["found"] == f"{tmp_path / 'more'} is not there"
    assert check_host.check_paths(asked, HOST | {"needs_data": False}) == []


def test_checkpoints_need_a_folder_rights_and_room(tmp_path: Path) -> None:
    folder = str(tmp_path / "save")
    assert check_host.check_folder(folder, 1e3)["status"] == "ok"  # it can be made
    assert "nor is the folder above" in check_host.check_folder(folder + "/a/b", 1e3)["found"]
    assert "a checkpoint is" in check_host.check_folder(str(tmp_path), 1e18)["found"]
    (tmp_path / "file").touch()
    assert "is not a folder" in check_host.check_folder(str(tmp_path / "file"), 1e3)["found"]
    asked = sheet(load=str(tmp_path / "lost"), save=str(tmp_path))
    found = check_host.check_paths(asked, HOST)
    assert statuses(found) == [("checkpoint to load", "fail"), ("checkpoint folder", "ok")]


def test_the_trainer_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINER_FOLDER", raising=False)
    asked = sheet(program="pretrain_gpt.py")
    (found,) = check_host.check_trainer(asked, HOST, {})
    assert found["mend"].startswith("set TRAINER_FOLDER")
    monkeypatch.setenv("TRAINER_FOLDER", str(tmp_path))
    assert "is not there" in check_host.check_trainer(asked, HOST, {})[0]["found"]
    (tmp_path / "pretrain_gpt.py").touch()
    facts: dict[str, str] = {}
    assert check_host.check_trainer(asked, HOST, facts)[0]["status"] == "ok"
    assert facts["trainer"] == "no git commit"
    # In a container something else is installed.
    assert check_host.check_trainer(asked, HOST | {"container": True}, {}) == []


def test_versions_are_asked_of_the_interpreter_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HETPLAN_PYTHON", raising=False)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"python": "3.10.1", "torch": "2.6.0+cu124"}\'\n')
    python.chmod(0o755)
    found, facts = check_host.check_versions(sheet(python=str(python)), HOST)
    assert statuses(found) == [("versions", "ok")]
    assert facts == {"python": "3.10.1", "torch": "2.6.0+cu124"}
    python.write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n")
    found, facts = check_host.check_versions(sheet(python=str(python)), HOST)
    assert (statuses(found), facts) == ([("versions", "fail")], {})
    assert found[0]["found"].startswith(f"{python}: ")
    monkeypatch.setenv("HETPLAN_PYTHON", str(tmp_path / "none"))
    found, _ = check_host.check_versions(sheet(python=str(python)), HOST)
    assert found[0]["found"].startswith(f"{tmp_path / 'none'}: ")


def test_limits_and_fabric(tmp_path: Path) -> None:
    many = {"nofile": 65536.0, "memlock": float("inf")}
    shared = str(tmp_path)  # a real file system has room
    fabric = tmp_path / "infiniband"
    arguments = (many, str(fabric), shared)
    assert statuses(check_host.check_limits(HOST, *arguments)) == [("limits", "ok")]
    few = {"nofile": 1024.0, "memlock": 65536.0}
    (fabric / "mlx5_0").mkdir(parents=True)
    found = check_host.check_limits(HOST, few, str(fabric), shared)
    assert [each["mend"] for each in found] == ["ulimit -n 4096 or more", "ulimit -l unlimited"]
    host = HOST | {"fabric_devices": ["mlx5_0:1", "mlx5_1"]}
    (found,) = check_host.check_limits(host, *arguments)
    assert found["found"] == "mlx5_1: no such RDMA device; here are mlx5_0"


def test_names_and_interfaces(tmp_path: Path) -> None:
    lost = HOST | {"name": "two", "address": "no-such-host.invalid"}
    (found,) = check_host.check_names(sheet(), lost)
    assert (found["status"], found["check"]) == ("fail", "names")
    (tmp_path / "eth0").mkdir()
    (tmp_path / "eth0" / "operstate").write_text("down\n")
    for interface, words in (("eth0", "is down"), ("ib0", "no interface ib0; here are eth0")):
        (found,) = check_host.check_names(sheet(), HOST | {"interface": interface}, str(tmp_path))
        assert words in found["found"]
    (tmp_path / "eth0" / "operstate").write_text("up\n")
    assert statuses(check_host.check_names(sheet(), HOST | {"interface": "eth0"}, str(tmp_path)))


# ---- the network


@contextlib.contextmanager
def answering() -> Iterator[int]:
    """A port that answers."""
    answers = check_network.Answers(0, TOKEN)
    # Little waits in its connections while their threads do not run, however busy the machine is.
    answers._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
    try:
        yield answers.port
    finally:
        answers.close()


@contextlib.contextmanager
def relay(to: int, bytes_per_second: float) -> Iterator[int]:
    """A port behind which everything goes to another one at this rate at most."""
    listening = socket.create_server(("127.0.0.1", 0))
    opened = [listening]

    def forward(source: socket.socket, sink: socket.socket, pace: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(8192):
                if pace:
                    time.sleep(len(piece) / bytes_per_second)
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                left, _ = listening.accept()
                right = socket.create_connection(("127.0.0.1", to))
                right.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
                opened.extend((left, right))
                for pair in ((left, right, True), (right, left, False)):
                    threading.Thread(target=forward, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        for each in opened:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_a_meter_leaves_out_the_beginning() -> None:
    meter = check_network.Meter(1.0, 3.0)
    assert not meter.add(1000, 10.0)
    assert not meter.add(1000, 10.9)
    assert not meter.add(1000, 11.0)
    assert not meter.add(50, 12.0)
    assert meter.add(150, 13.0)
    assert meter.rate() == 100.0
    assert check_network.Meter(1.0, 3.0).rate() == 0.0


def test_a_meter_that_was_held_up_counts_long_enough() -> None:
    meter = check_network.Meter(1.0, 3.0)
    assert not meter.add(1000, 10.0)
    # Nobody read for 2.9 s, and what came meanwhile waits.
    assert not meter.add(1000, 12.9)
    assert not meter.add(9000, 13.0)
    assert meter.add(1000, 14.9)
    assert meter.rate() == pytest.approx(5000.0)
    late = check_network.Meter(1.0, 3.0)
    assert not late.add(1000, 10.0)
    assert not late.add(1000, 14.0)
    assert late.add(1000, 16.0)
    assert late.rate() == 500.0


def test_too_many_connections_end_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    real = check_network._listen("", 0)
    problems = [OSError(errno.EMFILE, "too many"), OSError(errno.ECONNABORTED, "gone")]

    class Listening:
        def accept(self) -> tuple[socket.socket, object]:
            if problems:
                raise problems.pop()
            return real.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    monkeypatch.setattr(check_network, "_listen", lambda address, port: Listening())
    monkeypatch.setattr(check_network, "PAUSE_SECONDS", 0.0)
    with answering() as port:
        assert check_network.round_trip("127.0.0.1", port, TOKEN) > 0
    assert problems == []


def test_round_trips_are_the_median_of_several() -> None:
    ticks = iter(range(1000))
    with answering() as port:
        assert check_network.round_trip("127.0.0.1", port, TOKEN, lambda: next(ticks)) == 1
        assert check_network.round_trip("127.0.0.1", port, TOKEN) > 0


def test_a_slow_path_is_found_and_said() -> None:
    pace = 2e6
    pair = {"sender": "one", "receiver": "two", "streams": 1, "comparable": True}
    pair |= {"round_trip_seconds": 10.0, "bandwidth_bytes_per_second": 10 * pace}
    with answering() as port, relay(port, pace) as slow:
        receiver = {"address": "127.0.0.1", "first_port": slow}
        measured = check_network.probe(pair, receiver, TOKEN, 0.6)
        # The relay can be slower than its pace, not faster.
        assert 0 < measured["bandwidth_bytes_per_second"] < 1.5 * pace
        status, words = check_network.judged(pair, measured)
        assert status == "fail"
        assert "of the cluster file's" in words
        # A busy machine can slow a measurement down; that of a fast path is then taken again.
        direct = (check_network.rate("127.0.0.1", port, TOKEN, 2, 0.3) for _ in range(50))
        assert any(each > measured["bandwidth_bytes_per_second"] for each in direct)


def test_ports_that_do_not_answer_are_told_apart() -> None:
    (port,) = free_ports(1)
    receiver = {"address": "127.0.0.1", "first_port": port}
    pair = {"sender": "one", "receiver": "two", "streams": 1}
    measured = check_network.probe(pair, receiver, TOKEN, 0.1)
    assert measured["problem"].startswith(f"127.0.0.1 port {port}: refused")
    assert check_network.judged(pair, measured)[0] == "fail"
    receiver = {"address": "no-such-host.invalid", "first_port": port}
    assert "no address here" in check_network.probe(pair, receiver, TOKEN, 0.1)["problem"]
    with answering() as port:
        receiver = {"address": "127.0.0.1", "first_port": port}
        measured = check_network.probe(pair, receiver, "another", 0.1)
    assert "closed" in measured["problem"] or "reset" in measured["problem"]


@pytest.mark.parametrize(
    ("rate", "trip", "status", "words"),
    [
        (1.0, 1.0, "ok", "as in the cluster file"),
        (0.81, 1.19, "ok", "as in the cluster file"),
        (0.7, 1.0, "fail", "the rate is 70 %"),
        (3.0, 1.0, "note", "the rate is 3.0 times"),
        (1.0, 1.5, "fail", "the round trip is longer"),
        (1.0, 0.5, "note", "the round trip is shorter"),
        (3.0, 1.5, "fail", "3.0 times the cluster file's; the round trip is longer"),
    ],
)
def test_figures_within_a_fifth_are_as_expected(
    rate: float, trip: float, status: str, words: str
) -> None:
    pair = {"round_trip_seconds": 0.1, "bandwidth_bytes_per_second": 1e9, "comparable": True}
    measured = {"round_trip_seconds": 0.1 * trip, "bandwidth_bytes_per_second": 1e9 * rate}
    found = check_network.judged(pair, measured)
    assert found[0] == status
    assert words in found[1]
    assert check_network.judged(pair | {"comparable": False}, measured)[0] == "ok"


def test_what_two_systems_add_to_a_round_trip_is_no_fault() -> None:
    pair = {"round_trip_seconds": 1e-5, "bandwidth_bytes_per_second": 1e9, "comparable": True}
    measured = {"round_trip_seconds": 1.5e-4, "bandwidth_bytes_per_second": 1e9}
    assert check_network.judged(pair, measured)[0] == "ok"


# ---- together


def report(host: str, **facts: str) -> dict:
    return {"host": host, "findings": [check_devices.finding("names", "ok", "")], "facts": facts}


def test_versions_that_differ_are_named() -> None:
    hosts = [HOST | {"name": name} for name in ("one", "two", "three")]
    asked = sheet(hosts=[*hosts[:2], hosts[2] | {"vendor": "amd"}], all_pairs=0)
    reports = [
        report("one", torch="2.6.0+cu124", nccl="2.21.5", trainer="abc"),
        report("two", torch="2.6.0+cu126", nccl="2.22.3", trainer="abc"),
        report("three", torch="2.6.0+rocm6.2", nccl="2.20.0", trainer="def"),
    ]
    found = combined(asked, reports, [], [])
    told = {each["check"]: each["found"] for each in found["findings"] if each["status"] != "ok"}
    assert told == {
        "equal trainer": "abc on one, two; def on three",
        # AMD's library has another number, which is no fault.
        "equal nccl": "2.21.5 on one; 2.22.3 on two",
    }
    assert found["failed"]


def test_a_host_that_did_not_come_is_named() -> None:
    found = combined(sheet(all_pairs=0), [report("one")], [], ["two"])
    text = report_text(found)
    assert found["failed"]
    assert "MEND two: host: did not come" in text
    assert "something must be mended" in text
    assert "two" not in report_text(part_of(found, "one"))


def written(folder: Path, checked: CheckSheet) -> Path:
    for file in program_files():
        (folder / file.path).write_text(file.text)
    (folder / "check.json").write_text(encode(checked, schema=SCHEMA))
    return folder / "check.py"


def quick_sheet(**options: object) -> CheckSheet:
    """Of two hosts on the loopback; nobody waits for torch."""
    return sheet_for(two_host_result(), EmitOptions(python="false", **options))


def started(program: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, program, "--timeout", "60", "--seconds", "0.3", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_hosts_check_each_other(tmp_path: Path) -> None:
    save = tmp_path / "save"
    save.mkdir()
    program = written(tmp_path, quick_sheet(save=str(save), data=(str(tmp_path / "lost"),)))
    two = started(program, "--host", "two")
    one = started(program, "--host", "one", "--json")
    told, problems = one.communicate(timeout=100)
    own, _ = two.communicate(timeout=100)
    assert (one.returncode, two.returncode) == (1, 1), problems
    found = json.loads(told)
    assert found["schema"] == "hetplan.checked/1"
    assert (found["hosts"], found["missing"]) == (["one", "two"], [])
    (pair,) = found["pairs"]
    assert pair["measured"]["bandwidth_bytes_per_second"] > 0
    checks = {(each["host"], each["check"]): each["status"] for each in found["findings"]}
    for name in ("one", "two"):
        assert checks[name, "ports"] == "ok"
        assert checks[name, "data"] == "fail"
    assert checks["two", "rendezvous"] == "ok"
    assert checks["two", "clock"] == "ok"
    shared = [each["found"] for each in found["findings"] if not each["host"]]
    assert shared == [f"{save} is one folder on all hosts"]
    assert list(save.iterdir()) == []
    # The other host tells of itself.
    assert "MEND two: data" in own
    assert "one " not in own.splitlines()[1]


def test_a_port_that_is_taken_and_a_host_that_is_absent(tmp_path: Path) -> None:
    checked = quick_sheet()
    program = written(tmp_path, checked)
    with socket.create_server(("", checked.port)):
        done = started(program, "--host", "one", "--timeout", "0")
        out, _ = done.communicate(timeout=100)
    assert done.returncode == 1
    assert f"MEND one: ports: port {checked.port} cannot be listened on" in out
    assert "MEND two: host: did not come" in out


def test_a_first_host_that_is_absent_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = to_plain(quick_sheet())
    monkeypatch.setattr(check, "check_host", lambda asked, host: report(host["name"]))
    found = check.follow(plain, plain["hosts"][1], 0.1, 0.1)
    text = report_text(found)
    assert found["failed"]
    assert f"first host: one, 127.0.0.1 port {plain['barrier_port']}: refused" in text


def test_two_processes_of_one_host_do_not_both_take_part() -> None:
    meeting = check_network.Meeting(["two"])
    answers = check_network.Answers(0, TOKEN, meeting.join)
    streams, connections = [], []
    try:
        for name in ("two", "two", "five"):
            where = ("127.0.0.1", answers.port, TOKEN)
            connection = check_network.opened(*where, f"join {name}")
            connections.append(connection)
            streams.append(connection.makefile("rwb"))
            check_network.write_message(streams[-1], report(name))
            if len(streams) == 1:
                assert meeting.wait(60.0) == []
        for stream in streams[1:]:
            assert check_network.read_message(stream)["do"] == "refused"
        assert check_network.read_message(streams[0])["do"] == "welcome"
        meeting.end({"failed": False})
        assert check_network.read_message(streams[0])["do"] == "end"
    finally:
        answers.close()
        for each in (*streams, *connections):
            each.close()


@pytest.mark.parametrize(
    "told",
    [
        b"[]",
        b"{}",
        b"\xff\xff",
        b'{"host": "two", "findings": 5, "facts": {}}',
        b'{"host": "two", "findings": [{}], "facts": {}}',
        b'{"host": "one", "findings": [], "facts": {}}',
        b"x" * 10_000,
    ],
)
def test_what_is_no_report_does_not_take_part(told: bytes) -> None:
    meeting = check_network.Meeting(["two"])
    answers = check_network.Answers(0, TOKEN, meeting.join)
    try:
        with check_network.opened("127.0.0.1", answers.port, TOKEN, "join two") as connection:
            connection.sendall(told + b"\n")
            # It is closed, and the host may still come.
            assert connection.recv(10) == b""
        assert meeting.wait(0.0) == ["two"]
        with (
            check_network.opened("127.0.0.1", answers.port, TOKEN, "join two") as connection,
            connection.makefile("rwb") as stream,
        ):
            check_network.write_message(stream, report("two"))
            assert check_network.read_message(stream)["do"] == "welcome"
            assert meeting.wait(60.0) == []
            meeting.end({})
    finally:
        answers.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "no answer in time"),
        (b"HTTP/1.1 400 Bad Request\r\n", "first host: one"),
        (b"[]\n", "another program answers there"),
        (b'{"do": "refused"}\n', "another process has already come as two"),
    ],
)
def test_another_program_on_the_first_hosts_port_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, words: str
) -> None:
    plain = to_plain(quick_sheet())
    monkeypatch.setattr(check, "check_host", lambda asked, host: report(host["name"]))
    monkeypatch.setattr(check, "check_rendezvous", lambda asked: check.finding("r", "ok", ""))

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                connection.recv(100)
                if answer is not None:
                    connection.sendall(answer)
                while connection.recv(10_000):
                    pass

    with socket.create_server(("127.0.0.1", plain["barrier_port"])) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        found = check.follow(plain, plain["hosts"][1], 0.5, 0.1)
    assert found["failed"]
    assert words in report_text(found)


def test_an_interrupt_is_one_word(tmp_path: Path) -> None:
    program = written(tmp_path, quick_sheet())
    for name in ("one", "two"):
        process = subprocess.Popen(
            [sys.executable, "-u", program, "--host", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        hosts = json.loads((tmp_path / "check.json").read_text())["hosts"]
        where = next(each for each in hosts if each["name"] == name)
        while process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection((where["address"], where["first_port"])).close()
                break
        process.send_signal(signal.SIGINT)
        _, problems = process.communicate(timeout=60)
        assert (process.returncode, problems) == (130, "check.py: interrupted\n")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"hosts": []}'])
def test_a_sheet_that_is_none(tmp_path: Path, text: str) -> None:
    program = written(tmp_path, quick_sheet())
    (tmp_path / "check.json").write_text(text)
    process = started(program)
    _, problems = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "check.json: " in problems


def test_clocks_are_compared() -> None:
    class Guest:
        def ask(self, question: object, seconds: float) -> float:
            return 107.0

    ticks = iter([100.0, 102.0, 100.0, 101.0, 100.0, 104.0, 100.0, 104.0, 100.0, 104.0])
    # Of the quickest question: 107 against the middle of 100 and 101.
    assert check_network.clock_offset(Guest(), lambda: next(ticks)) == 6.5


def test_one_host_serves_and_another_probes(tmp_path: Path) -> None:
    checked = quick_sheet()
    program = written(tmp_path, checked)
    answers = check_network.Answers(checked.hosts[1].first_port, checked.token)
    try:
        done = started(program, "--host", "one", "probe", "two")
        out, _ = done.communicate(timeout=100)
    finally:
        answers.close()
    assert done.returncode == 0
    assert "times the cluster file's" in out  # the loopback is faster than 10 MB/s
    done = started(program, "--host", "one", "probe", "two")
    out, _ = done.communicate(timeout=100)
    assert (done.returncode, "refused" in out) == (1, True)


def test_a_host_finds_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [HOST | {"name": "n1.site", "address": "10.0.0.1"}, HOST | {"name": "n2.site"}]
    asked = sheet(hosts=hosts)
    monkeypatch.delenv("HETPLAN_HOST", raising=False)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "n2")
    monkeypatch.setattr(socket, "getfqdn", lambda: "n2.other")
    assert check.this_host(asked, None) is hosts[1]
    assert check.this_host(asked, "10.0.0.1") is hosts[0]
    assert check.this_host(asked, "n1") is None
    monkeypatch.setenv("HETPLAN_HOST", "n1.site")
    assert check.this_host(asked, None) is hosts[0]


def test_a_wrong_call_is_told(tmp_path: Path) -> None:
    program = written(tmp_path, replace(quick_sheet(), pairs=()))
    done = started(program, "--host", "nobody")
    _, problems = done.communicate(timeout=60)
    assert done.returncode == 2
    assert "there are one, two" in problems
