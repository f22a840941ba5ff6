"""JSON of other planners and profilers to rows, each kind recognised by its shape.

- layer profile of Sailor: `{microbatch: {tp: {layer: [forward_s, backward_s, update_s]}}}`, alone
  (model and device are then the names of the file's two folders) or below model and device;
- its layer sizes: `{model: {tp: {layer: {"params_floats": ...}}}}`;
- its network fits: any nesting that ends in `[[a, b, c], most_bytes_per_second]`;
- its measured plans: `pipeline_list`, `mbs`, `gbs`, `real`;
- plans of several planners: `cases`, each with `planners`;
- plain numbers per device: `{device: {key: number}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Node, Path, field_text
from hetplan.lint.known import known_device
from hetplan.lint.reading_cells import MAX_FAULTS, MAX_NUMBER
from hetplan.lint.rows import (
    DeviceFigures,
    LayerRow,
    LayerSize,
    Material,
    Place,
    PlanCase,
    Polynomial,
    StagePlan,
)

SAILOR_PRECISION = "fp32"
"""What Sailor's profiler runs in; its profile.json does not say it."""


class _Faults:
    """Faults of one document, collected."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Fault] = []

    def add(self, node: Node, path: Path, message: str) -> None:
        self.found.append(
            Fault(file=self.file, line=node.line, field=field_text(path), message=message)
        )

    def number(self, node: Node, path: Path) -> float | None:
        value = node.scalar
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_NUMBER:
            self.add(node, path, f"found {_shown(node)}; write a number")
            return None
        return float(value)

    def count(self, node: Node, path: Path) -> int | None:
        value = node.scalar
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
            self.add(node, path, f"found {_shown(node)}; write a whole number")
            return None
        return value


def _shown(node: Node) -> str:
    if node.items is not None:
        return "a mapping"
    if node.entries is not None:
        return f"a list of {len(node.entries)}"
    return ascii(node.scalar)[:60]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentKind:
    """One kind of JSON document."""

    title: str
    fits: Callable[[Node], bool]
    read: Callable[[Node, _Faults], Material]


def read_tree(file: str, root: Node) -> tuple[str, Material] | None:
    """Title of the kind and its rows; None where lint knows no such shape.

    Raises InputError where the shape is known and a value in it is wrong.
    """
    kind = next((each for each in DOCUMENTS if each.fits(root)), None)
    if kind is None:
        return None
    faults = _Faults(file)
    material = kind.read(root, faults)
    if faults.found:
        raise InputError(*faults.found[:MAX_FAULTS])
    return kind.title, material


def _members(node: Node) -> list[tuple[str, Node]]:
    return [(key, value) for key, (_, value) in (node.items or {}).items()]


def _first(node: Node) -> tuple[str, Node] | None:
    return next(iter(_members(node)), None)


def _is_profile(node: Node) -> bool:
    """`{count: {count: {count: [number, ...]}}}`, judged by its first branch."""
    for _ in range(3):
        entry = _first(node)
        if entry is None or not entry[0].isdecimal():
            return False
        node = entry[1]
    return node.entries is not None and len(node.entries) >= 2


def _is_profiles(node: Node) -> bool:
    model = _first(node)
    device = _first(model[1]) if model is not None else None
    return device is not None and _is_profile(device[1])


def _read_profile(root: Node, faults: _Faults) -> Material:
    folders = PurePath(faults.file).parts[-3:-1]
    device = folders[1] if len(folders) > 1 and known_device(folders[1]) else ""
    model = folders[0] if device else ""
    return Material(layers=tuple(_profile_rows(root, faults, model, device, ())))


def _read_profiles(root: Node, faults: _Faults) -> Material:
    rows: list[LayerRow] = []
    for model, devices in _members(root):
        for device, profile in _members(devices):
            rows += _profile_rows(profile, faults, model, device, (model, device))
    return Material(layers=tuple(rows))


def _profile_rows(
    root: Node, faults: _Faults, model: str, device: str, path: Path
) -> Iterator[LayerRow]:
    for microbatch, by_tp in _members(root):
        for tp, by_layer in _members(by_tp):
            for layer, times in _members(by_layer):
                at = (*path, microbatch, tp, layer)
                keys = (microbatch, tp, layer)
                if not all(key.isdecimal() and len(key) < 10 for key in keys):
                    faults.add(times, at, "keys must be microbatch size, tp and layer")
                    continue
                if times.entries is None or len(times.entries) < 2:
                    faults.add(times, at, "write [forward, backward, update] seconds")
                    continue
                forward = faults.number(times.entries[0], at)
                backward = faults.number(times.entries[1], at)
                if forward is None or backward is None:
                    continue
                yield LayerRow(
                    place=Place(file=faults.file, line=times.line),
                    source="",
                    precision=SAILOR_PRECISION,
                    device=device,
                    model=model,
                    operation="layer",
                    layer=int(layer),
                    microbatch_size=max(1, int(microbatch)),
                    tp=max(1, int(tp)),
                    variant="",
                    forward_seconds=forward,
                    backward_seconds=backward,
                    weight_bytes=None,
                    activation_bytes=None,
                )


def _is_sizes(node: Node) -> bool:
    for depth in range(3):
        entry = _first(node)
        if entry is None or (depth > 0 and not entry[0].isdecimal()):
            return False
        node = entry[1]
    return "params_floats" in (node.items or {})


def _read_sizes(root: Node, faults: _Faults) -> Material:
    rows = []
    for model, by_tp in _members(root):
        for tp, by_layer in _members(by_tp):
            for layer, sizes in _members(by_layer):
                at = (model, tp, layer, "params_floats")
                entry = (sizes.items or {}).get("params_floats")
                if entry is None or not (tp.isdecimal() and layer.isdecimal()):
                    faults.add(sizes, at, "the parameters of the layer are missing")
                    continue
                parameters = faults.number(entry[1], at)
                if parameters is not None:
                    rows.append(
                        LayerSize(
                            place=Place(file=faults.file, line=entry[0]),
                            model=model,
                            tp=int(tp),
                            layer=int(layer),
                            parameters=parameters,
                        )
                    )
    return Material(sizes=tuple(rows))


def _is_fit(node: Node) -> bool:
    entries = node.entries
    return (
        entries is not None
        and len(entries) == 2
        and entries[0].entries is not None
        and len(entries[0].entries) == 3
        and entries[1].entries is None
    )


def _is_fits(node: Node) -> bool:
    for _ in range(8):  # the deepest of these files has six keys to a fit
        entry = _first(node)
        if entry is None:
            return False
        node = entry[1]
        if _is_fit(node):
            return True
    return False


def _read_fits(root: Node, faults: _Faults) -> Material:
    rows: list[Polynomial] = []
    pending: list[tuple[tuple[str, ...], Node]] = [((), root)]
    while pending:
        path, node = pending.pop()
        if node.items is not None:
            pending += [((*path, key), value) for key, value in reversed(_members(node))]
            continue
        if not _is_fit(node):
            faults.add(node, path, "write [[a, b, c], most_bytes_per_second]")
            continue
        entries = node.entries or []
        numbers = [faults.number(entry, path) for entry in (*(entries[0].entries or []),)]
        most = faults.number(entries[1], path)
        devices = [key for key in path if not key.isdecimal() and known_device(key)]
        if most is None or any(value is None for value in numbers):
            continue
        a, b, c = (value for value in numbers if value is not None)
        ends = (devices[0], devices[-1]) if devices else ("", "")
        rows.append(
            Polynomial(
                place=Place(file=faults.file, line=node.line),
                path=path,
                ends=ends,
                coefficients=(a, b, c),
                most_bytes_per_second=most,
            )
        )
    return Material(polynomials=tuple(rows))


def _is_plan(node: Node) -> bool:
    return {"pipeline_list", "mbs", "gbs"} <= set(node.items or {})


def _read_plan(root: Node, faults: _Faults) -> Material:
    items = root.items or {}

    def figure(key: str) -> float | None:
        return faults.number(items[key][1], (key,)) if key in items else None

    microbatch = faults.count(items["mbs"][1], ("mbs",))
    batch = faults.count(items["gbs"][1], ("gbs",))
    real, reduction, memory = figure("real"), figure("red_grads"), figure("max_mem")
    model = next((part for part in PurePath(faults.file).parts if "OPT-" in part), "OPT-350")
    plans = []
    for position, pipeline in enumerate(items["pipeline_list"][1].entries or ()):
        at: Path = ("pipeline_list", position)
        layers, tp, dp = (
            (pipeline.items or {}).get(key) for key in ("layers_per_stage", "tmp_per_stage", "dp")
        )
        if layers is None or tp is None or dp is None:
            faults.add(pipeline, at, "layers_per_stage, tmp_per_stage and dp are needed")
            continue
        plans.append(
            StagePlan(
                place=Place(file=faults.file, line=layers[0]),
                model=model,
                layers=tuple(
                    tuple(_counts(stage, faults, (*at, "layers_per_stage")))
                    for stage in layers[1].entries or ()
                ),
                tp=tuple(
                    tuple(_replica_tp(stage, faults, (*at, "tmp_per_stage")))
                    for stage in tp[1].entries or ()
                ),
                dp=tuple(_counts(dp[1], faults, (*at, "dp"))),
                microbatch_size=microbatch or 0,
                global_batch_size=batch or 0,
                step_seconds=real,
                reduction_seconds=reduction,
                memory_bytes=memory,
            )
        )
    return Material(plans=tuple(plans))


def _counts(node: Node, faults: _Faults, at: Path) -> Iterator[int]:
    if node.entries is None:
        faults.add(node, at, f"found {_shown(node)}; write a list of whole numbers")
    for entry in node.entries or ():
        value = faults.count(entry, at)
        if value is not None:
            yield value


def _replica_tp(stage: Node, faults: _Faults, at: Path) -> Iterator[int]:
    """Tp of each replica `[[[device, count, zone], ...], tp]` of a stage."""
    for replica in stage.entries or ():
        if replica.entries is None or len(replica.entries) != 2:
            faults.add(replica, at, "write [[[device, count, zone], ...], tp]")
            continue
        value = faults.count(replica.entries[1], at)
        if value is not None:
            yield value


def _is_cases(node: Node) -> bool:
    cases = (node.items or {}).get("cases")
    entries = cases[1].entries if cases is not None else None
    return bool(entries) and "planners" in (entries[0].items or {} if entries else {})


def _read_cases(root: Node, faults: _Faults) -> Material:
    rows = []
    for position, case in enumerate((root.items or {})["cases"][1].entries or ()):
        at: Path = ("cases", position)
        items = case.items or {}
        if "planners" not in items or "model_layers" not in items:
            faults.add(case, at, "planners and model_layers are needed")
            continue
        model_layers = faults.count(items["model_layers"][1], (*at, "model_layers"))
        for entry in items["planners"][1].entries or ():
            plan = (entry.items or {}).get("plan")
            parts = plan[1].items or {} if plan is not None else {}
            if plan is None or not {"pp", "layers", "stages"} <= set(parts):
                continue  # a planner that found no plan
            name = (entry.items or {}).get("planner")
            rows.append(
                PlanCase(
                    place=Place(file=faults.file, line=plan[0]),
                    planner=str(name[1].scalar) if name is not None else "",
                    model_layers=model_layers or 0,
                    pp=faults.count(parts["pp"][1], (*at, "pp")) or 0,
                    layers=tuple(_counts(parts["layers"][1], faults, (*at, "layers"))),
                    stages=len(parts["stages"][1].entries or ()),
                )
            )
    return Material(cases=tuple(rows))


def _is_figures(node: Node) -> bool:
    members = _members(node)
    return len(members) >= 3 and all(
        known_device(name)
        and value.items
        and all(isinstance(each.scalar, int | float) for _, each in _members(value))
        for name, value in members
    )


def _read_figures(root: Node, faults: _Faults) -> Material:
    rows = []
    for name, value in _members(root):
        figures = [(key, faults.number(each, (name, key))) for key, each in _members(value)]
        rows.append(
            DeviceFigures(
                place=Place(file=faults.file, line=value.line),
                device=name,
                figures=tuple((key, number) for key, number in figures if number is not None),
            )
        )
    return Material(figures=tuple(rows))


DOCUMENTS = (
    DocumentKind(title="layer profile of Sailor", fits=_is_profile, read=_read_profile),
    DocumentKind(title="layer profiles of Sailor", fits=_is_profiles, read=_read_profiles),
    DocumentKind(title="layer sizes of Sailor", fits=_is_sizes, read=_read_sizes),
    DocumentKind(title="network fits of Sailor", fits=_is_fits, read=_read_fits),
    DocumentKind(title="plan measured by Sailor", fits=_is_plan, read=_read_plan),
    DocumentKind(title="plans of several planners", fits=_is_cases, read=_read_cases),
    DocumentKind(title="figures per device", fits=_is_figures, read=_read_figures),
)
