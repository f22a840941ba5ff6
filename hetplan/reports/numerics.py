"""What `hetplan launch check-numerics` prints: a line for each device kind, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetplan.launchers.numerics import Numerics


def show_numerics(numerics: Numerics, *, passed: bool) -> None:
    """The results of all kinds; `passed`: nothing is wrong and none is missing."""
    setup = numerics.setup
    degrees = ", ".join(str(tp) for tp in setup.tensor_parallel)
    print(
        f"{setup.model}: {setup.microbatch_size} x {setup.sequence_length} tokens in "
        f"{setup.precision.value}, tp {degrees}, seed {setup.seed}"
    )
    for kind in numerics.kinds:
        for worst in sorted(kind.results, key=lambda result: -result.share)[:1]:
            print(
                f"{kind.kind}: {len(kind.results)} results; the worst has {worst.share:.0%} of "
                f"the deviation allowed ({worst.operator}, {worst.tensor})"
            )
    if passed:
        kinds = " and ".join(kind.kind for kind in numerics.kinds)
        print(f"{kinds}: every result is as exact as its number format allows")
