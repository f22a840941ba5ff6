"""FlagScale's reading of a launch, written anew from what its code does (commit da4935ec).

runner_train.py and runner/utils.py: hostfile, flattening, the type of each host's ranks;
train/arguments.py: pre_validate_args; train/hetero/parallel_context.py: RankMapper and the ranks of
ProcessMesh (order tp-cp-ep-dp-pp).
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml


class RefusedError(Exception):
    """What an assert of pre_validate_args or of ParallelContext would have stopped."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is, and with what."""

    mesh: int
    stage: int
    dp: int
    tp: int
    microbatch_size: int
    sequence_parallel: bool
    layers: int


def flat_words(node: object) -> list[str]:
    """Depth first; nested names vanish."""
    words: list[str] = []
    assert isinstance(node, dict)
    for key, value in node.items():
        option = "--" + key.replace("_", "-")
        if isinstance(value, dict):
            words += flat_words(value)
        elif isinstance(value, list):
            words.append(option)
            words += [f"{item}" for item in value]
        elif isinstance(value, bool):
            words += [option] if value else []
        else:
            words += [option, f"{value}"]
    return words


def train_words(text: str) -> list[str]:
    config = yaml.safe_load(text)["train"]
    top: dict[str, object] = {}
    for section in ("system", "model", "data"):
        top |= config[section]
    return flat_words(top)


def hosts(text: str) -> list[tuple[str, int, str | None]]:
    found: dict[str, tuple[int, str | None]] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.search(r"^(\S+)\s+slots=(\d+)(?:\s+type=(\S+))?", line.strip())
        assert match, line
        assert match[1] not in found
        found[match[1]] = (int(match[2]), match[3])
    assert len({kind is None for _, kind in found.values()}) == 1
    return [(name, slots, kind) for name, (slots, kind) in found.items()]


def parser() -> argparse.ArgumentParser:
    """The flags of meshes, and those that they meet; others are left."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("--enable-hetero", action="store_true")
    made.add_argument("--hetero-device-types", nargs="*")
    made.add_argument("--hetero-current-device-type")
    made.add_argument("--hetero-pipeline-layer-split", nargs="*", type=int)
    made.add_argument("--hetero-process-meshes", nargs="*", type=int)
    made.add_argument("--expert-tensor-parallel-size-per-process-mesh", nargs="*", type=int)
    made.add_argument("--hetero-use-cpu-communication", action="store_true")
    made.add_argument("--use-partial-reduce-for-shared-embedding", action="store_true")
    made.add_argument("--use-distributed-optimizer", action="store_true")
    made.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    made.add_argument("--sequence-parallel", action="store_true")
    for name in ("granularity", "method", "num-layers"):
        made.add_argument(f"--recompute-{name}-per-stage-micro-batch", nargs="*")
    made.add_argument("--recompute-granularity")
    made.add_argument("--recompute-method")
    for name in (
        *("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size"),
        *("global-batch-size", "num-layers", "vocab-size", "recompute-num-layers"),
    ):
        made.add_argument(f"--{name}", type=int)
    made.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    made.add_argument("--mtp-num-layers", type=int)
    return made


def read(words: Sequence[str]) -> argparse.Namespace:
    return parser().parse_known_args([*words])[0]


def refuse_unless(condition: bool, what: str) -> None:
    if not condition:
        raise RefusedError(what)


def validate(args: argparse.Namespace, world: int) -> list[list[int]]:
    """Every constraint; the meshes."""
    flat = args.hetero_process_meshes
    refuse_unless(bool(flat) and len(flat) % 5 == 0, "length of meshes")
    meshes = [flat[at : at + 5] for at in range(0, len(flat), 5)]
    loaded = meshes[0][3] * args.micro_batch_size
    refuse_unless(all(loaded % mesh[3] == 0 for mesh in meshes), "dp and microbatch")
    refuse_unless(all(mesh[1] == 1 for mesh in meshes), "cp")
    refuse_unless(args.pipeline_model_parallel_size == sum(mesh[4] for mesh in meshes), "pp")
    if not args.untie_embeddings_and_output_weights or args.mtp_num_layers:
        refuse_unless(meshes[0][0] == meshes[-1][0], "tp of the ends")
        ends = meshes[0][3], meshes[-1][3]
        if ends[0] != ends[1] and args.use_distributed_optimizer:
            refuse_unless(max(ends) % min(ends) == 0, "dp of the ends")
            refuse_unless(args.use_partial_reduce_for_shared_embedding, "partial reduce")
    split = args.hetero_pipeline_layer_split
    refuse_unless(sum(split) == args.num_layers, "layers")
    refuse_unless(len(split) == args.pipeline_model_parallel_size, "stages")
    refuse_unless(len(args.hetero_device_types) == len(meshes), "types")
    refuse_unless(args.hetero_current_device_type in args.hetero_device_types, "own type")
    sizes = [tp * cp * dp * pp for tp, cp, _, dp, pp in meshes]
    refuse_unless(sum(sizes) == world, "world size")
    etps = args.expert_tensor_parallel_size_per_process_mesh
    refuse_unless(etps is None or len(etps) == len(meshes), "expert tp")
    return meshes


def places(words: Sequence[str], types: Sequence[str]) -> list[Place]:
    """Of every rank as torchrun numbers them, whose types these are."""
    args = read(words)
    meshes = validate(args, len(types))
    known: list[str] = args.hetero_device_types
    order = sorted(range(len(types)), key=lambda rank: (known.index(types[rank]), rank))
    found: list[Place | None] = [None] * len(types)
    position = stages = 0
    for number, (tp, _, _, dp, pp) in enumerate(meshes):
        for stage in range(pp):
            for d in range(dp):
                for t in range(tp):
                    found[order[position]] = Place(
                        mesh=number,
                        stage=stages + stage,
                        dp=d,
                        tp=t,
                        microbatch_size=meshes[0][3] * args.micro_batch_size // dp,
                        sequence_parallel=args.sequence_parallel and tp > 1,
                        layers=args.hetero_pipeline_layer_split[stages + stage],
                    )
                    position += 1
        stages += pp
    done = [place for place in found if place is not None]
    assert len(done) == len(types)
    return done


def expanded(rows: Sequence[str]) -> list[list[int]]:
    """[stages, count, value, count, value, ...] written out: the values of every stage."""
    found = []
    for row in rows:
        stages, *pairs = ast.literal_eval(row)
        values = [
            value
            for count, value in zip(pairs[::2], pairs[1::2], strict=True)
            for _ in range(count)
        ]
        found += [values] * stages
    return found
