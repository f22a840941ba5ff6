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
from hetplan.cli.estimate_layout import LayoutOptions, plan_of
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.errors import InfeasibleError, InputError
from hetplan.plans.build import stage_devices
from hetplan.plans.plan import Plan
from hetplan.search.result import Certificate, Inputs, SearchResult

CLUSTER = two_islands()  # a and b, two nodes of four devices each
NOTHING = LayoutOptions(
    tp=1, pp=None, dp=None, microbatch_size=1, layers=None, islands=None, recompute=False
)


def placed(plan: Plan) -> list[tuple[str, int]]:
    """(island, layers with embedding and head) of every stage."""
    return [
        (CLUSTER.island_of_device(stage_devices(stage)[0]).name, stage.num_layers)
        for stage in plan.pipelines[0].stages
    ]


def layout(cluster: Cluster = CLUSTER, **options: object) -> Plan:
    return plan_of(replace(NOTHING, **options), model(), cluster, job())  # type: ignore[arg-type]


def test_one_stage_takes_the_largest_dp() -> None:
    plan = layout()
    assert placed(plan) == [("a", 10)]
    assert plan.pipelines[0].stages[0].replicas[0].dp == 8
    assert plan.pipelines[0].num_microbatches == 4


def test_layers_say_how_many_stages() -> None:
    plan = layout(layers="3,5", tp=2)
    # dp 4 has room for one stage on each island, dp 2 for two on one; the largest counts.
    assert placed(plan) == [("a", 4), ("b", 6)]
    assert plan.pipelines[0].stages[0].replicas[0].dp == 4


def test_given_dp_prefers_one_island_with_room() -> None:
    assert placed(layout(layers="3,5", tp=2, dp=2)) == [("a", 4), ("a", 6)]
    # Three stages of four devices: two fill island a, the third goes to b.
    assert placed(layout(layers="3,3,2", tp=2, dp=2)) == [("a", 4), ("a", 3), ("b", 3)]


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
        ({"layers": "3,x"}, "--layers is '3,x'; write whole numbers"),
        ({"layers": "3,4"}, "hold 7 transformer layers, small has 8"),
        ({"layers": "8,0"}, "stage 1 has no transformer layer"),
        ({"layers": "4,4", "pp": 3}, "--pp is 3, --layers has 2 stages"),
        ({"pp": 0}, "--pp is 0"),
        ({"layers": "4,4", "islands": "a,b,a"}, "--islands has 3 entries for 2"),
        ({"islands": "c"}, "no island is named c; the cluster has a, b"),
        ({"layers": "2,2,4", "islands": "a,b,a", "dp": 1}, "not next to each other"),
        ({"tp": 3}, "1 stages of tp 3 x dp .any. devices do not fit on the cluster"),
        ({"tp": 0}, "--tp is 0"),
        ({"dp": 0}, "--dp is 0"),
        ({"microbatch_size": 0}, "--microbatch-size is 0"),
        ({"dp": 3}, "do not fit"),
        ({"dp": 4, "microbatch_size": 3}, "global_batch_size 32 is not a multiple"),
        ({"dp": 2, "pp": 4, "tp": 4, "islands": "a"}, "island a .2 usable nodes.* no room"),
        ({"dp": 8, "pp": 4, "tp": 4}, "4 stages of tp 4 x dp 8 devices do not fit on the cluster"),
    ],
)
def test_what_does_not_divide_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        layout(**options)


def test_tp_that_the_model_does_not_allow_is_refused() -> None:
    with pytest.raises(InputError, match="tp 4 does not divide num_attention_heads 6"):
        plan_of(
            replace(NOTHING, tp=4, dp=1),
            model(num_attention_heads=6, num_kv_heads=6),
            CLUSTER,
            job(),
        )


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, cluster: Cluster = CLUSTER) -> Result:
    inputs = Inputs(model=model(), cluster=cluster, job=job(), sha256=())
    monkeypatch.setattr(command, "read_inputs", lambda *_: inputs)
    monkeypatch.setattr(command, "read_predictor", lambda *_: (LinearPredictor(), "fake"))
    app = typer.Typer()
    app.command()(command.estimate)
    return CliRunner().invoke(app, arguments)


FILES = ("--model", "m", "--cluster", "c", "--job", "j")


def test_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, *FILES, "--tp", "2", "--layers", "3,5", "--islands", "a,b")
    assert result.exit_code == 0, result.output
    assert "E+3" in result.stdout
    assert "5+H" in result.stdout
    assert "step " in result.stdout


def test_json_is_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, *FILES, "--tp", "2", "--layers", "3,5", "--islands", "a,b", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    plan = layout(tp=2, layers="3,5", islands="a,b")
    expected = estimate(plan, model(), CLUSTER, job(), LinearPredictor())
    assert found["schema"] == "hetplan.estimate/1"
    assert found["step_seconds"] == expected.step_seconds
    assert [stage["transformer_layers"] for stage in found["stages"]] == [3, 5]


def test_priced_and_infeasible_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        CLUSTER, islands=tuple(replace(one, memory_bytes=2.0**20) for one in CLUSTER.islands)
    )
    result = run(monkeypatch, *FILES, cluster=small)
    assert isinstance(result.exception, InfeasibleError)
    assert "stage 0 needs" in str(result.exception)
    assert "DOES NOT FIT" in result.stdout
    assert "step " in result.stdout


def test_needs_files_or_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, "--model", "m")
    assert isinstance(result.exception, InputError)
    assert "all of --model, --cluster and --job" in str(result.exception)


def saved_plan(folder: Path, plan: Plan) -> Path:
    from hetplan.search.files import save_result

    result = SearchResult(
        schema="hetplan.plan/2",
        hetplan_version="0",
        seed=0,
        inputs=Inputs(model=model(), cluster=CLUSTER, job=job(), sha256=()),
        plan=plan,
        estimate=estimate(plan, model(), CLUSTER, job(), LinearPredictor()),
        certificate=Certificate(
            lower_bound_seconds=0.0,
            gap=1.0,
            status="limit",
            space="nothing",
            candidates=0,
            pruned_by_bound=0,
            searched=0,
            replays=0,
            integer_model_bound_seconds=None,
        ),
    )
    path = folder / "plan.json"
    save_result(result, path)
    return path


def test_prices_a_plan_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = layout(layers="3,5", tp=2)
    path = saved_plan(tmp_path, plan)
    result = run(monkeypatch, str(path), "--json")
    assert result.exit_code == 0, result.output
    expected = estimate(plan, model(), CLUSTER, job(), LinearPredictor())
    assert json.loads(result.stdout)["step_seconds"] == expected.step_seconds


def test_a_plan_file_takes_no_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = saved_plan(tmp_path, layout())
    for option in (("--tp", "2"), ("--recompute",), ("--model", "m")):
        result = run(monkeypatch, str(path), *option)
        assert isinstance(result.exception, InputError)
        assert "leave those options out" in str(result.exception)


def test_an_illegal_plan_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = layout()
    path = saved_plan(tmp_path, plan)
    text = path.read_text().replace('"padded_vocab_size": 1000', '"padded_vocab_size": 10')
    path.write_text(text)
    result = run(monkeypatch, str(path))
    assert isinstance(result.exception, InputError)
    assert "plan.padded_vocab_size: 10 is below the vocabulary" in str(result.exception)
