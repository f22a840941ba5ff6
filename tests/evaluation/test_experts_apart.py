"""The program of attention and experts apart: its optimum, its parts, and what docs say of it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from typer.testing import CliRunner

from evaluation import experts_apart
from evaluation.__main__ import app
from evaluation.experts_apart import (
    GBIT_PER_NODE,
    LENGTHS,
    PAIRS,
    PartQuery,
    experts_job,
    gains,
    hall,
    least_step,
    models,
)
from hetplan.files.shipped import default_stores
from hetplan.model.spec import LayerKind
from hetplan.predict.fit import fit_stores, with_shipped
from hetplan.predict.predictor import LayerQuery

_NONE = (0.0, 0.0)
_PREDICTOR = with_shipped(fit_stores(*default_stores())[0])


def test_a_program_solved_by_hand() -> None:
    # The first is four times as fast at attention: it has all of that and 3/8 of the experts.
    work = np.array([[1.0, 4.0, 0.0, 0.0], [4.0, 4.0, 0.0, 0.0]])
    assert least_step(work, 0.0, _NONE, _NONE) == pytest.approx(1 / (1 / 5 + 1 / 8))
    assert least_step(work, 1.0, _NONE, _NONE) == pytest.approx(2.5)
    # d = T / 8 between them: a + 4 e = T and 4 (1 - a) + 4 (1 - e) = T.
    assert least_step(work, 1.0, _NONE, (8.0, 8.0)) == pytest.approx(80 / 29)


def test_the_optimum_is_that_of_all_shares() -> None:
    draw = np.random.default_rng(0)
    share = np.linspace(0.0, 1.0, 401)
    attention, experts = np.meshgrid(share, share)
    for _ in range(20):
        work = np.zeros((2, 4))
        work[:, :2] = draw.uniform(1.0, 4.0, (2, 2))
        cost, hold = draw.uniform(0.0, 2.0, 2), draw.uniform(0.0, 8.0, 2)
        d = abs(attention - experts)
        steps = np.maximum(
            work[0, 0] * attention + work[0, 1] * experts + cost[0] * d,
            work[1, 0] * (1 - attention) + work[1, 1] * (1 - experts) + cost[1] * d,
        )
        listed = np.maximum(steps, max(hold) * d).min()
        found = least_step(work, 1.0, tuple(cost), tuple(hold))
        # No share is 1/800 from the grid, and T's slope is at most 4 + 4 + 2 + 8 in each of two.
        assert listed - 18 / 400 <= found <= listed + 1e-9


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("device", ["a100", "v100"])
def test_two_parts_are_the_whole_layer(device: str, backward: bool) -> None:
    (island,) = (each for each in hall().islands if each.name == device)
    job = experts_job((device,), 4096, "native")
    asked = LayerQuery(
        model=models()[0],
        layer=LayerKind.TRANSFORMER,
        microbatch_size=1,
        sequence_length=job.sequence_length,
        tp=2,
        precision=job.precision,
        is_backward=backward,
    )
    fields = {name: getattr(asked, name) for name in LayerQuery.__dataclass_fields__}
    whole = _PREDICTOR.layer(island.device, asked).parts
    halves = [
        part
        for experts in (False, True)
        for part in _PREDICTOR.layer(island.device, PartQuery(**fields, experts=experts)).parts
    ]
    for name in {part.name for part in whole} - {"wait"}:
        one, both = (
            sum(each.seconds for each in some if each.name == name) for some in (whole, halves)
        )
        assert both == pytest.approx(one), name
    assert "grouped_product" in {part.name for part in halves}


def test_native_gains_less_than_what_would_be_worth_building() -> None:
    """docs/search.md says so; where this fails, separate experts have to be thought of again."""
    for pair, length, model in product(PAIRS, LENGTHS, models()):
        islands = [each for each in hall().islands if each.name in pair]
        found = gains(islands, model, experts_job(pair, length, "native"), _PREDICTOR)
        assert found["free"] < 0.06
        for rate in GBIT_PER_NODE:
            bound, hidden, in_turn = (
                found[f"{way}_{rate}"] for way in ("bound", "hidden", "in_turn")
            )
            assert found["free"] + 1e-8 >= bound >= hidden >= in_turn >= 0.0
            assert hidden < 0.02
            assert in_turn == 0.0


def test_kinds_without_fused_attention_would_gain() -> None:
    islands = [each for each in hall().islands if each.name in PAIRS[-1]]
    found = gains(islands, models()[0], experts_job(PAIRS[-1], 32768, "flagscale"), _PREDICTOR)
    assert found["hidden_400"] == pytest.approx(0.18, abs=0.02)


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    small = models()[2]
    monkeypatch.setattr(experts_apart, "PAIRS", PAIRS[:1])
    monkeypatch.setattr(experts_apart, "LENGTHS", (4096,))
    monkeypatch.setattr(experts_apart, "models", lambda: (replace(small, name="small"),))
    words = ["experts", "--targets", "flagscale", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["model"] for row in rows] == ["small"]
    # Nothing that the search finds is below the limit of uneven pipelines.
    assert rows[0]["plan"] > 1.0
