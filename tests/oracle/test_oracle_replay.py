"""The oracle's replay and the product's, each written apart, agree on random pipelines."""

from __future__ import annotations

import numpy as np
import pytest
from oracle_replay import pipeline_ends, program

from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import Exchange, PipelineTimes
from hetplan.errors import InputError


def _depths(rng: np.random.Generator, stages: int, m: int, extra: bool) -> tuple[int, ...]:
    own = [min(stages - s, m) for s in range(stages)]
    if not extra:
        return tuple(own)
    more = np.sort(rng.integers(0, 4, stages))[::-1]
    more -= more[-1]
    return tuple(min(stages - s + int(more[s]), m) for s in range(stages))


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("kind", ["1f1b", "deeper", "megatron", "torch"])
def test_the_oracle_replays_as_the_definition(kind: str, rendezvous: bool) -> None:
    rng = np.random.default_rng(7)
    stuck = 0
    for _ in range(50):
        chunks = 1 if kind in ("1f1b", "deeper") else int(rng.integers(2, 4))
        stages, m = int(rng.integers(1 if chunks == 1 else 2, 6)), int(rng.integers(1, 9))
        if kind == "megatron":
            stages = max(3, stages)
            m = stages * int(rng.integers(1, 3))
        depths = _depths(rng, stages, m, kind == "deeper")
        hops = stages * chunks - 1
        forward, backward = rng.uniform(0.1, 1.5, (2, stages, chunks))
        # Hops of a chunk's last stage to the next chunk's first are one hop each time.
        repeated = rng.uniform(0, 0.4, (4, stages))
        there, back, latency, extra = (row[np.arange(hops) % stages] for row in repeated)
        times = PipelineTimes(
            schedule="1f1b" if chunks == 1 else "interleaved-1f1b",
            num_microbatches=m,
            warmup=depths,
            forward=forward,
            backward=backward,
            weight=np.zeros_like(forward),
            send_forward=there,
            send_backward=back,
            wire_latency=latency,
            rendezvous_extra=extra,
            link_forward=np.full(hops, -1),
            link_backward=np.full(hops, -1),
            shared_forward=np.zeros(hops),
            shared_backward=np.zeros(hops),
            exchange=Exchange.MEGATRON if kind == "megatron" else Exchange.TORCH,
        )
        own = pipeline_ends(
            program(stages, m, chunks, depths, rendezvous, kind == "megatron"),
            np.hstack([forward, backward]),
            np.stack([there, back], axis=1).ravel(),
            latency,
            extra,
            rendezvous,
        )
        if own is None:
            stuck += 1
            with pytest.raises(InputError, match="wait for itself"):
                step_ends([times], rendezvous=rendezvous)
            continue
        assert own == pytest.approx(step_ends([times], rendezvous=rendezvous)[0], rel=1e-12)
    assert (stuck > 0) == (kind == "deeper" and rendezvous)
