"""What does Megatron-LM want in the environment of its ranks?"""

from __future__ import annotations

from hetplan.emitters.megatron.parallel import Degrees
from hetplan.emitters.sheet import Agent
from hetplan.emitters.vendors import vendor_environment

_BLACKWELL = ("nvidia-b200", "nvidia-b300", "nvidia-gb200", "nvidia-gb300")
"""Beginnings of the kinds from which on the rule below is none (arguments.py: device architecture
10 and above)."""


def agent_environment(agent: Agent, degrees: Degrees) -> tuple[tuple[str, str], ...]:
    """Variables of one agent.

    With tp or cp above 1 validate_args refuses any other CUDA_DEVICE_MAX_CONNECTIONS than 1 before
    Blackwell: kernels that wait for a transfer must not be queued before it.
    """
    found = vendor_environment(agent)
    ordered = degrees.tp > 1 or degrees.cp > 1
    if ordered and not agent.host.device_kind.startswith(_BLACKWELL):
        return (("CUDA_DEVICE_MAX_CONNECTIONS", "1"), *found)
    return found
