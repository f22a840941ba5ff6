"""What to measure next: the loop with a made-up machine, and one short run on this one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hetplan.advice.candidates import Candidate
from hetplan.advice.loop import View, growth, measure_for_job, plan_order
from hetplan.advice.measurement_order import Leaves, Part, PlanParts, standing
from hetplan.cli.main import app
from hetplan.errors import ProfileError
from hetplan.profiling import work
from hetplan.profiling.store import read_store

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODEL = """schema: hetplan.model/1
name: tiny
architecture: gpt
num_layers: 2
hidden_size: 32
ffn_hidden_size: 64
num_attention_heads: 4
num_kv_heads: 4
head_dim: 8
vocab_size: 64
max_sequence_length: 16
"""
JOB = """schema: hetplan.job/1
name: tiny
global_batch_size: 4
sequence_length: 16
precision: float32
optimizer: sgd
target: native
pin: {tp: 1}
"""
SHARES = {"large": 0.74, "middle": 0.25, "small": 0.01}
EQUAL = {str(number): 1.0 / 12 for number in range(12)}


@dataclass
class Fake:
    """A backend of one plan whose half-widths fall to what was promised, or do not."""

    shares: dict[str, float] = field(default_factory=lambda: SHARES)
    widths: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys({**SHARES, **EQUAL}, 0.5)
    )
    leaves: float = 0.1
    promised: float = 0.1
    seconds: float = 1.0
    refuses: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    measured: list[str] = field(default_factory=list)
    interrupt_at: int = -1

    def look(self) -> View:
        plan = PlanParts(
            name="p",
            step_seconds=1.0,
            parts=tuple(
                Part(asked=name, source=(name, ""), seconds=share, log_halfwidth=self.widths[name])
                for name, share in self.shares.items()
            ),
        )
        return View(
            plans=(plan,),
            log_halfwidth=standing([plan]).log_halfwidth,
            candidates=tuple(self._candidate(name) for name in self.shares),
        )

    def _candidate(self, name: str) -> Candidate:
        leaves = Leaves(asked=name, least_log_halfwidth=self.promised)
        return Candidate(
            name=name,
            seconds=1.0,
            leaves=(leaves,),
            kinds=("k",),
            here=name not in self.elsewhere,
        )

    def measure(self, candidate: Candidate, seconds_left: float) -> float:
        assert seconds_left > 0
        name = candidate.name
        if len(self.measured) == self.interrupt_at:
            raise KeyboardInterrupt
        self.measured.append(name)
        if name in self.refuses:
            raise ProfileError(f"{name} is refused (out of memory)")
        self.widths[name] = min(self.widths[name], self.leaves)
        return self.seconds


def test_what_shrinks_the_interval_most_is_measured_first() -> None:
    backend = Fake()
    report = measure_for_job(backend, 100.0)
    assert backend.measured == ["large", "middle"]  # 1 % of the step is below the least gain
    assert "nothing more that this machine can measure" in report.ended
    assert report.after.log_halfwidth < 0.5 * report.before.log_halfwidth
    assert report.spent_seconds == 2.0
    assert not plan_order(report.after, passed_over=backend.measured)


def test_the_budget_ends_it_and_what_is_left_is_told() -> None:
    backend = Fake()
    report = measure_for_job(backend, 1.5)
    assert backend.measured == ["large"]
    assert (report.ended, report.least) == ("the budget is spent", "middle")
    nothing = measure_for_job(Fake(), 0.5)
    assert (nothing.done, nothing.least, nothing.least_seconds) == ((), "large", 1.0)


def test_an_interval_that_no_longer_shrinks_ends_it() -> None:
    """Promised again and again, never kept: each is tried once, and never a second time."""
    backend = Fake(leaves=0.499)
    report = measure_for_job(backend, 100.0)
    assert backend.measured == ["large", "middle"]
    assert report.after.log_halfwidth == pytest.approx(report.before.log_halfwidth, rel=0.01)
    # A budget of which each measurement is a batch: three of them without a gain are enough.
    stopped = measure_for_job(Fake(shares=EQUAL, leaves=0.499), 7.0)
    assert len(stopped.done) == 3
    assert "the last 3 batches" in stopped.ended


def test_what_widened_the_interval_is_named() -> None:
    report = measure_for_job(Fake(), 2.0)
    assert growth(report.before, report.after) == ""
    words = "wider than before: large was taken to be known to +11% and is known to +65%"
    assert words in growth(report.after, report.before)


def test_an_interrupt_goes_on_to_the_caller_with_everything_kept() -> None:
    backend = Fake(interrupt_at=1)
    with pytest.raises(KeyboardInterrupt):
        measure_for_job(backend, 100.0)
    assert backend.measured == ["large"]
    backend.interrupt_at = -1
    assert "middle" in [each.name for each in measure_for_job(backend, 100.0).done]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def run_for(files: Path, *options: str, cluster: Path | None = None) -> Result:
    return CliRunner().invoke(
        app,
        [
            *("profile", "for-job", "--job", str(files / "job.yaml")),
            *("--model", str(files / "model.yaml")),
            *("--cluster", str(cluster or CONFIGS / "clusters" / "this-machine.yaml")),
            *("--store", str(files / "store"), "--device", "cpu", *options),
        ],
    )


@pytest.mark.slow
def test_a_short_run_on_this_machine_and_the_same_command_again(files: Path) -> None:
    first = run_for(files, "--budget", "1min", "--json")
    assert first.exit_code == 0, first.stderr
    report = json.loads(first.stdout)
    assert report["schema"] == "hetplan.profile-for/2"
    assert "nothing is known of cpu yet" in first.stderr
    held = read_store(files / "store").layers
    assert {sample.layer for sample in held} == {"embedding", "transformer", "head"}
    assert all(sample.device == "cpu" and sample.measured_on for sample in held)
    chances = [plan["chance"] for plan in report["before"]["plans"]]
    assert sum(chances) == pytest.approx(1.0)
    for plan in (*report["before"]["plans"], *report["after"]["plans"]):
        assert plan["p5_seconds"] < plan["step_seconds"] < plan["p95_seconds"]
    assert all(not each["refused"] for each in report["done"])
    assert 0.0 <= report["spent_seconds"] < 120.0
    shapes = {sample.shape for sample in held}
    # Nothing is measured a second time; the text says how things stand.
    second = run_for(files, "--budget", "1min")
    assert second.exit_code == 0, second.stderr
    assert "nothing is known" not in second.stderr
    again = read_store(files / "store").layers
    assert len(again) == len({sample.shape for sample in again})
    assert shapes <= {sample.shape for sample in again}
    assert second.stdout.startswith("before: ")
    assert second.stdout.count("it is the best with a chance of") == 2
    assert "\nafter: " in second.stdout


def test_an_interrupted_run_keeps_its_rows_and_goes_on(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = work.layer_rows, []

    def interrupted(*arguments, **names):  # type: ignore[no-untyped-def]
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*arguments, **names)

    monkeypatch.setattr(work, "layer_rows", interrupted)
    first = run_for(files, "--budget", "1min")
    assert first.exit_code == 130
    assert "the same command goes on from there" in first.stderr
    assert len(read_store(files / "store").layers) == 4
    monkeypatch.setattr(work, "layer_rows", plain)
    # Embeddings alone are there: enough to have a law, not enough to price a plan.
    listed = run_for(files, "--dry-run")
    assert listed.exit_code == 2
    assert "run the command without --dry-run" in listed.stderr
    # Room for one more, and then it says where it stands.
    again = run_for(files, "--budget", "10ms")
    assert again.exit_code == 2
    assert "4 layers are measured first; 1 are" in again.stderr
    held = [sample.shape for sample in read_store(files / "store").layers]
    assert len(held) == len(set(held)) == 6


MIXED = """schema: hetplan.cluster/2
name: mixed
regions:
  - name: here
    islands:
      - name: old
        device: nvidia-v100-32gb-sxm
        nodes: 2
        devices_per_node: 2
        intra_node: {bandwidth: 100 GB/s, latency: 3 us, transport: device-direct}
        inter_node: {bandwidth: 1 GB/s, latency: 5 us, transport: device-direct, samples: cable}
      - name: new
        device: amd-mi210
        nodes: 1
        devices_per_node: 2
        intra_node: {bandwidth: 50 GB/s, latency: 3 us, transport: device-direct}
        inter_node: {bandwidth: 10 GB/s, latency: 5 us, transport: device-direct}
links_default:
  within_region: {bandwidth_per_device: 1 GB/s, latency: 30 us, transport: host-staged}
"""


def test_other_machines_get_exact_commands_in_the_order_of_their_worth(files: Path) -> None:
    (files / "mixed.yaml").write_text(MIXED)
    (files / "job.yaml").write_text(JOB.replace("float32", "float16").replace("native", "megatron"))
    found = run_for(files, "--dry-run", "--json", cluster=files / "mixed.yaml")
    assert found.exit_code == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["left_here"] == []
    assert report["done"] == []
    commands = [command for each in report["elsewhere"] for command in each["commands"]]
    assert commands
    assert len(set(commands)) == len(commands)
    for each in report["elsewhere"]:
        assert each["where"]
        for command in each["commands"]:
            # What a person would copy is a command that exists, with this store.
            assert command.split()[0] in ("hetplan", "torchrun")
            assert str(files / "store") in command
            assert "layers" in command or "links" in command
    text = run_for(files, "--dry-run", cluster=files / "mixed.yaml").stdout
    assert all(command in text for command in commands)
