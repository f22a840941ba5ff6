"""What does a boundary cost between stages of given degrees, before anyone knows the plan?

Of a plan `hetplan.cost.step_model.hops` says it from the devices on both sides. Here only a link
and the degrees are known, as where a search bounds every boundary that a stage can have.
"""

from __future__ import annotations

from hetplan.cluster.spec import Island, Link
from hetplan.cost.step_model.hops import Hop, Sides, gathered_seconds, hop_over, node_ports
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import Degrees
from hetplan.plans.plan import Replica
from hetplan.predict.predictor import Predictor


def boundary_costs_over(
    link: Link,
    model: ModelSpec,
    job: Job,
    degrees: Degrees,
    predictor: Predictor,
    ends: tuple[Island, Island] | None = None,
) -> Hop:
    """Transfers between two stages over this link, which joins `ends`.

    A capacity that the link shares is divided by the devices of a stage, which all send at once.
    """
    message = _message_bytes(model, job, degrees)
    replica = Replica(devices=(), tp=degrees.tp, microbatch_size=degrees.microbatch_size)
    gathering = max(
        (gathered_seconds(model, job, island, replica, predictor) for island in ends or ()),
        default=0.0,
    )
    senders = degrees.tp * degrees.dp
    # Two stages inside one node cross no NIC.
    apart = ends if ends and link != ends[0].intra_node else ()
    sides = Sides(
        forward_bytes=message,
        backward_bytes=message,
        senders=senders,
        islands=ends,
        gathering_seconds=gathering,
        ports=tuple(port for island in apart for port in node_ports(island, senders)),
    )
    return hop_over(link, sides, predictor)


def _message_bytes(model: ModelSpec, job: Job, degrees: Degrees) -> float:
    """Activations that one device sends to the next stage, per microbatch.

    Every tensor-parallel rank sends them whole unless the trainer scatters them.
    """
    tokens = degrees.microbatch_size * job.sequence_length
    whole = float(tokens * model.hidden_size * job.precision.bytes_per_element)
    return whole / (degrees.tp if trainer_settings(job).scattered_sends else 1)
