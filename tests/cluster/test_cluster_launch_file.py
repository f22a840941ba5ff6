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


@pytest.mark.parametrize(
    ("launch", "field"),
    [
        ("{name: a, islands: []}", ".islands"),
        ("{name: ../x, islands: [fast]}", ".name"),
        ("{name: hosts, islands: [fast]}", ".name"),
        ("{name: a, islands: [fast, fast]}", ".islands[1]"),
        ("{name: a, islands: [fast], scheduler: pbs}", ".scheduler"),
        ("{name: a, islands: [fast], interface: eth0;id}", ".interface"),
        ("{name: a, islands: [fast], fabric_devices: [$(id)]}", ".fabric_devices[0]"),
        ("{name: a, islands: [fast], first_port: 80}", ".first_port"),
        ("{name: a, islands: [fast], image: '$(id)'}", ".image"),
        ("{name: a, islands: [fast], ssh_user: '-oX'}", ".ssh_user"),
        ("{name: a, islands: [fast], partition: gpu}", ".partition"),
        ("{name: a, islands: [fast], scheduler: kubernetes}", ".image"),
        ("{name: a, islands: [fast], kinds: [{device: amd-mi210}]}", ".kinds[0].device"),
        (
            f"{{name: a, islands: [fast], kinds: [{{device: {NVIDIA}, resource: x/y}}]}}",
            ".kinds[0].resource",
        ),
        ("{name: a, islands: [fast], addresses: {n1: '10.0.0.1 '}}", ".addresses.n1"),
        ("{name: a, islands: [fast], addresses: {n1: '`id`'}}", ".addresses.n1"),
        ("{name: a, islands: [fast], addresses: {m1: a}}", ".addresses.m1"),
        (
            "{name: a, islands: [fast], addresses: {'n[1-2]': '10.0.0.[1-3]'}}",
            ".addresses.'n[1-2]'",
        ),
        (
            "{name: a, islands: [fast], addresses: {'n[1-9999999]': '10.0.0.[1-9999999]'}}",
            ".addresses.'n[1-9999999]'",
        ),
        (
            "{name: a, islands: [fast], addresses: {n1: a, 'n[1-2]': 'b[1-2]'}}",
            ".addresses.'n[1-2]'",
        ),
        ("{name: a, islands: [fast], interfase: eth0}", ".interfase"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(tmp_path, launch, field):
    assert [each for each, _ in faults(tmp_path, f"  - {launch}\n")] == [f"launch[0]{field}"]


def test_two_domains_have_two_names_and_share_no_island(tmp_path):
    found = faults(tmp_path, "  - {name: a, islands: [fast]}\n  - {name: a, islands: [fast]}\n")
    assert {field for field, _ in found} == {"launch[1].islands[0]", "launch[1].name"}


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
