"""A campaign's script on its own: it runs without hetplan and measures what hetplan measures."""

import ast
import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from campaign_runs import SAMPLES, SHAPES, finish, invoke, make, start

from hetplan.errors import InputError
from hetplan.model.spec import Architecture, plain_model
from hetplan.profiling import campaign_loader
from hetplan.profiling.campaign_bundle import (
    OLDEST_PYTHON,
    as_source,
    carried_sources,
    old_python_faults,
    source,
)
from hetplan.profiling.campaign_rows import RecordFile, is_whole, read_own_records, record_line
from hetplan.profiling.layers import build_layer
from hetplan.profiling.store import read_store

# Python that makes a memory fault of every transformer layer of hidden size 128.
NO_MEMORY = """
import torch
plain = torch.nn.functional.layer_norm
def layer_norm(x, shape, *rest):
    if shape == (128,):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return plain(x, shape, *rest)
torch.nn.functional.layer_norm = layer_norm
"""
LAYER_OUTPUT = """
import runpy, sys
script = runpy.run_path(sys.argv[1], run_name="carried")
script["carry"](script["SOURCES"])
import torch
from hetplan.model.spec import Architecture, plain_model
from hetplan.profiling.layers import build_layer
kept = []
for architecture in Architecture:
    model = plain_model(name="m", architecture=architecture, num_layers=1, hidden_size=32,
        ffn_hidden_size=48, num_attention_heads=4, num_kv_heads=2, head_dim=8, vocab_size=40,
        max_sequence_length=16)
    for tp in (1, 2, 4):
        layer = build_layer(model, 1, tp=tp, tp_rank=tp - 1, group=None, seed=3,
            dtype=torch.float32, device="cpu")
        x = torch.linspace(-1, 1, 2 * 16 * 32).view(2, 16, 32).requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t,
                                                      lambda t: t):
            y = layer(x)
        y.square().sum().backward()
        parameters = sum(p.numel() for p in layer.parameters())
        print(parameters, sum(saved), len(saved), y.double().sum().item().hex(),
              x.grad.double().sum().item().hex())
"""

# The clock of a process in which every operation of torch takes a millisecond, and its elements
# a microsecond each: the same on every machine, however busy.
COUNTING_CLOCK = """
import time, torch
from torch.utils._python_dispatch import TorchDispatchMode
work = [0.0]
class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        work[0] += 1e-3 + 1e-6 * (found.numel() if isinstance(found, torch.Tensor) else 0)
        return found
time.perf_counter = lambda: work[0]
Counting().__enter__()
"""
OWN_PROFILE = """
from hetplan.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    return make(tmp_path_factory.mktemp("campaign"))


def test_the_script_is_hetplans_own_text_for_python_3_8() -> None:
    carried = dict(carried_sources())
    assert "hetplan.profiling.layers" in carried
    assert "hetplan.profiling.measure_links" in carried
    assert not [name for name in carried if name.startswith(("hetplan.files", "hetplan.cli"))]
    for name, text in (*carried.items(), ("loader", source(campaign_loader.__name__))):
        ast.parse(text, feature_version=OLDEST_PYTHON)
        assert name == "loader" or old_python_faults(name, text) == ()
        if name != "loader":
            pairs = zip(text.splitlines(), source(name).splitlines(), strict=True)
            changed = [new for new, old in pairs if new != old]
            assert all(line.endswith("= object") for line in changed)


@pytest.mark.parametrize(
    "text",
    [
        "kinds = list[int]()",
        "isinstance(3, int | str)",
        "'ab'.removeprefix('a')",
        "x = {}\nx |= {1: 2}",
        "def f(x: int | None): pass",
    ],
)
def test_what_python_3_8_cannot_run_is_found(text) -> None:
    assert old_python_faults("m", text)
    lazy = "from __future__ import annotations\ndef f(x: list[int] | None): return {1} | {2}"
    assert not old_python_faults("m", lazy)


def test_what_the_loader_gives_does_what_newer_pythons_do() -> None:
    @campaign_loader.keyword_dataclass(frozen=True, slots=True, kw_only=True)
    class Value:
        first: int = 1
        second: str

    value = Value(second="b")
    assert (value, hash(value)) == (Value(first=1, second="b"), hash(Value(second="b")))
    assert repr(value).endswith("Value(first=1, second='b')")
    with pytest.raises(TypeError, match="second"):
        Value(first=2)
    with pytest.raises(AttributeError):
        value.first = 3
    assert list(campaign_loader.pairwise("abc")) == [("a", "b"), ("b", "c")]
    assert campaign_loader.lcm(4, 6, 10) == math.lcm(4, 6, 10)
    with pytest.raises(ValueError, match="lengths"):
        campaign_loader.zip_strictly("ab", "a", strict=True)

    class Word(campaign_loader.TextEnum):
        ONE = "one"

    assert (str(Word.ONE), f"{Word.ONE}", Word.ONE) == ("one", "one", "one")


def test_a_value_is_made_again_from_its_source() -> None:
    model = plain_model(
        name="it's", architecture=Architecture.GPT, num_layers=2, hidden_size=8, ffn_hidden_size=8,
        num_attention_heads=2, num_kv_heads=1, head_dim=4, vocab_size=9, max_sequence_length=4,
    )  # fmt: skip
    imports: set[tuple[str, str]] = set()
    text = as_source((model, None, (1,), 0.1), imports)
    names = {name: getattr(__import__(module, fromlist=[name]), name) for module, name in imports}
    assert eval(text, names) == (model, None, (1,), 0.1)


def test_the_carried_layers_compute_what_hetplans_do(campaign) -> None:
    command = [sys.executable, "-I", "-c", LAYER_OUTPUT, str(campaign / "measure_cpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=campaign)
    own = []
    for architecture in Architecture:
        model = plain_model(
            name="m", architecture=architecture, num_layers=1, hidden_size=32, ffn_hidden_size=48,
            num_attention_heads=4, num_kv_heads=2, head_dim=8, vocab_size=40,
            max_sequence_length=16,
        )  # fmt: skip
        for tp in (1, 2, 4):
            layer = build_layer(
                model, 1, tp=tp, tp_rank=tp - 1, group=None, seed=3, dtype=torch.float32,
                device="cpu",
            )  # fmt: skip
            x = torch.linspace(-1, 1, 2 * 16 * 32).view(2, 16, 32).requires_grad_()
            saved: list[int] = []

            def keep(tensor, saved=saved):
                saved.append(tensor.numel())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = layer(x)
            y.square().sum().backward()
            numbers = (sum(p.numel() for p in layer.parameters()), sum(saved), len(saved))
            sums = (y.double().sum().item().hex(), x.grad.double().sum().item().hex())
            own.append(" ".join(map(str, (*numbers, *sums))))
    assert done.stdout.splitlines() == own


def test_the_script_measures_what_hetplan_measures(tmp_path) -> None:
    """Under a clock that counts operations, the same layers take exactly the same."""
    folder = make(tmp_path)
    finish(start(folder / "measure_cpu.py", "layers", "--device", "cpu", prefix=COUNTING_CLOCK))
    invoke("--merge", folder, "--store", tmp_path / "store")
    own = (*("profile", "--store", str(tmp_path / "own")), *SHAPES[:10], "--device", "cpu")
    command = [sys.executable, "-c", COUNTING_CLOCK + OWN_PROFILE, *own]
    subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    here, there = (
        {sample.shape: sample.median_seconds for sample in read_store(tmp_path / name).layers}
        for name in ("own", "store")
    )
    assert len(there) == SAMPLES
    assert len(set(there.values())) > 4  # layers, passes and updates are told apart by the clock
    assert there == pytest.approx(here, rel=1e-9)


def test_a_killed_script_goes_on_and_what_it_measured_fits(campaign, tmp_path) -> None:
    script, results = campaign / "measure_cpu.py", campaign / "results-cpu-layers.jsonl"
    job = start(script, "layers", "--device", "cpu")
    for line in job.stdout:
        if line.startswith("4/"):
            break
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    with results.open("ab") as file:
        file.write(b'{"half a line')
    before = [each for each in read_own_records(str(results)) if each["record"] == "layer"]
    assert 0 < len(before) < SAMPLES
    partly = invoke("--merge", campaign, "--store", tmp_path / "store")
    assert f"{len(before)} samples added" in partly.stdout
    assert f"missing: layers cpu: {SAMPLES - len(before)} of {SAMPLES}" in partly.stdout
    assert "python3 measure_cpu.py layers" in partly.stdout
    assert "torn" in partly.stdout

    finish(start(script, "layers", "--device", "cpu"))
    assert not os.uname().nodename or os.uname().nodename not in results.read_text()
    rows = [each for each in read_own_records(str(results)) if each["record"] == "layer"]
    shapes = {json.dumps({**row["sample"], "median_seconds": 0}, sort_keys=True) for row in rows}
    assert len(rows) == SAMPLES <= len(shapes) + len(before)
    merged = json.loads(invoke("--merge", campaign, "--store", tmp_path / "store", "--json").stdout)
    assert merged["report"]["added"] == SAMPLES - len(before)
    assert [each["what"] for each in merged["missing"]] == ["link"]
    again = json.loads(invoke("--merge", campaign, "--store", tmp_path / "store", "--json").stdout)
    assert (again["report"]["added"], again["report"]["held"]) == (0, SAMPLES)
    found = read_store(tmp_path / "store")
    assert {each.tool for each in found.provenance} == {"hetplan campaign"}
    assert len({sample.shape for sample in found.layers}) == SAMPLES

    from hetplan.predict.fit import fit_stores

    predictor, _ = fit_stores(tmp_path / "store")
    assert {law.device for law in predictor.laws.layers} == {"cpu"}
    for sample in found.layers:
        assert 0 < sample.p10_seconds <= sample.median_seconds <= sample.p90_seconds


def test_what_does_not_fit_in_memory_is_a_reason_and_no_number(tmp_path) -> None:
    folder = make(tmp_path, *SHAPES, "--microbatch", "1")
    script = folder / "measure_cpu.py"
    printed = finish(start(script, "layers", "--device", "cpu", prefix=NO_MEMORY))
    assert "not measured: transformer hidden 128" in printed
    # Where it failed it is left out the next time.
    again = finish(start(script, "layers", "--device", "cpu"))
    assert "units that failed before are left out" in again
    result = invoke("--merge", folder, "--store", tmp_path / "store")
    assert "not measurable: cpu: 2 units: out of memory" in result.stdout
    assert "missing: layers" not in result.stdout
    found = read_store(tmp_path / "store").layers
    assert {(row.layer, row.hidden_size) for row in found} == {
        ("embedding", 64), ("embedding", 128), ("transformer", 64), ("head", 64),
    }  # fmt: skip


@pytest.mark.slow
def test_a_link_is_measured_by_two_processes_of_the_script(tmp_path) -> None:
    folder = make(tmp_path)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(folder / "measure_cpu.py"), "links", "--link", "lo"),
    ]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=True
    )
    assert "done; send back results-cpu-link-lo.jsonl" in done.stdout
    merged = json.loads(invoke("--merge", folder, "--store", tmp_path / "store", "--json").stdout)
    assert merged["report"]["added"] == 14
    assert [each["what"] for each in merged["missing"]] == ["layers"]
    found = read_store(tmp_path / "store").links
    assert {(sample.link, sample.message_bytes) for sample in found} == {
        ("lo", 4096),
        ("lo", 16384),
    }


@pytest.mark.slow
def test_a_link_needs_torchrun_and_a_unit_that_kills_twice_is_left(campaign, tmp_path) -> None:
    job = start(campaign / "measure_cpu.py", "links", "--link", "lo")
    assert "start with torchrun" in job.communicate()[1]
    assert job.returncode == 2
    out = tmp_path / "results.jsonl"
    first = finish(
        start(campaign / "measure_cpu.py", "layers", "--device", "cpu", "--budget", "1e-9",
              "--out", str(out))
    )  # fmt: skip
    assert "the budget is spent, 11 units are left" in first
    (run,) = (each for each in read_own_records(str(out)) if each["record"] == "run")
    records = RecordFile(str(out))
    for _ in range(2):
        records.add({"record": "begin", "run": run["run"], "unit": 3})
    del records  # the next start holds the file
    second = finish(
        start(campaign / "measure_cpu.py", "layers", "--device", "cpu", "--budget", "1e-9",
              "--out", str(out))
    )  # fmt: skip
    assert "1 units that failed before are left out" in second


def test_a_line_keeps_its_form() -> None:
    # Files written by scripts that are out there must stay readable.
    line = record_line({"record": "begin", "run": "40df2d8c7e01", "unit": 0})
    assert line == (
        '{"record": "begin", "run": "40df2d8c7e01", "sum": "3995aa0095931015", "unit": 0}'
    )
    assert is_whole(json.loads(line))


def test_options_of_a_campaign_that_do_not_belong_together(tmp_path) -> None:
    for arguments, text in (
        (("--merge",), "needs files"),
        (("--merge", "a", "--list"), "different things"),
        (("a",), "left over"),
        (("--out", "x"), "goes with --campaign"),
        (("--cluster", "c.yaml"), "goes with --list"),
        (("--merge", tmp_path / "none"), "no such file"),
        (("--merge", tmp_path), "no results"),
        (("--campaign", tmp_path / "none.yaml"), "no such file"),
    ):
        with pytest.raises(InputError, match=text):
            invoke(*arguments)


def test_another_campaign_is_not_written_over(tmp_path) -> None:
    folder = make(tmp_path)
    text = (folder / "measure_cpu.py").read_text()
    assert make(tmp_path) == folder
    assert (folder / "measure_cpu.py").read_text() == text
    with pytest.raises(InputError, match="another campaign"):
        make(tmp_path, "--hidden", "64", "--tp", "1")
