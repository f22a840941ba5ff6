"""What a collective among ranks placed anywhere costs, and which bytes cross which link.

`collective` prices one; `group_shape` says how its ranks lie. Algorithms: rings.py (flat,
two-level), trees.py, pairwise.py; choose.py takes the cheapest of what the library that serves the
group has.
"""

from hetplan.cost.collectives.choose import collective
from hetplan.cost.collectives.shape import GroupShape, group_shape
from hetplan.cost.collectives.values import Algorithm, CollectiveCost

__all__ = [
    "Algorithm",
    "CollectiveCost",
    "GroupShape",
    "collective",
    "group_shape",
]
