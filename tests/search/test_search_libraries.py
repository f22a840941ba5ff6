"""Trainers with one library of collectives plan on devices of one library, unless they are patched.

The plan on a cluster of several libraries is the best of those on each library's islands alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from random_cases import seeds
from search_jobs import cluster, device, island, job, model

from hetplan.cluster.libraries import island_library, libraries_of, library_of
from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import InfeasibleError, InputError
from hetplan.job.spec import Forbids, Job, Pins, TrainerOptions
from hetplan.job.trainer import mixes_libraries
from hetplan.model.spec import ModelSpec
from hetplan.plans.check_job import check_job_against
from hetplan.plans.targets import TARGETS
from hetplan.predict.fit import FittedPredictor
from hetplan.proof.verify import verify
from hetplan.search.files import save_result
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.space.families import Families
from hetplan.search.space.family import FamilyTable

PREDICTOR = FittedPredictor.datasheet_only()
PATCHED = TrainerOptions(mixed_libraries=True)
ONE = ("megatron", "torchtitan")


def of_vendor(each: Island, vendor: str) -> Island:
    return replace(each, device=replace(each.device, vendor=vendor))


def random_question(rng: Random) -> tuple[ModelSpec, Cluster, Job]:
    """2 to 4 small islands of 2 or 3 kinds, each of NVIDIA's or AMD's."""
    kinds = [("k0", "nvidia"), ("k1", "amd"), ("k2", rng.choice(["nvidia", "amd"]))]
    islands = []
    for at in range(rng.randint(2, 4)):
        kind, vendor = kinds[at] if at < 2 else rng.choice(kinds)
        made = island(
            f"i{at}",
            kind=kind,
            teraflops=40.0 + 40.0 * int(kind[1]),
            gigabytes=rng.choice([4.0, 8.0, 16.0]),
            nodes=rng.randint(1, 2),
            per_node=rng.choice([1, 2]),
        )
        islands.append(of_vendor(made, vendor))
    asked = replace(
        job(rng.choice([2, 4, 6]), target=rng.choice(ONE)),
        pin=Pins(virtual_stages=rng.choice([None, 1])),
    )
    return model(rng.randint(3, 6)), cluster(*islands), asked


def found(shape: ModelSpec, where: Cluster, asked: Job) -> SearchResult | None:
    try:
        return search(shape, where, asked, PREDICTOR)
    except (InfeasibleError, InputError):
        return None


def families(shape: ModelSpec, where: Cluster, asked: Job) -> FamilyTable:
    return Families(model=shape, cluster=allowed_cluster(where, asked), job=asked).families()


@pytest.mark.parametrize("seed", seeds(12))
def test_the_plan_is_the_best_of_the_libraries_alone(seed: int, tmp_path: Path) -> None:
    shape, where, asked = random_question(Random(seed))
    whole = found(shape, where, asked)
    steps = []
    for islands in libraries_of(where).values():
        others = [each.name for at, each in enumerate(where.islands) if at not in islands]
        alone = found(shape, where, replace(asked, forbid=Forbids(islands=tuple(others))))
        steps += [] if alone is None else [alone.estimate.step_seconds]
    patched = found(shape, where, replace(asked, trainer=PATCHED))
    if whole is None:
        assert steps == []
        return
    assert len(set(map(island_library, whole.used_islands))) == 1
    assert whole.estimate.step_seconds == pytest.approx(min(steps), rel=1e-9)
    assert patched is not None
    assert patched.estimate.step_seconds <= whole.estimate.step_seconds * (1 + 1e-9)
    save_result(whole, tmp_path / "plan.json")
    verified = verify(tmp_path / "plan.json", PREDICTOR)
    assert verified.bound is not None
    assert verified.bound.looked_at == verified.bound.families
    certificate = whole.certificate
    assert certificate is not None
    assert "devices of one library of collectives" in certificate.space


def test_the_option_lifts_it_and_a_mix_is_found() -> None:
    where = cluster(
        of_vendor(island("a", kind="k0", nodes=2), "nvidia"),
        of_vendor(island("b", kind="k1", nodes=2), "amd"),
    )
    apart = found(model(), where, job(8))
    mixed = found(model(), where, replace(job(8), trainer=PATCHED))
    assert apart is not None
    assert mixed is not None
    assert len(apart.used_islands) == 1
    assert len(mixed.used_islands) == 2
    assert mixed.estimate.step_seconds < apart.estimate.step_seconds
    for name in ("flagscale", "native", "any"):
        table = families(model(), where, job(8, target=name))
        assert any(len(each.meshes) > 1 and mixes(where, each.meshes) for each in table)


def mixes(where: Cluster, meshes: tuple[object, ...]) -> bool:
    used = {at for mesh in meshes for at in mesh.islands}  # type: ignore[attr-defined]
    return len({island_library(where.islands[at]) for at in used}) > 1


@pytest.mark.parametrize("trainer", ONE)
@pytest.mark.parametrize("seed", range(6))
def test_where_the_cluster_has_one_library_nothing_changes(seed: int, trainer: str) -> None:
    shape, where, asked = random_question(Random(seed))
    alike = replace(where, islands=tuple(of_vendor(each, "amd") for each in where.islands))
    asked = replace(asked, target=trainer)
    patched = replace(asked, trainer=PATCHED)
    assert families(shape, alike, asked) == families(shape, where, patched)
    for each in families(shape, where, asked):
        assert not mixes(where, each.meshes)


def test_context_parallelism_is_kept_from_the_library_without_its_kernel_alone() -> None:
    old = replace(device("k0", 40.0, 16.0), architecture="sm70", vendor="nvidia")
    where = cluster(
        replace(island("a", nodes=4), device=old), of_vendor(island("b", kind="k1", nodes=4), "amd")
    )
    table = families(model(), where, job(8))
    long = {mesh.islands for each in table for mesh in each.meshes if mesh.shapes[0].cp > 1}
    assert long == {(1,)}


def test_ends_pinned_to_two_libraries_are_refused() -> None:
    where = cluster(of_vendor(island("a"), "nvidia"), of_vendor(island("b", kind="k1"), "amd"))
    ends = replace(job(), pin=Pins(embedding_on="a", head_on="k1"))
    (fault,) = check_job_against(ends, model(), where)
    assert fault.field == "pin.head_on"
    assert "nccl, rccl, and a run of megatron has one library" in fault.message
    assert check_job_against(replace(ends, trainer=PATCHED), model(), where) == ()
    assert check_job_against(replace(ends, target="flagscale"), model(), where) == ()
    wrong = replace(ends, target="flagscale", trainer=TrainerOptions(mixed_libraries=False))
    (fault,) = check_job_against(wrong, model(), where)
    assert "target flagscale always has true" in fault.message


def test_libraries_of_vendors_and_targets() -> None:
    assert [each for each in TARGETS if not mixes_libraries(job(target=each))] == [*ONE]
    # Names that two vendors share are two libraries.
    mccl = {library_of(vendor, "") for vendor in ("metax", "moore-threads")}
    hccl = {library_of("huawei", ""), library_of("intel", "intel-gaudi3-128gb")}
    assert len(mccl) == len(hccl) == 2
    assert library_of("intel", "intel-max-1550") == "xccl"
    assert library_of("somebody", "") == "somebody's own"
