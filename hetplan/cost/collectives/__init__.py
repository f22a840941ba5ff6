"""What a collective among ranks placed anywhere costs, and which bytes cross which link.

`collective` prices one; `group_shape` says how its ranks lie. Algorithms: rings.py (flat,
two-level, halving-doubling, parameter server), trees.py, pairwise.py; choose.py takes the cheapest
of what the library that serves the group has (libraries.py).
"""

from hetplan.cost.collectives.choose import collective
from hetplan.cost.collectives.libraries import ALL
from hetplan.cost.collectives.shape import GroupShape, group_shape
from hetplan.cost.collectives.values import (
    Algorithm,
    CollectiveCost,
    ExchangeOrder,
    LinkBytes,
)

__all__ = [
    "ALL",
    "Algorithm",
    "CollectiveCost",
    "ExchangeOrder",
    "GroupShape",
    "LinkBytes",
    "collective",
    "group_shape",
]
