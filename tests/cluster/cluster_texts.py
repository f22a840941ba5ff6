"""Cluster files of every shape, written by rule."""

from hetplan.cluster.devices import DeviceKind

KINDS = ("amd-mi210", "nvidia-a100-80gb-sxm", "amd-mi300x", "nvidia-h100-80gb-sxm")


def island(
    name: str, *, device: str = "amd-mi210", nodes: int = 2, per_node: int = 8, more: str = ""
) -> str:
    return (
        f"      - name: {name}\n        device: {device}\n        nodes: {nodes}\n"
        f"        devices_per_node: {per_node}\n"
        "        intra_node: {bandwidth: 32 GB/s, latency: 3 us}\n"
        f"        inter_node: {{bandwidth: 25 GB/s, latency: 5 us}}\n{more}"
    )


def cluster(regions: dict[str, str], rest: str = "", schema: str = "hetplan.cluster/2") -> str:
    """`regions`: islands' text by region name."""
    text = f"schema: {schema}\nname: written\nregions:\n"
    for name, islands in regions.items():
        text += f"  - name: {name}\n    islands:\n{islands}"
    return text + rest


DEFAULTS = (
    "links_default:\n"
    "  within_region: {bandwidth_per_device: 10 GB/s, latency: 20 us}\n"
    "  across_regions: {bandwidth_shared: 100 GB/s, round_trip: 30 ms}\n"
)


def many_islands(count: int, nodes: int, regions: int = 10) -> str:
    """`count` islands of unlike kinds, joined by defaults."""
    each = count // regions
    return cluster(
        {
            f"r{region}": "".join(
                island(f"i{region}-{number}", device=KINDS[number % len(KINDS)], nodes=nodes)
                for number in range(each)
            )
            for region in range(regions)
        },
        DEFAULTS,
    )


def source_of(kind: DeviceKind, figure: str) -> str:
    """Where a figure of a device kind was read."""
    return next((each.source for each in kind.sources if each.figure == figure), kind.source)
