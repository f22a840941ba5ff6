"""`trainer.collective_algorithm`: the variable that each trainer's ranks get, and its way back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from trainer_models import llama
from trainer_plans import (
    ASCEND,
    cluster,
    flagscale,
    island,
    job_of,
    megatron,
    random_results,
    stage_per_island,
    torchtitan,
    with_job,
)

from hetplan.errors import InputError
from hetplan.job.spec import CollectiveAlgorithm, TrainerOptions
from hetplan.job.trainer import trainer_settings
from hetplan.schedulers.launch import EmissionOptions
from hetplan.search.result import SearchResult
from hetplan.trainers import trainer_named
from hetplan.trainers.emission import emission_for
from hetplan.trainers.folder import write_folder
from hetplan.trainers.read import facts_of, read_launch

RING, TREE = CollectiveAlgorithm.RING, CollectiveAlgorithm.TREE
NAME = "NCCL_ALGO"
SCRIPTS = {
    "megatron": "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 "
    "--seq-length 128 --num-layers 8\n",
    "torchtitan": "torchrun --nproc_per_node 8 -m torchtitan.train --training.local_batch_size 8 "
    "--training.seq_len 4096\n",
}


@pytest.mark.parametrize(
    ("name", "draw"), [("megatron", megatron), ("flagscale", flagscale), ("torchtitan", torchtitan)]
)
@pytest.mark.parametrize(("held", "word"), [(None, None), (RING, "Ring"), (TREE, "allreduce:tree")])
def test_every_rank_gets_it_and_it_reads_back(
    tmp_path: Path,
    name: str,
    draw: Callable[[Random], SearchResult | None],
    held: CollectiveAlgorithm | None,
    word: str | None,
) -> None:
    trainer = trainer_named(name)
    emission = None
    for found in random_results(draw, seed=5, count=40):
        result = with_job(found, trainer=TrainerOptions(collective_algorithm=held))
        try:
            emission = emission_for(result, trainer, EmissionOptions())
        except InputError:
            continue  # what the trainer cannot be told
        for each in emission.launch.agent_environment:
            assert dict(each).get(NAME) == word
        if name == "flagscale":
            write_folder(tmp_path, emission.files, force=True)
            facts = facts_of(read_launch(tmp_path / "flagscale.yaml", name))
            assert facts.options.collective_algorithm is held
    assert emission is not None


@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
@pytest.mark.parametrize(
    ("before", "held", "remark"),
    [
        ("", None, ""),
        ("export NCCL_ALGO=Ring\n", RING, ""),
        ("export NCCL_ALGO=RING\n", RING, ""),
        ("A=tree\nexport NCCL_ALGO=$A\n", TREE, ""),
        ("export NCCL_ALGO=allreduce:tree\n", TREE, ""),
        ("NCCL_ALGO=Tree ", TREE, ""),
        ("env NCCL_ALGO=Tree ", TREE, ""),
        ("srun --export=ALL,NCCL_ALGO=Tree,A=b ", TREE, ""),
        ("NCCL_ALGO=Tree ./benchmark.sh\n", None, ""),
        (
            "export NCCL_ALGO=^NVLS\n",
            None,
            "NCCL_ALGO '^NVLS' is priced as the library's own choice",
        ),
        ("export NCCL_ALGO=$MINE\n", None, "NCCL_ALGO '$MINE' is priced"),
    ],
)
def test_a_scripts_variable_is_an_option_of_the_job(
    tmp_path: Path, trainer: str, before: str, held: CollectiveAlgorithm | None, remark: str
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(before + SCRIPTS[trainer])
    facts = facts_of(read_launch(path, trainer))
    assert facts.options.collective_algorithm is held
    found = [each for each in facts.remarks if NAME in each]
    assert bool(found) == bool(remark)
    assert all(remark in each for each in found)


def test_libraries_that_cannot_be_told_are_refused() -> None:
    machines = cluster(island("a", kind=ASCEND), island("b", kind=ASCEND))
    result = stage_per_island(machines, 3, 5, model=llama(8), job=job_of(8))
    held = with_job(result, trainer=TrainerOptions(collective_algorithm=RING))
    with pytest.raises(InputError) as error:
        emission_for(held, trainer_named("mindspeed"), EmissionOptions())
    faults = [each for each in error.value.faults if "collective_algorithm" in each.field]
    assert [each.field for each in faults] == ["inputs.job.trainer.collective_algorithm"]
    assert "hccl of huawei-ascend-910b2-64gb so: leave it out" in faults[0].message


def test_native_leaves_it_to_the_library() -> None:
    job = with_job(
        stage_per_island(cluster(island("a")), 8),
        target="native",
        trainer=TrainerOptions(collective_algorithm=TREE),
    ).inputs.job
    with pytest.raises(InputError, match="tree; target native always has the library's choice"):
        trainer_settings(job)
