"""Which kind of output a text probably is: for the user who named the wrong kind, or none.

Only words that the tool itself prints are looked for; a text that shows none is not guessed.
"""

from __future__ import annotations

import re

_HOST = r"^[ \t]*[\w.-]{0,253}"
_READ = 1 << 16  # every tool names itself at the beginning

# First match wins: more specific ones stand above.
_SIGNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "rocm-topo",
        re.compile(r'"\(Topology\) |ROCm System Management|between two GPUs =|"num_hops"'),
    ),
    (
        "iperf3",
        re.compile(
            r'"(?:sum_sent|sum_received|tcp_mss_default|test_start)"|'
            r"\[ ID\](?:\[Role\])? Interval +Transfer +B(?:andwidth|itrate)"
        ),
    ),
    ("npu-topo", re.compile(r"^[ \t]*(?:NPU|Phy-ID)\d+[ \t]+\S", re.MULTILINE)),
    ("nvidia-topo", re.compile(r"^(?:\x1b\[[0-9;]*m)?[ \t]*GPU\d+(?:\s|\x1b|$)", re.MULTILINE)),
    ("rccl-tests", re.compile(r"rccl-tests|RCCL (?:version|tests)|librccl")),
    ("nccl-tests", re.compile(r"nccl-tests|nThread \d+ nGpus|nccl_version|algbw +busbw")),
    ("perftest", re.compile(r"RDMA_(?:Write|Read)|Send (?:BW|Latency|Post) |#bytes +#iterations")),
    ("hostfile", re.compile(rf"{_HOST}(?:[ \t]+|:)(?:slots|max_slots)[ \t]*=", re.MULTILINE)),
    ("slurm-nodes", re.compile(rf"{_HOST}\[[\d,-]+\]", re.MULTILINE)),
)


def looks_like(text: str) -> str | None:
    """The kind of importer whose tool this text names; None where it names none."""
    begin = text[:_READ]
    return next((kind for kind, sign in _SIGNS if sign.search(begin)), None)
