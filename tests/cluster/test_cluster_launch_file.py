"""Launch domains in a cluster file: what is read, and what is refused where."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_texts import DEFAULTS, cluster, island
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.launch_domains import (
    DEFAULT_DOMAIN,
    KindLaunch,
    LaunchDomain,
    Scheduler,
    resource_of,
)
from hetplan.cluster.load import load_cluster
from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder

NAMES = '        node_names: ["n[1-2]"]\n'
NVIDIA = "nvidia-a100-80gb-sxm"
ISLANDS = {
    "r1": island("fast", device=NVIDIA, more=NAMES),
    "r2": island("slow", more=NAMES.replace("n[", "m[")),
    "r3": island("ascend", device="huawei-ascend-910b2-64gb") + island("rest"),
}


def text(launch: str) -> str:
    return cluster(ISLANDS, f"{DEFAULTS}launch:\n{launch}", schema="hetplan.cluster/4")


def read(tmp_path, launch: str):
    path = tmp_path / "cluster.yaml"
    path.write_text(text(launch))
    return load_cluster(path)


def faults(tmp_path, launch: str) -> list[tuple[str, str]]:
    with pytest.raises(InputError) as caught:
        read(tmp_path, launch)
    first = text(launch).splitlines().index("launch:") + 1
    for fault in caught.value.faults:
        assert fault.file.endswith("cluster.yaml")
        assert fault.line >= first
    return [(fault.field, fault.message) for fault in caught.value.faults]


def test_every_key_of_a_domain_is_read(tmp_path):
    found = read(
        tmp_path,
        "  - name: north\n    islands: [fast]\n    scheduler: slurm\n    interface: bond0.100\n"
        "    fabric_devices: [mlx5_0, 'mlx5_1:1']\n    first_port: 30000\n    last_port: 30009\n"
        '    addresses: {"n[1-2]": "10.0.0.[8-9]"}\n    image: reg.example.org:5000/a/b:1\n'
        f"    kinds: [{{device: {NVIDIA}, resource: a100, image: b:2}}]\n"
        "    partition: gpu\n    account: llm\n    time_limit: 12 h\n",
    )
    assert found.launch_domains == (
        LaunchDomain(
            name="north",
            islands=("fast",),
            scheduler=Scheduler.SLURM,
            interface="bond0.100",
            fabric_devices=("mlx5_0", "mlx5_1:1"),
            first_port=30000,
            last_port=30009,
            addresses=(("n[1-2]", "10.0.0.[8-9]"),),
            image="reg.example.org:5000/a/b:1",
            kinds=(KindLaunch(device=NVIDIA, resource="a100", image="b:2"),),
            partition="gpu",
            account="llm",
            time_limit_seconds=43200.0,
        ),
    )
    domain = found.domain_of_island("fast")
    assert [domain.address_of(node) for node in ("n1", "n2", "n3")] == [
        "10.0.0.8",
        "10.0.0.9",
        "n3",
    ]
    assert (domain.image_of(NVIDIA), domain.image_of("other")) == (
        "b:2",
        "reg.example.org:5000/a/b:1",
    )
    rest = found.domain_of_island("rest")
    assert rest is found.domain_of_island("slow")
    assert (rest.name, rest.islands) == (DEFAULT_DOMAIN, ("slow", "ascend", "rest"))


def test_kubernetes_counts_devices_under_names_that_are_known_or_given(tmp_path):
    pods = "  - {name: p, islands: [slow, ascend], scheduler: kubernetes, image: i"
    (fault,) = faults(tmp_path, f"{pods}}}\n")
    assert fault[0] == "launch[0].kinds"
    assert "huawei-ascend-910b2-64gb" in fault[1]
    given = "kinds: [{device: huawei-ascend-910b2-64gb, resource: huawei.com/Ascend910}]"
    domain = read(tmp_path, f"{pods}, {given}}}\n").launch_domains[0]
    assert resource_of(domain, "huawei-ascend-910b2-64gb", "huawei") == "huawei.com/Ascend910"
    assert resource_of(domain, "amd-mi210", "amd") == "amd.com/gpu"
    assert resource_of(domain, "cpu", "generic") == "cpu"


@pytest.mark.parametrize(
    ("launch", "field", "says"),
    [
        ("{name: a, islands: []}", "launch[0].islands", "at least 1"),
        ("{name: a}", "launch[0].islands", "required key is missing"),
        ("{name: A b, islands: [fast]}", "launch[0].name", "write 1 to 40 of a-z"),
        ("{name: ../x, islands: [fast]}", "launch[0].name", "write 1 to 40 of a-z"),
        ("{name: hosts, islands: [fast]}", "launch[0].name", "that no domain names"),
        ("{name: a, islands: [fasst]}", "launch[0].islands[0]", "nearest: fast"),
        ("{name: a, islands: [fast, fast]}", "launch[0].islands[1]", "already in 'a'"),
        ("{name: a, islands: [fast], scheduler: pbs}", "launch[0].scheduler", "one of hosts"),
        ("{name: a, islands: [fast], interface: eth0;id}", "launch[0].interface", "ip link"),
        ("{name: a, islands: [fast], interface: sixteen-letters-}", "launch[0].interface", "15"),
        ("{name: a, islands: [fast], interface: -eth0}", "launch[0].interface", "ip link"),
        (
            "{name: a, islands: [fast], fabric_devices: [$(id)]}",
            "launch[0].fabric_devices[0]",
            "ib",
        ),
        ("{name: a, islands: [fast], first_port: 80}", "launch[0].first_port", "from 1024"),
        ("{name: a, islands: [fast], last_port: 70000}", "launch[0].last_port", "65535"),
        ("{name: a, islands: [fast], first_port: 29999}", "launch[0].last_port", "two ports"),
        ("{name: a, islands: [fast], image: 'a b'}", "launch[0].image", "[registry/]name"),
        ("{name: a, islands: [fast], image: '$(id)'}", "launch[0].image", "[registry/]name"),
        ("{name: a, islands: [fast], ssh_user: '-oX'}", "launch[0].ssh_user", "login name"),
        ("{name: a, islands: [fast], ssh_port: 0}", "launch[0].ssh_port", "at least 1"),
        ("{name: a, islands: [fast], partition: gpu}", "launch[0].partition", "slurm domains"),
        ("{name: a, islands: [fast], time_limit: 1 h}", "launch[0].time_limit", "slurm domains"),
        (
            "{name: a, islands: [fast], scheduler: slurm, time_limit: 5 s}",
            "launch[0].time_limit",
            "from a minute",
        ),
        (
            "{name: a, islands: [fast], scheduler: slurm, ssh_user: u}",
            "launch[0].ssh_user",
            "hosts domains",
        ),
        ("{name: a, islands: [fast], namespace: n}", "launch[0].namespace", "kubernetes domains"),
        (
            "{name: a, islands: [fast], scheduler: kubernetes, image: i, namespace: 'N/x'}",
            "launch[0].namespace",
            "1 to 63",
        ),
        (
            "{name: a, islands: [fast], scheduler: kubernetes}",
            "launch[0].image",
            "needs a container",
        ),
        (
            "{name: a, islands: [fast], scheduler: kubernetes, image: /x.sqsh}",
            "launch[0].image",
            "Kubernetes pulls",
        ),
        (
            "{name: a, islands: [fast], kinds: [{device: amd-mi210}]}",
            "launch[0].kinds[0].device",
            "of this domain's islands",
        ),
        (
            f"{{name: a, islands: [fast], kinds: [{{device: {NVIDIA}}}, {{device: {NVIDIA}}}]}}",
            "launch[0].kinds[1].device",
            "twice",
        ),
        (
            f"{{name: a, islands: [fast], kinds: [{{device: {NVIDIA}, resource: x/y}}]}}",
            "launch[0].kinds[0].resource",
            "plain hosts",
        ),
        (
            "{name: a, islands: [fast], scheduler: kubernetes, image: i, "
            f"kinds: [{{device: {NVIDIA}, resource: gpu}}]}}",
            "launch[0].kinds[0].resource",
            "device plugin",
        ),
        (
            "{name: a, islands: [fast], scheduler: slurm, "
            f"kinds: [{{device: {NVIDIA}, resource: 'a:1'}}]}}",
            "launch[0].kinds[0].resource",
            "gres.conf",
        ),
        (
            "{name: a, islands: [fast], addresses: {n1: '10.0.0.1 '}}",
            "launch[0].addresses.n1",
            "host",
        ),
        (
            "{name: a, islands: [fast], addresses: {n1: 10.0.0.256}}",
            "launch[0].addresses.n1",
            "host",
        ),
        ("{name: a, islands: [fast], addresses: {n1: 0.0.0.0}}", "launch[0].addresses.n1", "reach"),
        ("{name: a, islands: [fast], addresses: {n1: '`id`'}}", "launch[0].addresses.n1", "host"),
        ("{name: a, islands: [fast], addresses: {n3: a}}", "launch[0].addresses.n3", "nearest: n"),
        (
            "{name: a, islands: [fast], addresses: {m1: a}}",
            "launch[0].addresses.m1",
            "unknown node",
        ),
        (
            "{name: a, islands: [fast], addresses: {'n[1-2]': '10.0.0.[1-3]'}}",
            "launch[0].addresses.'n[1-2]'",
            "2 nodes and 3 addresses",
        ),
        (
            "{name: a, islands: [fast], addresses: {'n[1-2]': '10.0.0.[255-256]'}}",
            "launch[0].addresses.'n[1-2]'",
            "10.0.0.256",
        ),
        (
            "{name: a, islands: [fast], addresses: {'n[1-9999999]': '10.0.0.[1-9999999]'}}",
            "launch[0].addresses.'n[1-9999999]'",
            "more than",
        ),
        (
            "{name: a, islands: [fast], addresses: {n1: a, n2: a}}",
            "launch[0].addresses.n2",
            "already the address of 'n1'",
        ),
        (
            "{name: a, islands: [fast], addresses: {n1: a, 'n[1-2]': 'b[1-2]'}}",
            "launch[0].addresses.'n[1-2]'",
            "two addresses",
        ),
        ("{name: a, islands: [fast], interfase: eth0}", "launch[0].interfase", "interface"),
        ("7", "launch[0]", "mapping"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(tmp_path, launch, field, says):
    found = faults(tmp_path, f"  - {launch}\n")
    assert [each for each, _ in found] == [field]
    assert says in found[0][1]


def test_two_domains_have_two_names_and_share_no_island(tmp_path):
    found = faults(tmp_path, "  - {name: a, islands: [fast]}\n  - {name: a, islands: [fast]}\n")
    assert {field for field, _ in found} == {"launch[1].islands[0]", "launch[1].name"}


def test_a_value_made_by_hand_is_checked_as_well():
    with pytest.raises(InputError, match="interface"):
        LaunchDomain(name="a", islands=("x",), interface="$(id)")


def test_a_part_of_a_cluster_keeps_its_domains():
    found = load_cluster(shipped_folder("configs") / "clusters" / "three-domains.yaml")
    part = replace(found, islands=found.islands[:1])
    assert part.domain_of_island("h100") == found.domain_of_island("h100")


def test_an_island_of_two_domains_is_no_value():
    found = load_cluster(shipped_folder("configs") / "clusters" / "three-domains.yaml")
    twice = replace(found.launch_domains[0], name="again")
    with pytest.raises(InputError, match="already in 'north-slurm'"):
        replace(found, launch_domains=(*found.launch_domains, twice))


HOSTILE = st.text(st.sampled_from("a1.-_:/ $`'\"\\;|&<>(){}[]*?#~!%\n\t\0é\u202e"), max_size=12)
FIELDS = ("name", "interface", "image", "ssh_user", "partition", "account", "namespace")
_SCHEDULERS = {"partition": "slurm", "account": "slurm", "namespace": "kubernetes"}


@given(field=st.sampled_from(FIELDS), word=HOSTILE)
@settings(derandomize=True, deadline=None, max_examples=500)
def test_texts_that_pass_hold_nothing_that_a_shell_reads(field, word):
    scheduler = Scheduler(_SCHEDULERS.get(field, "hosts"))
    try:
        LaunchDomain(**{"name": "n", "islands": ("x",), "scheduler": scheduler} | {field: word})
    except InputError:
        return
    assert not set(word) & set(" $`'\"\\;|&<>(){}*?~!%\n\t\0é\u202e")
    assert not word.startswith("-")


@given(word=HOSTILE)
@settings(derandomize=True, deadline=None, max_examples=500)
def test_addresses_that_pass_hold_nothing_that_a_shell_reads(word):
    try:
        domain = LaunchDomain(name="n", islands=("x",), addresses=(("node", word),))
    except InputError:
        return
    address = domain.address_of("node")
    assert not set(address) & set(" $`'\"\\;|&<>(){}[]*?#~!%/\n\t\0é\u202e")
    assert not address.startswith("-")


def test_the_shipped_example_has_one_domain_of_each_scheduler():
    found = load_cluster(shipped_folder("configs") / "clusters" / "three-domains.yaml")
    assert [domain.scheduler for domain in found.launch_domains] == [
        Scheduler.SLURM,
        Scheduler.KUBERNETES,
        Scheduler.HOSTS,
    ]
    assert found.domain_of_island("bench").address_of("oak") == "oak.lab.example.org"


def test_the_commented_example_of_every_key_is_right(tmp_path):
    lines = (shipped_folder("configs") / "clusters" / "mixed-768.yaml").read_text().splitlines()
    start = lines.index("# launch:")
    launch = [line.removeprefix("# ") for line in lines[start:]]
    path = tmp_path / "cluster.yaml"
    path.write_text("\n".join([*lines[:start], *launch]) + "\n")
    (domain,) = load_cluster(path).launch_domains
    assert domain.address_of("amd016") == "10.0.1.16"
    assert domain.of_kind("amd-mi210").resource == "mi210"
