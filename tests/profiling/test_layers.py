import copy
import os
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from profiling_models import GPT, LLAMA, gpt, llama
from runtime_cases import LATENT, LATENT_KEYS, MOE
from torch import nn

from hetplan.errors import InputError
from hetplan.model.layers import Experts, LayerRun
from hetplan.model.numerics import Router, ScoreFunction
from hetplan.model.spec import ModelSpec
from hetplan.profiling.layers import Communication, HeadWithLoss, build_layer, cross_entropy
from hetplan.profiling.weights import Cut, parameter_slices

MODELS = (GPT, LLAMA)
ODD_VOCABULARY = tuple(replace(model, vocab_size=61) for model in MODELS)


def named(model: ModelSpec) -> str:
    layer = model.layer_runs[-1].layer
    return f"{model.name}-{model.vocab_size}-{'-'.join(layer.features())}"


def built(
    model: ModelSpec, position: int, *, tp: int = 1, rank: int = 0, seed: int = 0, group=None
):
    return build_layer(
        model,
        position,
        cut=Cut(tp=tp, tp_rank=rank),
        group=group,
        seed=seed,
        dtype=torch.float64,
        device="cpu",
    )


def merged(
    model: ModelSpec, position: int, ranks: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Full weights by name, put together from each rank's parameters (or gradients)."""
    full: dict[str, torch.Tensor] = {}
    tp = len(ranks)
    for rank in range(tp):
        for parameter in parameter_slices(model, position, Cut(tp=tp, tp_rank=rank)):
            rows = 0
            for part in parameter.parts:
                piece = ranks[rank][parameter.name].detach().narrow(0, rows, part.shape[0])
                rows += part.shape[0]
                real = min(part.length, max(0, part.full_shape[part.dim] - part.start))
                assert not piece.narrow(part.dim, real, part.length - real).any()
                if real:
                    whole = full.setdefault(
                        part.name,
                        torch.full(part.full_shape, float("nan"), dtype=torch.float64),
                    )
                    whole.narrow(part.dim, part.start, real).copy_(piece.narrow(part.dim, 0, real))
    return full


@pytest.mark.parametrize("model", [*MODELS, *ODD_VOCABULARY, MOE, LATENT, LATENT_KEYS], ids=named)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parameter_count_is_the_specs(model: ModelSpec, tp: int) -> None:
    for position in range(len(model.layers)):
        for rank in range(tp):
            layer = built(model, position, tp=tp, rank=rank)
            count = sum(parameter.numel() for parameter in layer.parameters())
            assert count == model.parameters_at(position, tp)


@pytest.mark.parametrize("model", [*MODELS, *ODD_VOCABULARY, MOE, LATENT, LATENT_KEYS], ids=named)
@pytest.mark.parametrize("tp", [2, 4])
def test_slices_together_are_the_whole_layer(model: ModelSpec, tp: int) -> None:
    for position in range(len(model.layers)):
        one = built(model, position)
        many = [built(model, position, tp=tp, rank=rank) for rank in range(tp)]
        expected = merged(model, position, [dict(one.named_parameters())])
        found = merged(model, position, [dict(layer.named_parameters()) for layer in many])
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name


def test_attention_is_causal_and_rotary_sees_distance() -> None:
    for model in MODELS:
        layer = built(model, 1)
        x = torch.randn(1, 8, 32, dtype=torch.float64)
        changed = x.clone()
        changed[:, 5] += 1.0
        before, after = layer(x), layer(changed)
        assert torch.allclose(before[:, :5], after[:, :5])
        assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_cross_entropy_is_torchs() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float32, requires_grad=True)
    same = logits.detach().clone().requires_grad_()
    targets = torch.randint(0, 7, (2, 5))
    loss = cross_entropy(logits, targets, tp_rank=0, communication=Communication(None))
    expected = nn.functional.cross_entropy(same.flatten(0, 1), targets.flatten())
    loss.backward()
    expected.backward()
    assert torch.allclose(loss, expected)
    assert torch.allclose(logits.grad, same.grad, atol=1e-7)


def test_padded_rows_are_outside_the_loss_and_stay_zero() -> None:
    model = replace(GPT, vocab_size=61)
    head = built(model, 3, tp=2, rank=1)
    loss = HeadWithLoss(head)(torch.randn(1, 4, 32, dtype=torch.float64), torch.full((1, 4), 60))
    loss.backward()
    # Rank 1 of 2 holds rows 31 to 61 of 61: one row of padding.
    assert not head.weight.grad[30:].any()
    assert head.weight.grad[:30].any()


@pytest.mark.parametrize(
    ("change", "tp", "text"),
    [
        ({}, 3, "num_attention_heads 4"),
        ({"ffn_hidden_size": 63}, 2, "ffn_hidden_size 63"),
        ({"num_attention_heads": 12, "num_kv_heads": 6}, 4, "num_kv_heads 6"),
    ],
)
def test_a_slice_that_does_not_divide_is_refused(change, tp: int, text: str) -> None:
    with pytest.raises(InputError, match=text):
        built(gpt(**change), 1, tp=tp)


def _whole_pass(model: ModelSpec, tp: int, rank: int, group) -> tuple[float, list[nn.Module]]:
    layers = [
        built(model, position, tp=tp, rank=rank, group=group)
        for position in range(len(model.layers))
    ]
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, model.vocab_size, (2, 9), generator=generator)
    x = layers[0](tokens[:, :-1])
    for layer in layers[1:-1]:
        x = layer(x)
    loss = HeadWithLoss(layers[-1])(x, tokens[:, 1:])
    loss.backward()
    return loss.item(), layers


def _rank_main(rank: int, tp: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=tp)
    result = []
    for model in (*MODELS, *ODD_VOCABULARY, llama(num_kv_heads=1)):
        loss, layers = _whole_pass(model, tp, rank, dist.group.WORLD)
        gradients = [
            {name: parameter.grad for name, parameter in layer.named_parameters()}
            for layer in layers
        ]
        assert layers[1].communication.seconds > 0
        result.append((loss, copy.deepcopy(gradients)))
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_tensor_parallel_training_equals_one_rank(tmp_path) -> None:
    tp = 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank_main, args=(tp, port, str(tmp_path)), nprocs=tp)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(tp)]
    models = (*MODELS, *ODD_VOCABULARY, llama(num_kv_heads=1))
    for index, model in enumerate(models):
        loss, layers = _whole_pass(model, 1, 0, None)
        for rank in range(tp):
            assert ranks[rank][index][0] == pytest.approx(loss, rel=1e-6)
        for position in range(len(model.layers)):
            gradients = {name: each.grad for name, each in layers[position].named_parameters()}
            expected = merged(model, position, [gradients])
            found = merged(model, position, [rank[index][1][position] for rank in ranks])
            for name, value in expected.items():
                assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-9), (position, name)


@pytest.mark.parametrize(
    "router",
    [None, Router(score_function=ScoreFunction.SIGMOID, normalized=False, scaling_factor=2.5)],
)
def test_experts_are_those_that_the_router_chooses(router: Router | None) -> None:
    """Every token by itself through its experts, in plain torch."""
    plain = LLAMA.layer_runs[0].layer
    mlp = Experts(
        num_experts=4, experts_per_token=2, expert_ffn_hidden_size=24, shared_ffn_hidden_size=16
    )
    runs = (LayerRun(count=2, layer=replace(plain, mlp=mlp)),)
    layer = built(replace(LLAMA, layer_runs=runs, router=router), 1)
    count = sum(parameter.numel() for parameter in layer.parameters())
    assert count == runs[0].layer.parameters(LLAMA.hidden_size)
    tokens = torch.randn(1, 5, 32, dtype=torch.float64)
    weights = dict(layer.named_parameters())

    def expert(x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up, down = (weights[f"{prefix}{name}_weight"] for name in ("gate", "up", "down"))
        return down @ (nn.functional.silu(gate @ x) * (up @ x))

    for x, found in zip(tokens[0], layer.mlp(tokens)[0], strict=True):
        logits = weights["router_weight"] @ x
        scores = torch.sigmoid(logits) if router else torch.softmax(logits, 0)
        chosen = scores.argsort(descending=True)[:2].tolist()
        factor = 2.5 if router else 1 / sum(scores[at] for at in chosen)
        expected = expert(x, "") + sum(
            scores[at] * factor * expert(x, f"expert_{at}_") for at in chosen
        )
        assert torch.allclose(found, expected, rtol=1e-5)
