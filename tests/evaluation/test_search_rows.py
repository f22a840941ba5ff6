"""Rows of stages in Sailor's form: against lists of plans and against the formula."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest

from evaluation.search.cases import Case, SailorRoom
from evaluation.search.rows import Rows
from evaluation.search.sailor import (
    Fit,
    LayerSizes,
    LayerTimes,
    SailorFiles,
    SailorPlan,
    SailorReplicas,
    score,
)
from hetplan.errors import InputError

GPUS = ("A100-40", "V100-16")
LAYERS = 6
ENDS = [(zone, gpu, number) for zone in ("z", "y") for gpu in GPUS for number in (1, 2)]


def files(slower: float, across: float) -> SailorFiles:
    return SailorFiles(
        model="toy",
        num_layers=LAYERS,
        times={
            (gpu, size, tp): LayerTimes(
                forward_seconds=(0.01, *(times * size / tp**0.8,) * (LAYERS - 2), 0.05),
                backward_seconds=(0.02, *(2 * times * size / tp**0.8,) * (LAYERS - 2), 0.1),
                update_seconds=(0.0,) * LAYERS,
            )
            for gpu, times in zip(GPUS, (0.1, 0.1 * slower), strict=True)
            for size in (1, 2)
            for tp in (1, 2)
        },
        sizes={
            tp: LayerSizes(
                parameters=(20e6 / tp,) * LAYERS,
                output_activations=(2e6,) * LAYERS,
                kept_activations=(1e6 / tp,) * LAYERS,
            )
            for tp in (1, 2)
        },
        fits={
            (*one, *other): Fit(a=0.0, b=0.0, c=2.0 if one[0] == other[0] else across)
            for one, other in product(ENDS, repeat=2)
        },
    )


def case(batch: int, *rooms: SailorRoom) -> Case:
    return Case(
        name="toy", model="toy", global_batch_size=batch, sequence_length=2048,
        num_layers=LAYERS, devices_per_node=2, rooms=rooms, peers=(),
    )  # fmt: skip


def _listed(asked: Case, figures: SailorFiles) -> float:
    """The best plan of at most three stages, every replica with its own room and tp."""
    best = math.inf
    kinds = [(room, tp) for room in asked.rooms for tp in (1, 2)]
    devices = sum(room.devices for room in asked.rooms)
    for size, stages in product((1, 2), (1, 2, 3)):
        for dp in range(1, devices // stages + 1):
            # Sorted replicas: their order within a stage is not varied.
            rows = [row for row in product(kinds, repeat=dp) if [*row] == sorted(row, key=str)]
            for chosen in product(rows, repeat=stages):
                used = {room: 0 for room in asked.rooms}
                for row in chosen:
                    for room, tp in row:
                        used[room] += tp
                if any(number > room.devices for room, number in used.items()):
                    continue
                for ends in combinations(range(1, LAYERS), stages - 1):
                    bounds = (0, *ends, LAYERS)
                    plan = SailorPlan(
                        layers=tuple(bounds[s + 1] - bounds[s] for s in range(stages)),
                        stages=tuple(
                            tuple(
                                SailorReplicas(
                                    gpu=room.gpu, zone=room.zone, tp=tp, devices_per_node=2,
                                    count=1,
                                )
                                for room, tp in row
                            )
                            for row in chosen
                        ),
                        microbatch_size=size,
                    )  # fmt: skip
                    found = score(plan, figures, asked.global_batch_size)
                    if found.fits and found.num_microbatches >= stages:
                        best = min(best, found.step_seconds)
    return best


@pytest.mark.parametrize(
    ("rooms", "slower", "across", "batch"),
    [
        ((SailorRoom(gpu="A100-40", zone="z", devices=4),), 1.0, 1.0, 9),
        (
            (
                SailorRoom(gpu="A100-40", zone="z", devices=2),
                SailorRoom(gpu="V100-16", zone="z", devices=2),
            ),
            2.5, 1.0, 12,
        ),
        (
            (
                SailorRoom(gpu="A100-40", zone="z", devices=2),
                SailorRoom(gpu="A100-40", zone="y", devices=2),
            ),
            1.0, 0.1, 7,
        ),
    ],
)  # fmt: skip
def test_no_plan_of_a_small_case_is_faster(
    rooms: tuple[SailorRoom, ...], slower: float, across: float, batch: int
) -> None:
    asked, figures = case(batch, *rooms), files(slower, across)
    found = Rows(case=asked, files=figures)
    best = found.best()[0]
    listed = _listed(asked, figures)
    assert best.step_seconds <= listed * (1 + 1e-9)
    assert found.bound() <= listed * (1 + 1e-9)
    # Updates take nothing here, so that a row's step is the formula's.
    assert score(best.plan, figures, batch).step_seconds == pytest.approx(best.step_seconds)


def test_unknown_paths_are_no_crash() -> None:
    asked = case(
        8,
        SailorRoom(gpu="A100-40", zone="z", devices=2),
        SailorRoom(gpu="A100-40", zone="elsewhere", devices=2),
    )
    best = Rows(case=asked, files=files(1.0, 1.0)).best()[0]
    assert {each.zone for stage in best.plan.stages for each in stage} == {"z"}
    with pytest.raises(InputError, match="no path"):
        files(1.0, 1.0).fit(("z", "A100-40", 1), ("elsewhere", "A100-40", 1))
