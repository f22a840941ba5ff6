"""What an interval stands on: sources of errors, measured runs, and what a step is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from cost_fakes import LinearPredictor, island, job, link, model, two_islands
from estimate_plans import unlike_kinds
from one_pipeline import StageChoice, build_plan

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, RegionLink
from hetplan.comparison.calibration import run_error
from hetplan.cost.arrays import Floats
from hetplan.cost.estimate import StepCalibration, estimate, span_of
from hetplan.cost.estimate_values import Estimate
from hetplan.cost.replay.times import StageTimes
from hetplan.cost.step_model import draws
from hetplan.cost.step_model.draws import Draws
from hetplan.errors import InputError
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import Plan
from hetplan.predict.calibration.factors import calibrate, devices_of, regime_of
from hetplan.predict.calibration.values import (
    COMMUNICATION,
    COMPUTE,
    Calibration,
    CauseFactor,
    GroupInterval,
    SlowTail,
)
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.predictor import (
    BY_OTHERS,
    MEASURED,
    LayerQuery,
    Prediction,
    PredictionPart,
    calibrated_cause,
    is_extrapolation,
    is_link,
    link_cause,
)
from hetplan.reports.plans import EXTRAPOLATED, stage_table

SHAPE, ASKED, CLUSTER = model(), job(), two_islands()


def plan_on(cluster: Cluster, *choices: StageChoice, **degrees: int) -> Plan:
    asked = {"tp": 2, "dp": 2, "microbatch_size": 2} | degrees
    return build_plan(SHAPE, cluster, ASKED, choices, Shape(**asked))


ALONE = plan_on(
    CLUSTER, StageChoice(island="a", transformer_layers=8), tp=1, dp=1, microbatch_size=1
)
BOTH = plan_on(
    CLUSTER,
    StageChoice(island="a", transformer_layers=3),
    StageChoice(island="a", transformer_layers=3),
    StageChoice(island="b", transformer_layers=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InParts(LinearPredictor):
    """Layers in so many equal parts, each of its own class."""

    parts: int = 4

    def _cut(self, found: Prediction) -> Prediction:
        each = PredictionPart(
            name="", seconds=found.seconds / self.parts, log_halfwidth=self.halfwidth
        )
        return replace(
            found, parts=tuple(replace(each, name=f"class {n}") for n in range(self.parts))
        )

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        return self._cut(LinearPredictor.layer(self, device, query))


def test_a_step_names_whoever_measured_a_part_of_it() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class OfBoth(InParts):
        def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
            found = self._cut(LinearPredictor.layer(self, device, query))
            first, *rest = found.parts
            return replace(found, parts=(replace(first, source=BY_OTHERS), *rest))

    both = estimate(ALONE, SHAPE, CLUSTER, ASKED, OfBoth(parts=2))
    assert {MEASURED, BY_OTHERS} <= set(both.sources)
    assert any("class 0 predicted from operators that others" in each for each in both.warnings)
    alone = estimate(ALONE, SHAPE, CLUSTER, ASKED, InParts(parts=2))
    assert BY_OTHERS not in alone.sources


def half(found: Estimate) -> float:
    assert found.p5_seconds is not None
    assert found.p95_seconds is not None
    return 0.5 * math.log(found.p95_seconds / found.p5_seconds)


@pytest.mark.parametrize("parts", [1, 4, 16])
def test_errors_of_many_classes_average_out(parts: int) -> None:
    # All of a layer is one class each, forward and backward alike: the root of the number.
    sure = InParts(halfwidth=0.1, parts=parts, update_seconds=0.0)
    found = estimate(ALONE, SHAPE, CLUSTER, ASKED, sure)
    assert half(found) == pytest.approx(0.1 / math.sqrt(parts), rel=0.12)
    assert found.own_log_halfwidth == pytest.approx(half(found))


@pytest.mark.parametrize("plan", [ALONE, BOTH], ids=["one device", "two islands"])
def test_a_step_of_many_microbatches_is_drawn_from_shorter_ones(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, long = plan.pipelines[0], 60
    asked = replace(
        ASKED, global_batch_size=ASKED.global_batch_size * long // pipeline.num_microbatches
    )
    plan = replace(plan, pipelines=(replace(pipeline, num_microbatches=long),))
    sure = LinearPredictor(halfwidth=0.1)
    whole = estimate(plan, SHAPE, CLUSTER, asked, sure)
    replayed = []
    ends = draws.ends_of_draws

    def counted(times: StageTimes, rendezvous: bool) -> Floats:
        replayed.append(times.num_microbatches)
        return ends(times, rendezvous)

    monkeypatch.setattr(draws, "ends_of_draws", counted)
    monkeypatch.setattr(draws, "WHOLE_PASSES", 1)
    shorter = estimate(plan, SHAPE, CLUSTER, asked, sure)
    assert max(replayed) <= 4 * max(stage.warmup_depth for stage in pipeline.stages)
    assert shorter.step_seconds == whole.step_seconds
    assert half(shorter) == pytest.approx(half(whole), rel=0.02)
    for one, other in zip(shorter.causes, whole.causes, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=0.02)


@pytest.mark.parametrize("budget", [1, 150, 10**9])
def test_draws_of_long_replays_are_few(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    ends = draws.ends_of_draws

    def counted(times: StageTimes, rendezvous: bool) -> Floats:
        found.append(len(times.forward))
        return ends(times, rendezvous)

    monkeypatch.setattr(draws, "ends_of_draws", counted)
    passes = BOTH.pipelines[0].num_microbatches * len(BOTH.pipelines[0].stages)
    monkeypatch.setattr(draws, "MOST_PASSES", budget * passes)
    estimate(BOTH, SHAPE, CLUSTER, ASKED, LinearPredictor(halfwidth=0.1))
    assert found[0] == {1: 20, 150: 150, 10**9: draws.DRAWS}[budget]


@pytest.mark.parametrize("plan", [ALONE, BOTH], ids=["one device", "two islands"])
def test_causes_add_up_to_the_step(plan: Plan) -> None:
    found = estimate(plan, SHAPE, CLUSTER, ASKED, LinearPredictor(halfwidth=0.1))
    assert sum(each.seconds for each in found.causes) == pytest.approx(found.step_seconds)
    loading = replace(ASKED, data_loading_seconds=3.0)
    longer = estimate(plan, SHAPE, CLUSTER, loading, LinearPredictor(halfwidth=0.1))
    assert longer.step_seconds == pytest.approx(found.step_seconds + 3.0)
    assert sum(each.seconds for each in longer.causes) == pytest.approx(found.step_seconds)


def test_causes_are_what_the_step_loses_when_a_device_gets_faster() -> None:
    # Another way to the same number: whole estimates with one device kind 0.01 % slower.
    predictor = LinearPredictor(halfwidth=0.1, slow=(("slow", 1.7),), update_seconds=0.0)
    found = estimate(BOTH, SHAPE, CLUSTER, ASKED, predictor)
    for kind, factor in (("fast", 1.0), ("slow", 1.7)):
        more = dict(predictor.slow) | {kind: factor * (1 + 1e-4)}
        slower = replace(predictor, slow=tuple(more.items()))
        moved = estimate(BOTH, SHAPE, CLUSTER, ASKED, slower).step_seconds - found.step_seconds
        part = sum(each.seconds for each in found.causes if each.cause == kind)
        assert moved / 1e-4 == pytest.approx(part, rel=1e-3, abs=1e-3 * found.step_seconds)


def test_squares_of_the_causes_are_the_square_of_the_interval() -> None:
    found = estimate(BOTH, SHAPE, CLUSTER, ASKED, LinearPredictor(halfwidth=0.1))
    squares = sum((each.seconds * each.log_halfwidth) ** 2 for each in found.causes)
    linear = math.sqrt(squares) / found.step_seconds
    assert half(found) == pytest.approx(linear, rel=0.1)


def calibration(**changes: object) -> Calibration:
    nothing: dict[str, object] = {
        "factors": (),
        "held_back": None,
        "intervals": (),
        "tails": (),
        "runs": 0,
        "sources": (),
        "notes": (),
    }
    return Calibration(**(nothing | changes))  # type: ignore[arg-type]


def group(log_halfwidth: float, scale: float | None = None) -> GroupInterval:
    return GroupInterval(
        devices=("fast",),
        regime="one node",
        log_halfwidth=log_halfwidth,
        rows=12,
        pooled=False,
        scale=scale,
        least_log_halfwidth=0.01,
    )


@pytest.mark.parametrize("wanted", [0.0, 0.03, 0.4])
def test_runs_set_the_width_and_leave_the_centre(wanted: float) -> None:
    draws = Draws((("x", ""),), 200, 1)
    known = StepCalibration(calibration(intervals=(group(wanted),)), ("fast",), "one node")
    for own in (0.0, 0.1):
        steps = 5.0 * draws.factor(("x", ""), own)
        span = span_of(steps, 5.0, known)
        assert span.own_log_halfwidth == pytest.approx(own, rel=0.01, abs=1e-12)
        assert 0.5 * math.log(span.p95_seconds / span.p5_seconds) == pytest.approx(
            wanted, rel=0.01, abs=1e-12
        )
        assert math.sqrt(span.p5_seconds * span.p95_seconds) == pytest.approx(5.0, rel=0.01)
        order = (span.p5_seconds, span.interval.p10_seconds, span.interval.p90_seconds)
        assert list(order) == sorted(order)
        assert span.interval.p90_seconds <= span.p95_seconds
        assert span.note == "interval by 12 measured runs of fast, one node"


def datasheet(found: Calibration | None) -> FittedPredictor:
    base = FittedPredictor.datasheet_only()
    return FittedPredictor(replace(base.laws, calibration=found))


def test_a_calibration_that_says_nothing_changes_nothing() -> None:
    plain = estimate(BOTH, SHAPE, CLUSTER, ASKED, datasheet(None))
    assert "no measured run has checked it" in plain.interval_note
    assert estimate(BOTH, SHAPE, CLUSTER, ASKED, datasheet(calibrate(()))) == plain


def test_runs_of_such_steps_set_the_interval_and_tell_of_slow_ones() -> None:
    tail = SlowTail(devices=("fast",), regime="one node", runs=40, slow=9, least=0.12, most=0.48)
    known = calibration(intervals=(group(0.06),), tails=(tail,))
    plain = estimate(ALONE, SHAPE, CLUSTER, ASKED, datasheet(None))
    found = estimate(ALONE, SHAPE, CLUSTER, ASKED, datasheet(known))
    assert half(found) == pytest.approx(0.06, rel=0.01)
    assert found.own_log_halfwidth == pytest.approx(half(plain))
    assert found.step_seconds == plain.step_seconds
    assert found.warnings == (*plain.warnings, tail.note)
    assert found.interval_note == "interval by 12 measured runs of fast, one node"
    # Runs of one node say nothing about two islands.
    assert estimate(BOTH, SHAPE, CLUSTER, ASKED, datasheet(known)).interval_note.startswith(
        "interval by the predictions' own errors"
    )


def test_a_predictor_without_an_answer_says_what_was_asked() -> None:
    plain = replace(CLUSTER.islands[0].device, memory_bandwidth_bytes_per_second=0.0)
    bare = replace(CLUSTER, islands=tuple(replace(each, device=plain) for each in CLUSTER.islands))
    with pytest.raises(
        InputError, match=r"^embedding forward in \w+ on fast: device kind fast has"
    ):
        estimate(ALONE, SHAPE, bare, ASKED, datasheet(None))


def test_calibration_by_runs_makes_estimates_right() -> None:
    # Runs of a machine whose devices take 1.3 times what their datasheet says, and whose links take
    # 0.8 times: the calibrated predictor's estimate is the measured step.
    cluster = CLUSTER
    plans = [
        plan_on(
            cluster,
            StageChoice(island="a", transformer_layers=layers),
            StageChoice(island="a", transformer_layers=8 - layers),
            dp=dp,
            microbatch_size=size,
        )
        for layers in (2, 3, 4)
        for dp in (1, 2)
        for size in (1, 2, 4, 8)
    ]
    causes = {
        calibrated_cause(each.cause)
        for plan in plans
        for each in estimate(plan, SHAPE, cluster, ASKED, datasheet(None)).causes
    }
    truth = calibration(
        factors=tuple(
            CauseFactor(
                cause=cause,
                name=COMMUNICATION if is_link(cause) else COMPUTE,
                factor=0.8 if is_link(cause) else 1.3,
                log_halfwidth=0.0,
                runs=1,
            )
            for cause in sorted(causes)
        )
    )
    runs = []
    for n, plan in enumerate(plans):
        measured = estimate(plan, SHAPE, cluster, ASKED, datasheet(truth)).step_seconds
        predicted = estimate(plan, SHAPE, cluster, ASKED, datasheet(None))
        run = run_error(
            predicted,
            plan,
            cluster,
            measured_seconds=measured,
            cell=f"layout {n}",
            source="a machine",
        )
        assert sum(part.seconds for part in run.parts) == pytest.approx(run.predicted_seconds)
        assert run.devices == ("fast",)
        runs.append(run)
    found = calibrate(runs)
    assert found.factor("fast", COMPUTE) == pytest.approx(1.3, rel=0.03)
    for plan, run in zip(plans, runs, strict=True):
        again = estimate(plan, SHAPE, cluster, ASKED, datasheet(found))
        assert again.step_seconds == pytest.approx(run.measured_seconds, rel=0.01)
        assert half(again) < 0.02


def test_regimes_and_devices() -> None:
    def one(nodes: int, dp: int) -> tuple[str, Plan]:
        cluster = Cluster(name="c", islands=(island("a", nodes=nodes),))
        plan = plan_on(cluster, StageChoice(island="a", transformer_layers=8), dp=dp)
        return regime_of(plan, cluster), plan

    assert one(1, 2)[0] == "one node"
    assert one(2, 2)[0] == "one node"
    assert one(2, 4)[0] == "several nodes"
    assert regime_of(BOTH, CLUSTER) == "several islands"
    assert devices_of(BOTH, CLUSTER) == ("fast", "slow")
    assert devices_of(ALONE, CLUSTER) == ("fast",)
    a, b = CLUSTER.islands
    apart = replace(
        CLUSTER,
        islands=(a, replace(b, region="there")),
        region_links=(RegionLink(between=("here", "there"), link=link(1e9, 5e-3)),),
    )
    assert regime_of(BOTH, apart) == "several regions"


def test_a_link_is_calibrated_as_one_however_many_senders_share_it() -> None:
    shared = replace(link(25e9, 2e-5), shared_bandwidth_bytes_per_second=50e9)
    causes = {link_cause(shared.among(senders)) for senders in (1, 2, 4, 8)}
    assert len(causes) > 1
    assert {calibrated_cause(cause) for cause in causes} == {
        "device-direct link without samples, 20 us"
    }
    named = replace(shared, samples="rack of link of 5")
    assert calibrated_cause(link_cause(named)) == "link rack of link of 5"
    assert calibrated_cause("some-kind") == "some-kind"


def test_extrapolations_stand_beside_every_number_that_is_one() -> None:
    assert is_extrapolation("hidden 16384 > 8192 measured")
    assert is_extrapolation("all_reduce message 8 KiB < 1 MiB measured")
    assert not is_extrapolation("softmax not measured: from the memory bandwidth")
    predictor = LinearPredictor(
        halfwidth=0.1,
        extrapolating=("hidden 256 > 128 measured", "rotation not measured: as norm"),
    )
    found = estimate(BOTH, SHAPE, CLUSTER, ASKED, predictor)
    numbers = ("forward", "backward", "reduction", "optimizer")
    assert [stage.extrapolating for stage in found.stages] == [numbers] * 3
    assert "fast: transformer forward: extrapolating: hidden 256 > 128 measured" in found.warnings
    assert "fast: transformer forward: rotation not measured, as norm" in found.warnings
    for column in (3, 4, 6, 7):
        cells = stage_table(SHAPE, BOTH, found).columns[column].cells
        assert all(str(cell).endswith(EXTRAPOLATED) for cell in cells)
    inside = estimate(BOTH, SHAPE, CLUSTER, ASKED, LinearPredictor(halfwidth=0.1))
    assert all(stage.extrapolating == () for stage in inside.stages)


@pytest.mark.parametrize("kinds", [2, 8])
def test_an_interval_holds_its_step_where_many_kinds_must_all_be_on_time(kinds: int) -> None:
    cluster, asked = unlike_kinds(kinds), replace(ASKED, global_batch_size=256)
    stages = [StageChoice(island=f"i{at}", transformer_layers=8 // kinds) for at in range(kinds)]
    plan = build_plan(SHAPE, cluster, asked, stages, Shape(tp=1, dp=1, microbatch_size=1))
    found = estimate(plan, SHAPE, cluster, asked, LinearPredictor(halfwidth=0.6))
    assert found.interval.p10_seconds <= found.step_seconds <= found.interval.p90_seconds
    # All eight are as fast as predicted in one of 256 draws.
    assert ("begins at the step itself" in found.interval_note) == (kinds == 8)
