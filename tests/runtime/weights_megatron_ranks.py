"""One rank of megatron-core: loads converted checkpoints, keeps its logits, saves them again.

Arguments: rank, ranks, folder. The folder has `cases.json`, a list of (family, checkpoint, tp, pp,
layout, padded vocabulary); logits of each go to `logits-N.pt`, what megatron-core saves itself to
`saved-N`: layers stacked where N is even, one by one and gate apart from up where it is odd.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from weights_cases import LENGTH, VOCABULARY, tokens

from hetplan.launchers import megatron_core_shim


def config(family: str, tp: int, pp: int, layout: str | None) -> Any:
    from megatron.core.transformer import TransformerConfig

    llama = family != "gpt2"
    more: dict[str, Any] = {}
    if llama:
        more = {
            "num_query_groups": 2,
            "ffn_hidden_size": 48,
            "gated_linear_unit": True,
            "activation_func": functional.silu,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
        }
    return TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        layernorm_epsilon=1e-5,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # GELU by erf, as without --bias-gelu-fusion.
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **({"ffn_hidden_size": 64} | more),
    )


def build(family: str, tp: int, pp: int, layout: str | None, padded: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    llama = family != "gpt2"
    spec = get_gpt_layer_local_spec(normalization="RMSNorm" if llama else "LayerNorm")
    model = GPTModel(
        config(family, tp, pp, layout),
        spec,
        padded,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        position_embedding_type="rope" if llama else "learned_absolute",
        share_embeddings_and_output_weights=family != "llama",
    )
    return model.eval()


def sharded(model: Any, *, apart: bool = False) -> dict[str, Any]:
    from megatron.core import parallel_state

    # As Megatron-LM does with what `content_metadata` of the checkpoint says.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": apart, "dp_cp_group": group}
    found: dict[str, Any] = model.sharded_state_dict(metadata=metadata)
    return found


def logits(model: Any, rank: int, ranks: int, pp: int) -> torch.Tensor | None:
    """Of the last stage; the stages hand their activations on by themselves."""
    given = tokens()
    positions = torch.arange(LENGTH).expand_as(given)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    with torch.no_grad():
        if pp > 1 and rank > 0:
            received = torch.empty(LENGTH, len(given), 32)
            dist.recv(received, src=rank - 1)
            model.set_input_tensor(received)
        found = model(given, positions, mask)
        if pp > 1 and rank < ranks - 1:
            dist.send(found.contiguous(), dst=rank + 1)
            return None
    result: torch.Tensor = found[..., :VOCABULARY]
    return result


def run(number: int, case: list[Any], rank: int, ranks: int, folder: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    family, checkpoint, tp, pp, layout, padded = case
    parallel_state.initialize_model_parallel(tp, pp)
    # Dropout is off; this tracker asks for no accelerator's random numbers.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    model = build(family, tp, pp, layout, padded)
    loaded, missing, unexpected = dist_checkpointing.load(
        {"model": sharded(model)}, checkpoint, strict="return_all"
    )
    # What the model asks for is in the file; what is too much is Transformer Engine's.
    assert not unexpected, unexpected
    assert all(key.partition("/")[0].endswith("_extra_state") for key in missing), missing
    assert loaded["checkpoint_version"] == 3.0
    model.load_state_dict(loaded["model"], strict=True)
    found = logits(model, rank, ranks, pp)
    if found is not None and rank == ranks - 1:
        torch.save(found, folder / f"logits-{number}.pt")
    own = folder / f"saved-{number}" / "iter_0000005"
    if rank == 0:
        own.mkdir(parents=True)
        (own.parent / "latest_checkpointed_iteration.txt").write_text("5")
    dist.barrier()
    kept = sharded(model, apart=number % 2 == 1)
    dist_checkpointing.save({"model": kept, "iteration": 5}, str(own))
    parallel_state.destroy_model_parallel()


def main(rank: int, ranks: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(dict(megatron_core_shim.CPU_VARIABLES))
    torch.set_num_threads(1)
    megatron_core_shim.install()
    store = dist.FileStore(str(folder / f"store-{ranks}"), ranks)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        run(number, case, rank, ranks, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
