"""One rank of the tests: saves its slices under several plans; arguments rank, ranks, folder."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from weights_plans import MODEL, PLANS, SEED, TIED

from hetplan.runtime.groups import open_groups
from hetplan.runtime.model_stage import StageModule, StageShape
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.weights.stage import (
    finish_save,
    part_of,
    save_stage,
    stage_tensors,
    vector_tensors,
)


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    for name, plan in PLANS.items():
        model = TIED if "tied" in name else MODEL
        places = place_ranks(plan)
        groups = open_groups(places, rank, collectives="gloo", timeout=limit)
        if groups is None:
            continue
        part = part_of(places[rank])
        module = StageModule(
            model,
            StageShape(
                layers=part.layers,
                tp=part.tp,
                tp_index=part.tp_index,
                microbatch_size=1,
                full_recompute=False,
                seed=SEED,
                dtype=torch.float32,
                device=torch.device("cpu"),
            ),
            group=groups.tensor,
            pacer=None,
        )
        # An optimizer's state that tells elements apart: twice the weights, in one vector.
        vector = torch.cat([each.detach().reshape(-1) * 2 for each in module.parameters()])
        states = {
            "weights": stage_tensors(module, part.layers),
            "exp_avg": vector_tensors(module, part.layers, vector),
        }
        save_stage(folder / name, model, part, states, group=groups.control)
        assert not (folder / name).exists()
        # The first rank may finish while another has not looked yet.
        dist.barrier(group=groups.control)
        finish_save(folder / name, model, step=7, states=tuple(states), group=groups.control)
        assert (folder / name).is_dir()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
