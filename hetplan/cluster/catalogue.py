"""Which device kinds hetplan knows, from the data in configs/devices."""

from __future__ import annotations

from pathlib import Path

from hetplan.cluster.device_form import DEVICES_SCHEMA, DeviceForm, DevicesForm
from hetplan.cluster.devices import DeviceKind
from hetplan.errors import InputError
from hetplan.files.reading import decode, read_document
from hetplan.files.shipped import shipped_folder


def load_catalogue(folder: Path | None = None) -> tuple[DeviceKind, ...]:
    """Every device kind of a folder's *.yaml files, by name; left out: the shipped catalogue."""
    place = shipped_folder("configs") / "devices" if folder is None else folder
    kinds: dict[str, DeviceKind] = {}
    for path in sorted(place.glob("*.yaml")):
        document = read_document(path)
        form = decode(document, DevicesForm, schema=DEVICES_SCHEMA)
        for position, device in enumerate(form.devices):
            if device.kind in kinds:
                at = ("devices", position, "kind")
                raise InputError(document.fault(at, f"{device.kind} is already in the catalogue"))
            kinds[device.kind] = device_kind(device)
    return tuple(kinds[name] for name in sorted(kinds))


def device_kind(form: DeviceForm) -> DeviceKind:
    """The value of a device's file form; what the form leaves out is 0, meaning unknown."""
    peaks = (
        ("bfloat16", form.peak.bfloat16),
        ("float16", form.peak.float16),
        ("float32", form.peak.float32),
    )
    return DeviceKind(
        kind=form.kind,
        vendor=form.vendor,
        peak_flops_per_second=tuple((name, rate) for name, rate in peaks if rate is not None),
        memory_bytes=form.memory or 0.0,
        memory_bandwidth_bytes_per_second=form.memory_bandwidth or 0.0,
        provenance=form.provenance,
        source=form.source,
    )
