"""Plans of four ranks under which the tests save the weights of one small model."""

from __future__ import annotations

from dataclasses import replace

from runtime_cases import LLAMA, job, plan_of

SEED = 3
# The vocabulary is no multiple of tp, and tp exceeds the key-value heads.
MODEL = replace(LLAMA, vocab_size=61)
TIED = replace(MODEL, tied_embeddings=True)
PLANS = {
    "pp2 tp2": plan_of(MODEL, job(), (3, 1), tp=2),
    "tp4": plan_of(MODEL, job(), (4,), tp=4),
    "pp2 dp2": plan_of(MODEL, job(), (1, 3), dp=2),
    "pp2 tp2 tied": plan_of(TIED, job(), (2, 2), tp=2),
}
