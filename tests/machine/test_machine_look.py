"""Whole looks at made-up machines: what is found, what is advised, and that nothing breaks it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_fakes import ADDRESS, HOST, MAC, big_node, probe, torch_answer

from hetplan.cluster.catalogue import load_catalogue
from hetplan.files.encoding import encode
from hetplan.files.shipped import shipped_folder
from hetplan.machine.devices import DRIVER_TOOLS
from hetplan.machine.host import Answer, AnswerState
from hetplan.machine.look import look
from hetplan.machine.report import COLUMNS, DOCTOR_SCHEMA, LINES, screen

KINDS = load_catalogue(shipped_folder("configs") / "devices")
H100 = "NVIDIA H100 80GB HBM3"
SMI = "name, memory.total [MiB], driver_version\n" + f"{H100}, 81559 MiB, 560.35.03\n" * 8
SEEN = [("cuda", H100, 84_900_000_000)] * 8


def report_of(machine, **rest):
    return look(machine, kinds=KINDS, python="python", **rest)


def test_a_large_node(tmp_path, monkeypatch):
    big_node(tmp_path, monkeypatch)
    answers = {"nvidia-smi": SMI, "python": torch_answer(SEEN)}
    report = report_of(probe(tmp_path, answers, present=["iperf3"]))
    assert report.problems == ()
    processor = report.processor
    assert (processor.cores, processor.usable_cores, processor.numa_nodes) == (192, 32, 2)
    assert (processor.cpu_quota_cores, processor.memory_limit_bytes) == (16.0, 2.0**37)
    assert (processor.memory_bytes, processor.available_bytes) == (2.0**40, 2.0**39)
    assert processor.model == "Acme Server CPU 9000"
    (device,) = report.devices
    assert (device.count, device.kind, device.torch_device) == (8, "nvidia-h100-80gb-sxm", "cuda")
    assert (device.tool, device.driver) == ("nvidia-smi", "560.35.03")
    rails, slow, off, bridge = report.interfaces
    assert (len(rails.names), rails.bits_per_second, rails.state) == (8, 400e9, "up")
    assert (slow.names, slow.driver, slow.bits_per_second) == (("eth0",), "bnxt_en", 25e9)
    assert (off.names, off.bits_per_second) == (("enx*",), 0.0)
    assert (bridge.names, bridge.physical) == (("docker0",), False)
    active, down = report.rdma
    assert (len(active.devices), active.bits_per_second, active.numa_nodes) == (8, 400e9, (0, 1))
    assert (down.devices, down.state, down.numa_nodes) == (("mlx5_8",), "DOWN", ())
    (tcp,) = (each for each in report.measurements if each.what == "TCP between nodes")
    assert tcp.how == "iperf3 between the nodes, then hetplan import links FILE"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            Answer(state=AnswerState.TIMEOUT, reason="no end within 5 s"),
            "nvidia-smi: no end within",
        ),
        (Answer(state=AnswerState.FAILED, reason="Permission denied"), "Permission denied"),
        ("\x00\xff garbage", "nvidia-smi: it lists no device that could be understood"),
    ],
)
def test_a_broken_tool_is_one_line(tmp_path, answer, said):
    report = report_of(probe(tmp_path, {"nvidia-smi": answer}))
    assert any(said in problem for problem in report.problems)
    assert report.devices == ()


@pytest.mark.parametrize("shown", [screen, lambda report: encode(report, schema=DOCTOR_SCHEMA)])
def test_nothing_that_names_the_machine_is_shown(tmp_path, shown, monkeypatch):
    big_node(tmp_path, monkeypatch)
    smi = SMI.replace("560.35.03", f"560.35.03 {ADDRESS}")
    text = shown(report_of(probe(tmp_path, {"nvidia-smi": smi, "python": torch_answer(SEEN)})))
    for secret in (HOST, MAC, ADDRESS, MAC.replace(":", ""), str(tmp_path)):
        assert secret not in text


def fits(text):
    lines = text.splitlines()
    assert len(lines) <= LINES
    assert all(len(line) <= COLUMNS for line in lines)


def test_a_report_that_is_too_long_is_cut_and_says_so(tmp_path):
    smi = "name, memory.total [MiB]\n" + "".join(
        f"Acme {'very ' * 8}long name {number}, 5 MiB\n" for number in range(6)
    )
    text = screen(report_of(probe(tmp_path, {"nvidia-smi": smi}), problems=["x" * 300] * 9))
    fits(text)
    assert "more lines; --json has everything" in text
    assert "more; --json has them all" in text


@settings(
    derandomize=True,
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_garbage_breaks_the_doctor(tmp_path, data):
    garbage = st.one_of(
        st.text(max_size=60),
        st.sampled_from(["9" * 400, "-1", "[" * 3000, "4: ACTIVE", "0-" + "9" * 30, "\x1b[31m"]),
    )
    for path in (
        "proc/cpuinfo",
        "proc/modules",
        "sys/fs/cgroup/cpu.max",
        "sys/class/infiniband/m0/ports/1/rate",
        "sys/class/infiniband/m0/ports/1/state",
        "sys/class/infiniband/m0/device/numa_node",
    ):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(data.draw(garbage), encoding="utf-8", errors="surrogatepass")
    answers = {tool.name: data.draw(garbage) for tool in DRIVER_TOOLS}
    report = report_of(probe(tmp_path, answers))
    fits(screen(report))
    encode(report, schema=DOCTOR_SCHEMA)
