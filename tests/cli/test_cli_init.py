"""`hetplan init`, and `plan` and `estimate` from one line."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run
from typer.testing import CliRunner

import hetplan.cli.init as init_module
from hetplan.cli.main import app
from hetplan.cluster.load import load_cluster
from hetplan.job.load import load_job
from hetplan.machine.report import MachineDevice
from hetplan.model.load import load_model
from hetplan.search.files import load_legal_plan

SEEN_HERE = init_module._seen_here
SITES = ("--nodes", "4x8 h100 @A", "8x8 mi300x @B", "2x8 910b @B", "--between", "A B 10Gbit 30ms")
RUN = ("--batch", "1024", "--seq", "4096", "--tokens", "2T")
TINY = ("--model", "gpt-tiny", "--batch", "8", "--seq", "128")
NAMES = ["cluster.yaml", "job.yaml", "model.yaml"]


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setattr(init_module, "_seen_here", str)
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def test_a_guess_in_a_cluster_file_is_a_note_of_plan_and_check(tmp_path):
    written = run("init", "--nodes", "1x2 h100", *TINY, "--out", str(tmp_path))
    assert written.exit_code == 0, written.stderr
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(cluster.read_text().replace("device: nvidia-h100-80gb-sxm", "device: H100"))
    checked = run("check", str(cluster))
    assert checked.exit_code == 0
    assert "is taken as nvidia-h100-80gb-sxm" in checked.stdout
    files = [part for name in ("model", "cluster", "job")
             for part in (f"--{name}", str(tmp_path / f"{name}.yaml"))]  # fmt: skip
    priced = run("estimate", *files, "--dp", "2")
    assert priced.exit_code == 0
    assert re.search(r"note: .*cluster.yaml:\d+: .*'H100' is taken as", priced.stderr)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_one_line_becomes_three_files_and_the_next_command(tmp_path):
    out = tmp_path / "my cluster"
    done = run("init", *SITES, *RUN, "--model", "meta-llama/Llama-3.1-70B", "--out", str(out))
    assert done.exit_code == 0, done.stderr
    assert files_of(out) == NAMES
    assert load_cluster(out / "cluster.yaml").num_devices == 112
    assert load_model(out / "model.yaml").name == "llama-3-70b"
    job = load_job(out / "job.yaml")
    assert (job.global_batch_size, job.total_tokens) == (1024, 2 * 10**12)
    lines = done.stdout.splitlines()
    assert len(lines) <= 10
    assert [line.split(":")[0].split()[0] for line in lines] == [
        *["wrote"] * 3,
        *["assumed"] * (len(lines) - 4),
        "next",
    ]
    words = shlex.split(lines[-1])
    assert words[1:3] == ["hetplan", "plan"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert Path(given["--cluster"]) == out / "cluster.yaml"
    for name in NAMES:
        assert "assumed:" in (out / name).read_text()


def test_options_may_be_repeated_or_list_their_values(tmp_path):
    once = run("init", *SITES, *TINY, "--out", str(tmp_path / "a"))
    repeated = ("--nodes", "4x8 h100 @A", "--nodes", "8x8 mi300x @B", "--nodes", "2x8 910b @B")
    again = run("init", *TINY, *repeated, *SITES[-2:], "--out", str(tmp_path / "b"))
    assert (once.exit_code, again.exit_code) == (0, 0)
    for name in NAMES:
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


@pytest.mark.parametrize(
    "options",
    [
        ("--nodes", "1x8 h100"),
        ("--nodes", "2x8 a800", "4x4 h100"),
        ("--nodes", "1x2 4090", "1x1 3090 10Gbit"),
        ("--nodes", "16x8 a100", "--precision", "fp16", "--optimizer", "adam"),
        ("--nodes", "4x8 h100", "--precision", "fp8", "--target", "torchtitan",
         "--model", "llama-3-8b"),
        ("--nodes", "4 atlas-800t-a2 @x", "2x8 v100 @y", "--between", "x y 25 GB/s 1ms each",
         "--precision", "fp16"),
        SITES,
    ],
)  # fmt: skip
def test_what_is_written_passes_check(options, tmp_path):
    done = run("init", *TINY, *options, "--out", str(tmp_path / "o"))
    assert done.exit_code == 0, done.stderr
    checked = run("check", str(tmp_path / "o"))
    assert checked.exit_code == 0
    assert "0 errors, 0 warnings" in checked.stdout + checked.stderr


def test_a_config_of_a_hub_is_copied_as_it_is(tmp_path):
    text = json.dumps({
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 1000,
        "num_attention_heads": 4, "intermediate_size": 512, "max_position_embeddings": 512,
    })  # fmt: skip
    (tmp_path / "config.json").write_text(text)
    for given in (tmp_path / "config.json", tmp_path):
        out = tmp_path / given.name.replace(".", "")
        done = run("init", "--nodes", "1x8 h100", "--model", str(given), "--out", str(out))
        assert done.exit_code == 0, done.stderr
        assert (out / "config.json").read_text() == text
        assert load_job(out / "job.yaml").sequence_length == 512  # no more than the model has


def test_without_a_terminal_it_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("init")
    assert done.exit_code == 2
    assert '--nodes "4x8 h100 @A" --model llama-3-70b' in done.stderr
    monkeypatch.setattr(init_module, "_seen_here", lambda: "1x8 amd-mi300x")
    assert '--nodes "1x8 amd-mi300x" --model' in run("init").stderr
    assert files_of(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--nodes", "4x8 zzz", "--model", "zzz"), ("--nodes '4x8 zzz'", "--model zzz")),
        (("--nodes", "4x8 h100 @A\nb: {", *TINY), ("--nodes '4x8 h100 @A\\nb: {'",)),
        (("--nodes", "4x8 h100 @$(x)", *TINY), ("a region's name has letters",)),
        (("--nodes", "4x8 h100", *TINY, "--tokens", "2Q"), ("--tokens", "as in 2T")),
        (("--nodes", "4x8 h100", *TINY, "--precision", "x"), ("--precision",)),
        (("--nodes", "4x8 h100", "--model", "gpt-tiny", "--seq", "999999"), ("sequence_length",)),
        (("--nodes", "4x8 v100", *TINY, "--precision", "bf16"), ("precision", "float16")),
        (("--nodes", "4x8 h100", "--model", "70b"), ("llama-2-70b, llama-3-70b",)),
        (("--nodes", "4x8 h100", "--model", "no.yaml"), ("no.yaml",)),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(options, says, tmp_path):
    done = run("init", *options, "--out", str(tmp_path / "o"))
    assert done.exit_code == 2, done.stdout
    for part in says:
        assert part in done.stderr
    assert files_of(tmp_path) == []


def test_topologies_are_given_by_kind(tmp_path):
    topology = Path(__file__).parents[1] / "golden/importers/nvidia-topo/a100-8.txt"
    nodes = ("--nodes", "2x8 a100", "2x8 h100", *TINY, "--out", str(tmp_path / "o"))
    refused = run("init", *nodes, "--topology", str(topology))
    assert refused.exit_code == 2
    assert f"write KIND=FILE, a100={topology} or h100={topology}" in refused.stderr
    missing = run("init", *nodes, "--topology", "a100=no.txt", "--topology", "h100=no.txt")
    assert missing.exit_code == 2
    assert missing.stderr.count("no.txt") == 1
    done = run("init", *nodes, "--topology", f"a100={topology}")
    assert done.exit_code == 0, done.stderr
    a100, h100 = load_cluster(tmp_path / "o" / "cluster.yaml").islands
    assert (a100.nics.per_node, h100.nics.per_node) == (4, 8)


def test_files_that_exist_stay_unless_forced(tmp_path):
    (tmp_path / "job.yaml").write_text("mine\n")
    refused = run("init", "--nodes", "1x8 h100", *TINY, "--out", str(tmp_path))
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert files_of(tmp_path) == ["job.yaml"]
    assert (tmp_path / "job.yaml").read_text() == "mine\n"
    assert (
        run("init", "--nodes", "1x8 h100", *TINY, "--out", str(tmp_path), "--force").exit_code == 0
    )
    assert load_job(tmp_path / "job.yaml").global_batch_size == 8


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file/inside", "file"):
        done = run("init", "--nodes", "1x8 h100", *TINY, "--out", str(tmp_path / place))
        assert done.exit_code == 2
        assert "choose another place" in done.stderr
    closed = run("init", "--nodes", "1x8 h100", *TINY, "--out", "/proc/hetplan")
    assert closed.exit_code == 2
    assert files_of(tmp_path) == ["file"]


def test_an_interrupted_write_leaves_whole_files_only(tmp_path, monkeypatch):
    replace, done = os.replace, []

    def second_fails(source, target):
        if done:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", second_fails)
    assert run("init", "--nodes", "1x8 h100", *TINY, "--out", str(tmp_path / "o")).exit_code == 130
    assert files_of(tmp_path / "o") == ["model.yaml"]
    assert load_model(tmp_path / "o" / "model.yaml").name == "gpt-tiny"


def test_a_host_with_accelerators_is_proposed(monkeypatch):
    def found(*_: object):
        none = {"memory_bytes": 0.0, "driver": "", "tool": "", "torch_device": "", "nearest": ()}
        return (
            MachineDevice(name="odd", count=9, kind="", **none),
            MachineDevice(name="T4", count=1, kind="nvidia-t4-16gb-pcie", **none),
            MachineDevice(name="H100", count=8, kind="nvidia-h100-80gb-sxm", **none),
        )

    monkeypatch.setattr("hetplan.machine.devices.find_devices", found)
    assert SEEN_HERE() == "1x8 nvidia-h100-80gb-sxm"
    monkeypatch.setattr("hetplan.machine.devices.find_devices", lambda *_: ())
    assert SEEN_HERE() == ""


def asked(monkeypatch, tmp_path, lines: str, *options: str):
    monkeypatch.setattr(init_module, "_on_terminal", lambda: True)
    words = ["init", *options, "--out", str(tmp_path / "o")]
    return CliRunner().invoke(app, words, input=lines)


def test_on_a_terminal_it_asks_and_asks_again(monkeypatch, tmp_path):
    lines = (
        "4x8 zzz\n4x8 h100 @A\n8x8\n8x8 mi300x @B\n\n10\n10Gbit 30ms\n70b\ngpt-tiny\nx\n8\n\n2T\n"
    )
    done = asked(monkeypatch, tmp_path, lines)
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("Error") == 5
    assert "[4x8 h100 @A]" in done.stderr
    assert load_cluster(tmp_path / "o" / "cluster.yaml").num_devices == 96
    job = load_job(tmp_path / "o" / "job.yaml")
    assert (job.global_batch_size, job.total_tokens) == (8, 2 * 10**12)


def test_enter_takes_what_is_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(init_module, "_seen_here", lambda: "1x8 nvidia-a100-80gb-sxm")
    done = asked(monkeypatch, tmp_path, "\n" * 6)
    assert done.exit_code == 0, done.stderr
    (island,) = load_cluster(tmp_path / "o" / "cluster.yaml").islands
    assert island.device.kind == "nvidia-a100-80gb-sxm"
    assert load_model(tmp_path / "o" / "model.yaml").name == "llama-3-70b"


def test_what_was_given_is_not_asked(monkeypatch, tmp_path):
    done = asked(monkeypatch, tmp_path, "gpt-tiny\n", "--nodes", "1x8 h100", *RUN[:1], "8",
                 "--seq", "128", "--tokens", "1B")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "Nodes" not in done.stderr


def test_the_end_of_the_answers_writes_nothing(monkeypatch, tmp_path):
    done = asked(monkeypatch, tmp_path, "1x8 h100\n")
    assert done.exit_code == 130
    assert "nothing was written" in done.stderr
    assert files_of(tmp_path) == []


@pytest.mark.slow  # starts Python on a terminal of its own: 2 s of CPU
def test_a_real_terminal_is_asked(tmp_path):
    words = [sys.executable, "-m", "hetplan", "init", "--out", str(tmp_path / "o")]
    pid, handle = pty.fork()
    if not pid:
        os.chdir(Path(__file__).parents[2])
        os.execv(words[0], words)
    for line in ("1x8 h100", "", "gpt-tiny", "8", "128", "2T"):
        os.write(handle, f"{line}\n".encode())
    shown = b""
    while True:
        try:
            part = os.read(handle, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    assert files_of(tmp_path / "o") == NAMES


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--nodes", "1x8 h100", "--cluster", "c.yaml"), "give one of them"),
        ((), "give --cluster FILE, or --nodes"),
        (("--between", "A B 1Gbit 1ms", "--cluster", "c.yaml"), "--between is of the nodes"),
        (("--nodes", "1x8 zzz"), "'zzz'"),
    ],
)
def test_one_line_and_a_file_do_not_mix(options, says):
    for command in ("plan", "estimate"):
        done = run(command, *TINY, *options)
        assert done.exit_code == 2
        assert says in done.stderr


def test_a_batch_or_a_job_is_needed():
    done = run("plan", "--model", "gpt-tiny", "--nodes", "1x8 h100")
    assert done.exit_code == 2
    assert "--batch N" in done.stderr


def test_a_layout_is_priced_from_one_line_as_from_its_files(tmp_path):
    nodes = ("--nodes", "1x2 4090")
    assert run("init", *nodes, *TINY, "--target", "megatron", "--out", str(tmp_path)).exit_code == 0
    files = [part for name in ("model", "cluster", "job")
             for part in (f"--{name}", str(tmp_path / f"{name}.yaml"))]  # fmt: skip
    line = run("estimate", *nodes, *TINY, "--dp", "2", "--json")
    assert line.exit_code == 0, line.stderr
    assert "assumed: 4090: nvidia-rtx-4090-24gb, nodes as rtx-4090-2" in line.stderr
    assert run("estimate", *files, "--dp", "2", "--json").stdout == line.stdout


def test_plan_takes_the_tokens_that_init_takes(tmp_path):
    line = ("plan", "--nodes", "1x2 4090", *TINY, "--no-native", "--out", str(tmp_path / "p.json"))
    done = run(*line, "--tokens", "1B")
    assert done.exit_code == 0, done.stderr
    assert "for 1B tokens" in " ".join(done.stdout.split())
    assert json.loads((tmp_path / "p.json").read_text())["inputs"]["job"]["total_tokens"] == 10**9
    wrong = run(*line, "--tokens", "many")
    assert wrong.exit_code == 2
    assert "--tokens: found 'many'" in wrong.stderr


def test_batch_and_seq_stand_over_a_job_file(tmp_path):
    assert run("init", "--nodes", "1x2 4090", *TINY, "--out", str(tmp_path)).exit_code == 0
    job, out = tmp_path / "job.yaml", tmp_path / "plan.json"
    done = run("estimate", "--model", "gpt-tiny", "--nodes", "1x2 4090", "--job", str(job),
               "--batch", "16", "--out", str(out))  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert json.loads(out.read_text())["inputs"]["job"]["global_batch_size"] == 16


@pytest.mark.slow  # searches: 10 s of CPU each
@pytest.mark.parametrize(
    "nodes",
    [("1x4 4090",), ("1x2 4090", "1x1 3090 10Gbit"), ("1x2 h100 @A", "1x2 mi300x @B")],
)
def test_what_init_writes_is_planned_as_the_line_is(nodes, tmp_path):
    words = ("--nodes", *nodes, *(("--between", "A B 10Gbit 30ms") if "@A" in nodes[0] else ()))
    written = run("init", *words, *TINY, "--out", str(tmp_path))
    assert written.exit_code == 0, written.stderr
    command = shlex.split(re.sub("^next: hetplan ", "", written.stdout.splitlines()[-1]))
    assert run(*command, "--no-native").exit_code == 0
    line = tmp_path / "line.json"
    assert run("plan", *words, *TINY, "--no-native", "--out", str(line)).exit_code == 0
    plans = [json.loads(path.read_text())["plan"] for path in (line, tmp_path / "plan.json")]
    assert plans[0] == plans[1]


def test_a_closed_stream_is_no_fault_and_no_files_number(tmp_path):
    """What a library says on the closed number 2 must not land in the plan's file."""
    words = ("plan", "--nodes", "1x8 h100", *TINY, "--no-native", "--out", str(tmp_path / "p.json"))
    line = shlex.join([sys.executable, "-m", "hetplan", *words])
    done = subprocess.run(f"{line} 2>&-", shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "proven within" in done.stdout
    assert load_legal_plan(tmp_path / "p.json").certificate is not None


def test_a_closed_stdout_is_no_fault(tmp_path):
    words = ("init", "--nodes", "4x8 h100", "--model", "llama-2-7b", "--out", str(tmp_path))
    line = shlex.join([sys.executable, "-m", "hetplan", *words])
    done = subprocess.run(f"{line} >&-", shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_sequences_and_no_tokens_are_asked_again(monkeypatch, tmp_path):
    answers = "llama-2-7b\n0\n64\n\n0\n\n"
    done = asked(monkeypatch, tmp_path, answers, "--nodes", "4x8 h100")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("found 0; it must be at least 1") == 2
