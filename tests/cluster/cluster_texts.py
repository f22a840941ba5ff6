"""Cluster files of every shape, written by rule."""

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


def shapes() -> dict[str, str]:
    """Files of about 100,000 devices, by what is unusual about them."""
    out = ", ".join(str(node) for node in range(0, 12_500, 2))
    names = ", ".join(f"host-{node:05d}" for node in range(12_500))
    listed = ", ".join(f"host-{node:06d}" for node in range(100_000))
    nics = "        nics: {per_node: 4, bandwidth: 50 GB/s}\n        numa_nodes: 2\n"
    pairs = "".join(
        f"  - {{between: [i{a}, i{b}], bandwidth_per_device: 1 GB/s, latency: 1 us}}\n"
        for a in range(100)
        for b in range(a)
    )

    def one(more: str, nodes: int = 12_500, per_node: int = 8) -> str:
        return cluster({"r": island("a", nodes=nodes, per_node=per_node, more=more)})

    return {
        "1 island of 12,500 nodes": one(""),
        "  6,250 of them out": one(f"        nodes_out: [{out}]\n"),
        "  all named by a range": one('        node_names: ["host-[00001-12500]"]\n'),
        "  named one by one, NICs, half out": one(
            f"{nics}        node_names: [{names}]\n        nodes_out: [{out}]\n"
        ),
        "1 island of 100,000 named nodes": one(f"        node_names: [{listed}]\n", 100_000, 1),
        "1,000 islands, 10 regions, default links": many_islands(1000, 13),
        "1,000 islands, 1,000 regions": many_islands(1000, 13, regions=1000),
        "100 islands, all 4,950 links listed": cluster(
            {"r": "".join(island(f"i{n}", nodes=125) for n in range(100))}, f"links:\n{pairs}"
        ),
        "12,500 islands of one node": many_islands(12_500, 1),
    }


def main() -> None:
    """CPU seconds to read each shape, the better of two."""
    import tempfile
    import time
    from pathlib import Path

    from hetplan.cluster.catalogue import load_catalogue
    from hetplan.cluster.load import load_cluster

    kinds = load_catalogue()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        for name, text in shapes().items():
            path.write_text(text)
            spent = []
            for _ in range(2):
                start = time.process_time()
                found = load_cluster(path, kinds)
                spent.append(time.process_time() - start)
            print(f"{name:42} {found.num_devices:7,} devices {min(spent):5.2f} s")


if __name__ == "__main__":
    main()
