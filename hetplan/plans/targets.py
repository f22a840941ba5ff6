"""What each trainer can run, as data."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Capabilities of one trainer."""

    name: str
    description: str
    rendezvous_sends: bool
    """A send between stages holds the sender until the receiver has posted."""
    vocab_multiple: int
    """The vocabulary is padded to a multiple of this times tp."""
    optimizer_sharding: bool
    """The optimizer state can be split over the data-parallel ranks."""
    full_recompute: bool
    fewer_microbatches_than_stages: bool
    """1F1B runs with fewer microbatches than the pipeline has stages."""
    own_layers_only: bool = False
    """It has hetplan's own gpt and llama layers and no others."""

    def padded_vocab_size(self, vocab_size: int, tp: int) -> int:
        """Vocabulary that is trained under this tp: rounded up to `vocab_multiple` times tp."""
        multiple = self.vocab_multiple * tp
        return -(-vocab_size // multiple) * multiple


TARGETS: dict[str, Target] = {
    "native": Target(
        name="native",
        description="hetplan's reference trainer (hetplan launch)",
        # gloo sends are rendezvous; torch's Schedule1F1B waits for each fused send and receive.
        rendezvous_sends=True,
        vocab_multiple=1,
        optimizer_sharding=False,
        full_recompute=True,
        # torch.distributed.pipelining's Schedule1F1B refuses it.
        fewer_microbatches_than_stages=False,
        own_layers_only=True,
    ),
    "megatron": Target(
        name="megatron",
        description="what stock Megatron-LM can express: one tp, dp and microbatch size for all "
        "stages, uneven layers per stage",
        # Non-interleaved 1F1B waits for batched isend/irecv (p2p overlap is forced off).
        rendezvous_sends=True,
        # --make-vocab-size-divisible-by defaults to 128.
        vocab_multiple=128,
        optimizer_sharding=True,
        full_recompute=True,
        fewer_microbatches_than_stages=True,
    ),
}


def target(name: str) -> Target:
    """The target of this name; an InputError that lists the known ones otherwise."""
    if name not in TARGETS:
        raise InputError(f"unknown target {name!r}; known targets: {', '.join(sorted(TARGETS))}")
    return TARGETS[name]
