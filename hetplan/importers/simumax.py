"""SimuMax's system files (github.com/MooreThreads/SimuMax, docs/system.md): device, paths, times.

SimuMax computes with 2**30 bytes wherever its documentation says GB (`* 1024**3` in its memory,
bandwidth and network times), so its figures are taken that way. A path's bandwidth is the nominal
one times its efficiency; an operation's time adds a fixed latency to bytes over that bandwidth.
The efficiencies of single shapes become samples of operators (`simumax_shapes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hetplan.cluster.devices import DeviceKind
from hetplan.importers.peer_json import (
    PRECISION_WORDS,
    Value,
    base_name,
    need_precision,
    read_tree,
    tidy,
)
from hetplan.importers.records import ImportContext, Imported, PathFigures
from hetplan.importers.simumax_shapes import efficiency_sample
from hetplan.job.spec import Precision
from hetplan.profiling.samples import OperatorSample
from hetplan.units import GIBIBYTE

KIND = "simumax"

_TERA = 1e12
_MICROSECOND = 1e-6
_VENDORS = {"cuda": "nvidia", "musa": "moore-threads", "rocm": "amd", "hip": "amd"}
_DTYPE = re.compile(r"\b(?:out_)?dtype=([A-Za-z0-9]{1,12})")
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all2all")
_FORMS = {"all_reduce": (2.0, -1.0), "p2p": (1.0, 0.0)}
"""(scale, offset) of a ring algorithm's bytes; (1, -1) for the others."""


def parse(text: str, context: ImportContext) -> Imported:
    """The device and the paths of a system file; an InputError for what is no such file."""
    root = read_tree(text, context.file)
    name = root.need("sys_name").text()
    accelerator = root.need("accelerator")
    notes: list[str] = ["GB are read as 2**30 bytes, as SimuMax computes"]
    device = _device(name, accelerator, context, notes)
    paths: list[PathFigures] = []
    networks = root.get("networks")
    if networks is None:
        notes.append("the file has no networks")
    else:
        for network_name, network in networks.items():
            if network.is_mapping:  # others are switches such as intra_with_pcie
                paths += _network(network_name, network, notes)
    _note_switches(root, networks, notes)
    skipped: list[str] = []
    operators = tuple(_operators(accelerator.need("op"), device, skipped))
    if operators:
        notes.append(_OPERATORS_NOTE)
    return Imported(
        kind=KIND,
        device_name=name,
        paths=tuple(paths),
        devices=(device,),
        notes=tuple(notes),
        skipped=tuple(skipped),
        operators=operators,
    )


_OPERATORS_NOTE = (
    "times of operators are computed from the operations of each shape, its efficiency and the "
    "nominal rate; attention is causal, in shapes of the full square"
)


def _operators(
    operations: Value, device: DeviceKind, skipped: list[str]
) -> Iterator[OperatorSample]:
    """A sample of every shape with an efficiency of its own; the others are named in `skipped`."""
    default = operations.get("default")
    precision = Precision(device.peak_flops_per_second[0][0])
    for name, operation in operations.items():
        rate = operation.get("tflops") or (None if default is None else default.get("tflops"))
        reasons: dict[str, list[int]] = {}
        for shape, value in _table(operation):
            found: OperatorSample | str = f"{tidy(name)}: no nominal rate to compute a time with"
            if rate is not None:
                found = efficiency_sample(
                    device=device.kind,
                    operation=name,
                    shape=shape,
                    efficiency=value.number(),
                    peak_flops_per_second=rate.positive() * _TERA,
                    precision=precision,
                )
            if isinstance(found, str):
                reasons.setdefault(found, []).append(value.line)
            else:
                yield found
        skipped += [
            f"line {lines[0]}: {len(lines)} shape{'s' if len(lines) != 1 else ''}: {reason}"
            for reason, lines in reasons.items()
        ]


def _device(name: str, accelerator: Value, context: ImportContext, notes: list[str]) -> DeviceKind:
    """The accelerator's nominal figures."""
    operations = accelerator.need("op")
    matmul = operations.get("matmul") or operations.need("default")
    rate = matmul.need("tflops").positive() * _TERA
    precision = _precision(operations, context, notes)
    bandwidth = accelerator.need("bandwidth")
    if bandwidth.get("gbps") is None:  # older files have one bandwidth, newer ones one per use
        bandwidth = bandwidth.need("default")
    backend = accelerator.get("backend")
    words = "" if backend is None else backend.text().lower()
    notes += _not_imported(operations, accelerator.need("bandwidth"))
    return DeviceKind(
        kind=context.device or _slug(name),
        vendor=_VENDORS.get(words, _slug(words)),
        peak_flops_per_second=((precision.value, rate),),
        memory_bytes=accelerator.need("mem_gbs").positive() * GIBIBYTE,
        memory_bandwidth_bytes_per_second=bandwidth.need("gbps").positive() * GIBIBYTE,
        provenance="datasheet",
        source=f"SimuMax system file {tidy(base_name(context.file))}",
    )


def _slug(name: str) -> str:
    """A name as cluster files have them."""
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-._") or "unknown"


def _precision(operations: Value, context: ImportContext, notes: list[str]) -> Precision:
    """From the user, or from the shapes whose efficiency the file lists."""
    if context.precision is not None:
        return context.precision
    named = {
        PRECISION_WORDS[word.lower()]
        for _, operation in operations.items()
        for shape, _ in _table(operation)
        for word in _DTYPE.findall(shape)
        if word.lower() in PRECISION_WORDS
    }
    for precision in (Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32):
        # Half-precision products also write float32 gradients, so float32 counts last.
        if precision in named:
            notes.append(f"rates are those of {precision.value}, which the listed shapes name")
            return precision
    return need_precision(context, "the system file")


def _table(operation: Value) -> Iterator[tuple[str, Value]]:
    """Shapes with an efficiency of their own."""
    if not operation.is_mapping:
        return
    table = operation.get("accurate_efficient_factor")
    if table is not None and table.is_mapping:
        yield from table.items()


def _not_imported(operations: Value, bandwidth: Value) -> Iterator[str]:
    """What of the efficiencies has no place in a device's figures."""
    defaults = []
    for name, operation in operations.items():
        factor = operation.get("efficient_factor")
        if factor is not None:
            defaults.append(f"{tidy(name)} {factor.positive():g}")
    if defaults:
        yield f"default efficiencies are not imported: {', '.join(defaults)}"
    single = operations.get("fp8_matmul")
    if single is not None and single.get("tflops") is not None:
        yield (
            f"the fp8 rate, {single.need('tflops').positive():g} TFLOP/s, is not imported: hetplan "
            "plans in 16 and 32 bits"
        )
    classes = [
        tidy(name) for name, entry in bandwidth.items() if entry.is_mapping and name != "default"
    ]
    if classes:
        yield f"memory bandwidths of single operations are not imported: {', '.join(classes)}"


def _network(name: str, network: Value, notes: list[str]) -> list[PathFigures]:
    """The path itself and every operation with an efficiency of its own."""
    nominal = network.need("bandwidth")
    gbps = nominal.need("gbps").positive()
    factor = nominal.need("efficient_factor").positive()
    latency = nominal.need("latency_us").number()
    if latency < 0:
        raise nominal.need("latency_us").refuse(f"found {latency:g}; it is 0 or more")
    fixed = nominal.get("fixed_latency")
    if fixed is not None and fixed.number() > 0:
        notes.append(f"{tidy(name)}: fixed latency {fixed.number():g} us more per operation")
    paths = [
        PathFigures(
            measured=f"{tidy(name)} bandwidth",
            bandwidth_bytes_per_second=gbps * factor * GIBIBYTE,
            latency_seconds=latency * _MICROSECOND,
        )
    ]
    operations = network.get("op")
    for operation_name, operation in operations.items() if operations is not None else ():
        paths += _operation(name, operation_name, operation, gbps, notes)
    return paths


def _operation(
    network: str, name: str, operation: Value, gbps: float, notes: list[str]
) -> Iterator[PathFigures]:
    """Figures of one operation; none where it has the network's own."""
    words = f"{tidy(network)} {tidy(name)}"
    expected = _FORMS.get(name, (1.0, -1.0))
    for key, usual in zip(("scale", "offset"), expected, strict=True):
        given = operation.get(key)
        if given is not None and given.number() != usual:
            notes.append(
                f"line {given.line}: {words}: {key} {given.number():g} instead of {usual:g}: its "
                "bytes are not those of a ring, and its bandwidth is not that of the path"
            )
    factor, latency = operation.get("efficient_factor"), operation.get("latency_us")
    if operation.get("dp_fixed_bw") is not None:
        notes.append(f"{words}: fixed bandwidths of data-parallel groups are not imported")
    own_latency = None if _absent(latency) or latency is None else latency.number()
    if own_latency is not None and name in _COLLECTIVES:
        notes.append(f"{words}: {own_latency:g} us more per operation, whatever its size")
        own_latency = None
    if _absent(factor) and own_latency is None:
        return
    yield PathFigures(
        measured=f"{words} bandwidth",
        bandwidth_bytes_per_second=None
        if factor is None or _absent(factor)
        else gbps * factor.positive() * GIBIBYTE,
        latency_seconds=None if own_latency is None else own_latency * _MICROSECOND,
    )


def _absent(value: Value | None) -> bool:
    """Whether nothing, or null, stands there."""
    return value is None or (
        value.node.scalar is None and value.node.items is None and value.node.entries is None
    )


def _note_switches(root: Value, networks: Value | None, notes: list[str]) -> None:
    """What the file says of the topology in switches."""
    for parent in (root, networks):
        full = None if parent is None else parent.get("FC8")
        if full is not None and full.node.scalar is True:
            notes.append(
                "FC8: all eight devices of a node are linked in pairs; n of them have (n - 1) / 7 "
                "of high_intra_node's bandwidth"
            )
    count = root.get("num_per_node")
    if count is not None:
        notes.append(f"devices per node: {count.positive():g}")
