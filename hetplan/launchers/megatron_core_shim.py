"""How megatron-core trains on CPU cores: the few places where it takes an accelerator for granted.

megatron-core puts tensors on torch.cuda.current_device(), which a machine without an accelerator
does not have. `install` answers for it, with the CPU, wherever a run of `megatron_core_rank` comes
by; nothing of megatron-core itself is replaced but two functions about random numbers, of which
such a run draws none. Call it before the first import of megatron.core, in a process that does
nothing else. Each entry names what needs it (files of megatron-core 0.16.1, under megatron/core).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CPU_VARIABLES = (
    # jit.py hands functions to torch.compile, which would start a C++ compiler.
    ("TORCHDYNAMO_DISABLE", "1"),
    # Accelerators that this machine may have are not for a plan on its cores.
    ("CUDA_VISIBLE_DEVICES", ""),
)
"""Environment of a process that trains on CPU cores."""


def install() -> None:
    """Answer for an accelerator with the CPU, in this process."""
    cuda: Any = torch.cuda
    # transformer/dot_product_attention.py, pipeline_parallel/p2p_communication.py,
    # distributed/param_and_grad_buffer.py and others: device of what they allocate.
    cuda.current_device = lambda: torch.device("cpu")
    # pipeline_parallel/p2p_communication.py, after every exchange.
    cuda.synchronize = lambda device=None: None
    whole: Any = torch
    # pipeline_parallel/schedules.py (zeros), optimizer/optimizer.py (tensor): device="cuda".
    whole.zeros = _on_cpu(torch.zeros)
    whole.tensor = _on_cpu(torch.tensor)
    # models/common/language_module/language_module.py: a tied matrix.
    tensor: Any = Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    # optimizer/distrib_optimizer.py sorts parameters by the name of their type.
    tensor.type = _accelerator_names(Tensor.type)


def install_random() -> None:
    """The same for the random numbers' state, which recomputation saves and restores; imports
    megatron.core.
    """
    from megatron.core.tensor_parallel import random

    # tensor_parallel/random.py, CheckpointFunction.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    random._set_cuda_rng_state = lambda *args, **kwargs: None


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The factory, with the CPU where it is asked for an accelerator."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _accelerator_names(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type` that names a CPU tensor's type as an accelerator's."""

    def named(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(tensor, *args, **kwargs)
        if args or kwargs or not isinstance(found, str) or found.startswith("torch.cuda."):
            return found
        return found.replace("torch.", "torch.cuda.", 1)

    return named
