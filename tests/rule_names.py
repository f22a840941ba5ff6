"""Which rule of a plan a fault names."""

from __future__ import annotations

from hetplan.errors import Fault
from hetplan.plans.rules import Rule


def rule_of(fault: Fault) -> Rule:
    """The rule in brackets at the end of a message of `hetplan.plans.check`."""
    return Rule(fault.message.rpartition("[")[2].removesuffix("]"))
