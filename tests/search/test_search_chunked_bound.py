"""Rough room of interleaved stages is never less than what fits by the exact count."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from hetplan.cluster.load import load_cluster
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.predict.fit import FittedPredictor
from hetplan.search.bounds.order_free_bound import room_of
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.space.families import Families
from hetplan.search.table_maker import TableMaker

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("model_name", "cluster_name", "trainer"),
    [
        ("llama-140b", "mixed-768", "megatron"),
        ("llama-2-70b", "three-regions", "torchtitan"),
        ("llama-2-7b", "two-regions", "native"),
    ],
)
def test_rough_room_is_not_below_the_exact_one(
    model_name: str, cluster_name: str, trainer: str
) -> None:
    model = load_model(CONFIGS / "models" / f"{model_name}.yaml")
    cluster = load_cluster(CONFIGS / "clusters" / f"{cluster_name}.yaml")
    job = replace(load_job(CONFIGS / "jobs" / f"{model_name}.yaml"), target=trainer)
    cluster = allowed_cluster(cluster, job)
    predictor = FittedPredictor.datasheet_only()
    maker = TableMaker(model=model, cluster=cluster, job=job, predictor=predictor)
    families = [
        family
        for family in Families(model=model, cluster=cluster, job=job).families()
        if family.virtual_stages > 1
    ]
    units, seen = maker.units().count, 0
    for family in random.Random(3).sample(families, 16):
        base = maker._order_free.base(family)
        if not len(base.at):
            continue
        exact = maker.chunk_memory(family)
        chunks, m = family.virtual_stages, family.num_microbatches
        counts = range(3, min(int(base.most.sum()), units // chunks) + 1)
        for stages in [p for p in counts if m % p == 0][:3]:
            order_free = room_of(base.rows, base.room, units, m, chunks, stages)
            for mesh in range(len(family.meshes)):
                fits = exact.most_units((mesh,) * stages).T[:, ::-1]
                assert (order_free[:, mesh] >= fits).all()
                seen += 1
    assert seen > 5
