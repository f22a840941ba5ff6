"""What the programs over a pipeline's slots add up, and what they keep below X.

Symbols and inequalities are those of `hetplan.cost.bounds`; a slot s has n layer
units, F and B are affine in n, and W_s is its microbatches in flight. Every 1F1B step is at least
Sigma + after_0 + X with

    X >= (b) less Sigma                 only the slot's own times
    X >= (c) less Sigma                 and D, everything strictly downstream in dependency form
    X >= (i) less Sigma, j = s + 1      of two neighbouring slots; where a boundary is long

For one X the right sides only grow with D, so the least D dominates and a dynamic program from the
last slot is an exact minimiser; below a long boundary the least D is kept for every number of
layers of the slot. S(X) = least Sigma + after_0 is a falling step function, so that over a grid
X_0 < X_1 < ... the least of X_k + S(X_{k+1}) is a bound for every plan, whatever the grid.
"""

from __future__ import annotations

NONE = 1e300
"""Stands for "no plan", far above any step."""

SLACK = 1.0 + 1e-12
"""Comparisons against X forgive the rounding of the other side, so that no plan is lost by it."""
