"""`hetplan estimate`: which layout its options mean, what it prints, how it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from cost_fakes import LinearPredictor, job, model, two_islands
from typer.testing import CliRunner, Result

from hetplan.cli import estimate as command
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.errors import InfeasibleError, InputError
from hetplan.job.spec import Job
from hetplan.plans.layout import Layout, plan_of_layout
from hetplan.plans.plan import Plan
from hetplan.search.files import load_legal_plan
from hetplan.search.result import Inputs

CLUSTER = two_islands()  # a and b, two nodes of four devices each


def given(**options: object) -> Layout:
    """A layout whose rows are written as on the command line."""
    for name, value in options.items():
        if isinstance(value, str) and name in ("islands", "overlap", "recompute_modules"):
            options[name] = () if value == "none" else tuple(value.split(","))
    layers = options.pop("layers", None)
    if layers is not None:
        options["layers"] = tuple(int(part) for part in str(layers).split(","))
    return Layout(**options)  # type: ignore[arg-type]


def placed(plan: Plan) -> list[tuple[str, int]]:
    """(island, layers with embedding and head) of every stage."""
    return [
        (CLUSTER.island_of_device(stage.devices[0].start).name, stage.num_layers)
        for stage in plan.pipelines[0].stages
    ]


def layout(cluster: Cluster = CLUSTER, **options: object) -> Plan:
    return plan_of_layout(given(**options), model(), cluster, job())


def test_islands_as_given() -> None:
    assert placed(layout(layers="2,3,3", islands="b,a,a", dp=1)) == [("b", 3), ("a", 3), ("a", 4)]
    assert placed(layout(pp=4, islands="b", dp=1)) == [("b", 3), ("b", 2), ("b", 2), ("b", 3)]
    # 8 layers on 3 stages: as even as they can be.
    assert placed(layout(pp=3, islands="b", dp=1)) == [("b", 4), ("b", 3), ("b", 3)]
    # dp 4 is the most with which two stages fit on island a.
    plan = layout(layers="2,3,3", islands="b,a,a")
    assert plan.pipelines[0].stages[0].replicas[0].dp == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "3,4"}, "hold 7 transformer layers, small has 8"),
        ({"layers": "4,4", "pp": 3}, "pp: 3, but layers has 2 stages"),
        ({"layers": "4,4", "islands": "a,b,a"}, "islands: 3 entries for 2"),
        ({"islands": "c"}, "no island is named c; the cluster has a, b"),
        ({"microbatch_size": 0}, "microbatch_size: 0; it must"),
        ({"dp": 4, "microbatch_size": 3}, "global_batch_size 32 is not a multiple"),
        ({"dp": 8, "pp": 4, "tp": 4}, "4 stages of tp 4 x dp 8 devices do not fit on the cluster"),
    ],
)
def test_what_does_not_divide_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        layout(**options)


def run(
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    cluster: Cluster = CLUSTER,
    asked: Job | None = None,
) -> Result:
    inputs = Inputs(model=model(), cluster=cluster, job=asked or job(), sha256=())

    asks = command.question_of

    def asked_of(
        model: object, cluster: object, job: object, *more: object, **words: object
    ) -> object:
        if cluster is None or job is None:
            return asks(model, cluster, job, *more, **words)  # which says what is missing
        return inputs, None

    monkeypatch.setattr(command, "question_of", asked_of)
    monkeypatch.setattr(command, "read_predictor", lambda *_: (LinearPredictor(), "fake"))
    app = typer.Typer()
    app.command()(command.estimate)
    return CliRunner().invoke(app, arguments)


FILES = ("--model", "m.yaml", "--cluster", "c.yaml", "--job", "j.yaml")


def test_json_is_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, *FILES, "--tp", "2", "--layers", "3,5", "--islands", "a,b", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    plan = layout(tp=2, layers="3,5", islands="a,b")
    expected = estimate(plan, model(), CLUSTER, job(), LinearPredictor())
    assert found["schema"] == "hetplan.estimate/7"
    assert found["step_seconds"] == expected.step_seconds
    assert found["run"] is None
    assert "energy" in found
    assert [stage["transformer_layers"] for stage in found["stages"]] == [3, 5]


def test_priced_and_infeasible_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        CLUSTER, islands=tuple(replace(one, memory_bytes=2.0**20) for one in CLUSTER.islands)
    )
    result = run(monkeypatch, *FILES, cluster=small)
    assert isinstance(result.exception, InfeasibleError)
    assert "stage 0 needs" in str(result.exception)
    assert "TOO FULL" in result.stdout
    assert "a step (90 %" in result.stdout


def test_needs_files_or_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, "--model", "m.yaml")
    assert isinstance(result.exception, InputError)
    assert "give --cluster FILE, or --nodes" in str(result.exception)


def saved_plan(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    path = folder / "plan.json"
    result = run(monkeypatch, *FILES, "--out", str(path))
    assert result.exit_code == 0, result.output
    return path


def test_a_plan_file_takes_no_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = saved_plan(monkeypatch, tmp_path)
    for option in (("--tp", "2"), ("--recompute",), ("--model", "m")):
        result = run(monkeypatch, str(path), *option)
        assert isinstance(result.exception, InputError)
        assert "leave those options out" in str(result.exception)


def test_an_illegal_plan_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = saved_plan(monkeypatch, tmp_path)
    text = path.read_text().replace('"padded_vocab_size": 1000', '"padded_vocab_size": 10')
    path.write_text(text)
    result = run(monkeypatch, str(path))
    assert isinstance(result.exception, InputError)
    assert "plan.padded_vocab_size: 10 is below the vocabulary" in str(result.exception)


ANY = job(target="any", gradient_clipping=False)


def any_layout(**options: object) -> Plan:
    return plan_of_layout(given(**options), model(), CLUSTER, ANY)


def test_virtual_stages_go_through_the_pipeline_several_times() -> None:
    plan = any_layout(layers="1,2,3,2", virtual_stages=2, tp=2, dp=2)
    (pipeline,) = plan.pipelines
    assert (pipeline.schedule.name, pipeline.schedule.virtual_stages) == ("interleaved-1f1b", 2)
    held = [[(c.start, c.stop) for c in stage.chunks] for stage in pipeline.stages]
    assert held == [[(0, 2), (4, 7)], [(2, 4), (7, 10)]]
    even = any_layout(pp=2, virtual_stages=4, tp=2, dp=2)
    assert [len(stage.chunks) for stage in even.pipelines[0].stages] == [4, 4]


def test_sharding_overlap_and_recomputation_are_in_the_plan() -> None:
    plan = any_layout(
        dp=4, sharding="parameters", shards=2, offload=0.25, overlap="reduction,send",
        recompute_modules="core_attn,mlp", schedule="gpipe",
    )  # fmt: skip
    assert (plan.sharding.value, plan.optimizer_shards) == ("parameters", 2)
    assert plan.optimizer_offload == 0.25
    assert (plan.overlap.reduction, plan.overlap.send) == (True, True)
    assert (plan.overlap.gathering, plan.overlap.context_parallel) == (False, False)
    recompute = plan.pipelines[0].stages[0].recompute
    assert recompute.granularity.value == "selective"
    assert [module.value for module in recompute.modules] == ["core_attn", "mlp"]
    assert plan.pipelines[0].schedule.name == "gpipe"
    first = any_layout(dp=4, recompute=True, recompute_layers=3).pipelines[0].stages[0].recompute
    assert (first.granularity.value, first.layers) == ("full", 3)
    assert any_layout(dp=4, sharding="none").optimizer_shards == 1
    assert any_layout(dp=4, shards=1).sharding.value == "none"
    assert not any_layout(dp=4, overlap="none").overlap.context_parallel


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f2b"}, "schedule: '1f2b'; it is one of 1f1b, gpipe"),
        ({"layers": "4,4,0", "virtual_stages": 2}, "layers: 3 entries for 2 virtual stages"),
        ({"ep": 3, "pp": 2}, r"stages\[\*\].replicas\[0\] \(all 2\): ep 3"),
        (
            {"pp": 3, "virtual_stages": 4, "dp": 1},
            "3 pipeline stages of 4 chunks for 8",
        ),
        ({"sharding": "all"}, "sharding: 'all'; it is one of none, optimizer"),
        ({"recompute_modules": "attention"}, "recompute_modules: 'attention'; known: core"),
        ({"recompute_layers": 2}, "recompute_layers: goes with recompute"),
        ({"offload": 1.5}, "optimizer_offload: 1.5"),
    ],
)
def test_options_that_make_no_plan_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        any_layout(**options)


def test_a_trace_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = run(monkeypatch, *FILES, "--pp", "2", "--dp", "1", "--trace", str(path))
    assert result.exit_code == 0, result.output
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["name"] == "forward" for event in events) == 2 * 32


def test_a_lost_nic_is_priced_beside_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layout_options = ("--tp", "1", "--dp", "8", "--islands", "a")
    result = run(monkeypatch, *FILES, *layout_options, "--what-if", "lost-nic=a/1/2")
    assert result.exit_code == 0, result.output
    assert "what if: NIC 2 of node 1 of a is down" in result.stderr
    assert "what if: the step takes" in result.stderr
    other = run(monkeypatch, *FILES, *layout_options, "--what-if", "lost-nic=b/0/0")
    assert "what if: the plan uses no device of that node; nothing changes" in other.stderr
    assert "the step takes" not in other.stderr
    out = tmp_path / "mine.json"
    wrong = run(
        monkeypatch, *FILES, *layout_options, "--out", str(out), "--what-if", "lost-nic=a/1"
    )
    assert not out.exists()  # refused before anything was priced or written
    assert isinstance(wrong.exception, InputError)
    assert "write lost-nic=ISLAND/NODE/NIC" in str(wrong.exception)


def test_a_layout_of_every_choice_is_a_plan_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    result = run(
        monkeypatch, *FILES, "--pp", "2", "--dp", "4", "--sharding", "parameters", "--schedule",
        "zb-h1", "--out", str(path), asked=ANY,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    kept = load_legal_plan(path)
    assert kept.plan.pipelines[0].schedule.name == "zb-h1"
    assert sum(each.seconds for each in kept.estimate.components) == pytest.approx(
        kept.estimate.step_seconds
    )
    again = run(monkeypatch, str(path), "--json")
    assert json.loads(again.stdout)["step_seconds"] == kept.estimate.step_seconds
