"""Which figures of a device kind hetplan knows, and where each of them comes from."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.errors import InputError

CPU_KIND = "cpu"
"""Device kind of one CPU core of the machine at hand; it has no accelerator library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of accelerator and where its figures come from."""

    kind: str
    """Catalogue name, such as `nvidia-a100-80gb-sxm`."""
    vendor: str
    peak_flops_per_second: tuple[tuple[str, float], ...]
    """(precision, dense rate without sparsity), one pair per precision the device has."""
    memory_bytes: float
    memory_bandwidth_bytes_per_second: float
    """0 where it is not known; then times of this kind come from measurements only."""
    provenance: str
    """`datasheet` or `measured`."""
    source: str
    """Where the figures were read."""

    def peak(self, precision: str) -> float:
        """Dense rate in `precision`; an InputError where the device does not have it."""
        for name, rate in self.peak_flops_per_second:
            if name == precision:
                return rate
        have = ", ".join(name for name, _ in self.peak_flops_per_second) or "none"
        raise InputError(
            f"device kind {self.kind} has no {precision} rate, and what is asked was not measured "
            f"(rates it has: {have}); choose another precision, or measure the kind with "
            "`hetplan profile`"
        )
