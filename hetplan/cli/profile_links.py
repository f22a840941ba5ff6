"""What `hetplan profile` does as one rank of a torchrun job: measure a link together."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from hetplan.cli.profile_layers import describe
from hetplan.cli.profile_request import ProfileRequest, byte_sizes, integers
from hetplan.cli.profile_tables import show_links
from hetplan.cli.progress import ProgressLine
from hetplan.errors import InputError
from hetplan.profiling.backends import Backend, default_backend, open_backend
from hetplan.profiling.measure_links import (
    LinkCase,
    LinkKey,
    LinkProfiler,
    link_cases,
    link_key,
    message_sizes,
    process_group,
)
from hetplan.profiling.samples import LinkSample, ProfileSet
from hetplan.profiling.store import LinkWriter

# Without a model: beyond these a link's rate no longer changes with the size.
MAX_CPU_MESSAGE_BYTES = 4 << 20
MAX_ACCELERATOR_MESSAGE_BYTES = 256 << 20
# With a model: its gradients, up to what trainers put into one bucket at most.
MAX_BUCKET_BYTES = 1 << 30


def profile_links(request: ProfileRequest) -> None:
    """Measure the link between this job's ranks; rank 0 keeps and prints the samples."""
    if request.link is None:
        raise InputError("under torchrun a link is measured: name it with --link NAME")
    backend = open_backend(
        request.device or default_backend(), index=int(os.environ.get("LOCAL_RANK", "0"))
    )
    cases = link_cases(
        int(os.environ["WORLD_SIZE"]),
        link_sizes(request, is_accelerator=backend.is_accelerator),
        groups=integers("--groups", request.groups),
    )
    with process_group(backend) as rank:
        if rank == 0:
            _lead(request, request.link, backend, cases)
        else:
            describe(request, backend)
            profiler = LinkProfiler(backend, link=request.link)
            profiler.run(cases, on_sample=lambda sample, finished, total: None)


def link_sizes(request: ProfileRequest, *, is_accelerator: bool) -> tuple[int, ...]:
    """The message sizes asked for, or those up to the largest message that a plan would send."""
    if given := byte_sizes("--sizes", request.sizes):
        return given
    loaded = request.load()
    if loaded is None:
        return message_sizes(
            MAX_ACCELERATOR_MESSAGE_BYTES if is_accelerator else MAX_CPU_MESSAGE_BYTES
        )
    model, job = loaded
    gradients = model.parameter_count * job.precision.bytes_per_element
    return message_sizes(min(MAX_BUCKET_BYTES, gradients))


def _lead(
    request: ProfileRequest, link: str, backend: Backend, cases: tuple[LinkCase, ...]
) -> None:
    """Rank 0's part."""
    provenance = describe(request, backend)
    writer = LinkWriter(request.store_folder, link, provenance)
    held: dict[LinkKey, LinkSample] = {link_key(sample): sample for sample in writer.samples}
    together = dict(held)
    started = time.monotonic()
    with ProgressLine("measuring") as line:

        def keep(sample: LinkSample, finished: int, total: int) -> None:
            sample = replace(sample, measured_on=provenance.measured_on)
            writer.append(sample)
            together[link_key(sample)] = sample
            # Cases of one size take about the same time and larger ones come last: an estimate
            # from the mean is low at first and right at the end.
            left = (time.monotonic() - started) / finished * (total - finished)
            line.show(finished, total, left, f"{sample.operation} {sample.message_bytes} B")

        profiler = LinkProfiler(backend, link=link)
        profiler.run(cases, measured=() if request.again else held.keys(), on_sample=keep)
    wanted = {case.key for case in cases}
    links = tuple(sample for key, sample in together.items() if key in wanted)
    result = ProfileSet(layers=(), links=links, provenance=(provenance,))
    show_links(result, as_json=request.as_json)
