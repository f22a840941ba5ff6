"""Nodes and links in one line, models by name, and the files that come of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Transport
from hetplan.cluster.templates import node_templates
from hetplan.drafting.cluster import draft_cluster_text
from hetplan.drafting.draft import JobWords, drafted_job, drafted_model
from hetplan.drafting.model import meant_model, shipped_models
from hetplan.drafting.words import between_words, nodes_words
from hetplan.errors import InputError
from hetplan.files.reading import document_of
from hetplan.job.load import load_job
from hetplan.job.spec import Optimizer, Precision, ProductFormat
from hetplan.library.values import Cluster
from hetplan.model.load import load_model

SITES = ("4x8 h100 @A", "8x8 mi300x @B", "2x8 910b @B")
LINK = ("A B 10Gbit 30ms",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4x8 h100 @A", (4, 8, "h100", "A", None, 0.0)),
        ("4 x 8 H100@A", (4, 8, "H100", "A", None, 0.0)),
        ("4×8 h100", (4, 8, "h100", "here", None, 0.0)),
        ("4 dgx-h100", (4, None, "dgx-h100", "here", None, 0.0)),
        ("2x8 NVIDIA H100 80GB HBM3 @ west-1", (2, 8, "NVIDIA H100 80GB HBM3", "west-1", None, 0)),
        ("2x8 a800 @A 8x200Gbit", (2, 8, "a800", "A", 8, 25e9)),
        ("2x8 a800 8 x 200 Gbps", (2, 8, "a800", "here", 8, 25e9)),
        ("2x8 a800 100 Gbit/s", (2, 8, "a800", "here", None, 12.5e9)),
        ("2x8 a800 1x100Gbit", (2, 8, "a800", "here", 1, 12.5e9)),
    ],
)
def test_nodes_in_words(text, expected):
    found = nodes_words(text)
    assert (
        *(found.nodes, found.devices, found.what, found.region),
        *(found.nics_per_node, found.nic_bytes_per_second),
    ) == expected


@pytest.mark.parametrize(
    ("text", "ends", "rate", "trip"),
    [
        ("A B 10Gbit 30ms", ("A", "B"), 1.25e9, 0.03),
        ("A B 10 Gbps 30 ms", ("A", "B"), 1.25e9, 0.03),
        ("A and B 30ms, 25 GB/s", ("A", "B"), 25e9, 0.03),
        ("4090 3090 10gbit 1ms shared", ("4090", "3090"), 1.25e9, 1e-3),
        ("10Gbit 30ms", None, 1.25e9, 0.03),
        ("2080ti 3090-here 10Gbit 30ms", ("2080ti", "3090-here"), 1.25e9, 0.03),
    ],
)
def test_links_in_words(text, ends, rate, trip):
    found = between_words(text)
    assert (found.ends, found.bytes_per_second) == (ends, rate)
    assert found.round_trip_seconds == pytest.approx(trip)
    assert not found.each
    assert between_words(text.removesuffix(" shared") + " each").each


@pytest.mark.parametrize(
    "text",
    ["", "4x8", "0x8 h100", "4x8 h100 @", "4x8 h100 @a b", "4x8 @A", "99999999x8 h100",
     "4x8 h100 @../x", "4x8 h100 @a\nb: 1", "x" * 5000, "4x8 " + "a " * 3000],
    ids=str.__len__,
)  # fmt: skip
def test_wrong_nodes_are_refused_with_the_text_of_a_right_one(text):
    with pytest.raises(InputError) as caught:
        nodes_words(text)
    assert "as in" in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.text(max_size=40))
def test_any_text_is_understood_or_refused_in_printable_words(text):
    for read in (nodes_words, between_words, meant_model):
        said = ""
        try:
            read(text)
        except InputError as error:
            said = str(error)
        assert said.isprintable()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "as in"),
        ("A B 10Gbit", "as in"),
        ("A 10Gbit 30ms", "as in"),
        ("A B C 10Gbit 30ms", "as in"),
        ("A B 10 30", "10 GB/s"),
        ("A B 10Gb/s 30ms", "easily taken for bytes"),
        ("A B 10GB 30ms", "a unit of memory"),
        ("A B 10Gbit 30GB", "a unit of memory"),
    ],
)
def test_wrong_links_are_refused(text, says):
    with pytest.raises(InputError) as caught:
        between_words(text)
    assert says in str(caught.value)


def test_nodes_become_islands_of_templates():
    cluster = Cluster.from_nodes(*SITES, between=LINK)
    assert [(each.name, each.region, each.num_devices) for each in cluster.islands] == [
        ("h100", "A", 32),
        ("mi300x", "B", 64),
        ("910b", "B", 16),
    ]
    h100 = cluster.islands[0]
    assert h100.intra_node.bandwidth_bytes_per_second == 450e9
    assert h100.nics is not None
    assert (h100.nics.per_node, h100.nics.bandwidth_bytes_per_second) == (8, 50e9)
    far = cluster.link_between("h100", "mi300x")
    assert far.shared_bandwidth_bytes_per_second == 1.25e9
    assert far.round_trip_seconds == pytest.approx(0.03)
    near = cluster.link_between("mi300x", "910b")  # of two libraries, so through the hosts
    assert (near.bandwidth_bytes_per_second, near.transport) == (25e9, Transport.HOST_STAGED)


def test_the_first_template_counts_unless_another_is_named():
    assert "node: dgx-h100" in draft_cluster_text(["4x8 h100"], ()).text
    named = draft_cluster_text(["4x8 aws-p5"], ())
    assert "node: aws-p5" in named.text
    assert named.assumed == ()
    assert Cluster.from_nodes("4 dgx-h100").num_devices == 32
    assert "node: dgx-h100" in draft_cluster_text(["4 DGX H100 @A"], ()).text


def test_links_of_islands_stand_over_what_is_assumed():
    islands = ("1x2 4090", "1x1 3090", "1x2 4090")
    cluster = Cluster.from_nodes(*islands, between=["10Gbit 0.1ms"])
    assert cluster.within_region is not None
    assert cluster.within_region.shared_bandwidth_bytes_per_second == 1.25e9
    near = ["4090 3090 1Gbit 1ms each", "3090 4090-here 2Gbit 1ms each"]
    cluster = Cluster.from_nodes(*islands, between=near)
    rates = [
        cluster.link_between(*ends).bandwidth_bytes_per_second * 8
        for ends in (("4090", "3090"), ("3090", "4090-here"), ("4090", "4090-here"))
    ]
    assert rates == [1e9, 2e9, 10e9]
    direct = cluster.link_between("4090", "4090-here")
    assert direct.transport is Transport.DEVICE_DIRECT


def test_nodes_without_a_template_have_the_catalogue_s_fabric_and_say_so():
    found = draft_cluster_text(["2x8 a800"], ())
    assert "# assumed: nvswitch of 200 GB/s a device" in found.text
    assert "# assumed: as a dgx-a100" in found.text
    (island,) = Cluster.from_nodes("2x8 a800").islands
    assert island.intra_node.bandwidth_bytes_per_second == 200e9
    (half,) = Cluster.from_nodes("2x4 h100").islands
    assert half.nics is not None
    assert half.nics.per_node == 4
    (mesh,) = Cluster.from_nodes("1x4 910b3").islands
    assert mesh.intra_node.bandwidth_bytes_per_second == pytest.approx(3 * 28e9)
    (own,) = Cluster.from_nodes("2x8 v100-16gb-sxm 2x100Gbit").islands
    assert own.nics is not None
    assert (own.nics.per_node, own.intra_node.bandwidth_bytes_per_second) == (2, 150e9)


def test_two_islands_of_one_kind_have_names_of_their_own():
    cluster = Cluster.from_nodes("1x8 h100 @A", "1x8 h100 @B", "2x8 h100 @B", between=LINK)
    assert [each.name for each in cluster.islands] == ["h100", "h100-B", "h100-2"]


@pytest.mark.parametrize(
    ("nodes", "between", "says"),
    [
        (SITES, (), 'no link between A and B: add one, as in "A B 10Gbit 30ms"'),
        (SITES, ("A C 10Gbit 30ms",), "name two regions or two islands of: A, B, h100"),
        (SITES, (*LINK, "B A 1Gbit 1ms"), "a link between these two already"),
        (SITES, ("A A 10Gbit 30ms",), "name two regions"),
        (("4x8 h100",), LINK, "there is one island"),
        (("4x8 c500",), (), "which network cards has a node"),
        (("4 h100x",), (), "nearest"),
        (("4 a800",), (), "how many devices has a node"),
        (("4x16 aws-p5",), (), "a aws-p5 has 8 devices"),
        (("4x16 h100",), (), "write nodes of 8"),
        (("1x8 hygon-bw1000",), (), "scale_up"),
        (("1x2 4090", "1x1 3090"), (), "which network has it"),
        (("9999999x8 h100",), (), "a cluster has at most"),
        (("4x8 h100 3x1Gbit",), (), "do not divide"),
        ((), (), "--nodes"),
    ],
)
def test_what_is_missing_or_wrong_is_said(nodes, between, says):
    with pytest.raises(InputError) as caught:
        draft_cluster_text(nodes, between)
    assert says in str(caught.value)


def test_all_faults_of_nodes_are_said_at_once():
    with pytest.raises(InputError) as caught:
        Cluster.from_nodes("4x8 zzz", "4x8", "4x8 h100")
    assert len(caught.value.faults) == 2


KINDS_WITH_LINKS = [each.device for each in node_templates().values()] + [
    "nvidia-a800-80gb-sxm",
    "nvidia-v100-16gb-sxm",
    "huawei-ascend-910b3-64gb",
    "nvidia-rtx-3090-24gb",
    "amd-mi210",
    "moore-threads-mtt-s4000-48gb",
]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 64),
            st.sampled_from([1, 2, 4, 8]),
            st.sampled_from([*KINDS_WITH_LINKS, "h100", "MI300X", "910b", "a100"]),
            st.sampled_from("ABC"),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["10Gbit 30ms", "25 GB/s 1 ms each", "1Tbit 0ms"]),
)
def test_every_draft_is_a_cluster_file_of_the_nodes_that_were_said(islands, link):
    nodes = [f"{n}x{d} {kind} @{region} 8x200Gbit" for n, d, kind, region in islands]
    regions = sorted({region for *_, region in islands})
    pairs = [(a, b) for at, b in enumerate(regions) for a in regions[:at]]
    cluster = Cluster.from_nodes(*nodes, between=[f"{a} {b} {link}" for a, b in pairs])
    assert [each.nodes * each.devices_per_node for each in cluster.islands] == [
        n * d for region in dict.fromkeys(r for *_, r in islands) for n, d, _, r in islands
        if r == region
    ]  # fmt: skip
    for one in cluster.islands:
        for two in cluster.islands:
            assert cluster.link_between(one.name, two.name).bandwidth_bytes_per_second > 0


@pytest.mark.parametrize("kind", load_catalogue(), ids=lambda kind: kind.kind)
def test_every_kind_can_be_drafted_or_says_what_is_missing(kind):
    try:
        (island,) = Cluster.from_nodes(f"2x2 {kind.kind} 2x100Gbit").islands
    except InputError as error:
        words = str(error)
        assert "catalogue says nothing" in words or "memory" in words
    else:
        assert island.device.kind == kind.kind


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-3-70b", "llama-3-70b"),
        ("meta-llama/Llama-3.1-70B", "llama-3-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-70b-hf", "llama-2-70b"),
        ("mixtral", "mixtral-8x7b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b"),
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("gpt3", "gpt3-175b"),
        ("405b", "llama-3-405b"),
    ],
)
def test_models_are_known_by_the_names_that_people_give_them(text, name):
    assert meant_model(text).path.stem == name


def test_a_name_that_says_another_version_has_a_note():
    assert meant_model("Llama-3.1-70B").note == "Llama-3.1-70B is taken as llama-3-70b"
    assert meant_model("mixtral").note == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("70b", "may be each of llama-2-70b, llama-3-70b"),
        ("llama-3-7b", "nearest: llama-3-70b"),
        ("mixtral-8x22b", "config.json of its Hugging Face page"),
        ("zzz", "give --model config.json"),
        ("", "give --model config.json"),
        ("\x1b[2Jllama", "\\x1b[2Jllama"),
    ],
)
def test_a_model_that_is_not_known_says_what_to_do(text, says):
    with pytest.raises(InputError) as caught:
        meant_model(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", shipped_models())
def test_the_copy_of_a_shipped_model_is_the_same_model(name):
    copied = drafted_model(name)
    assert load_model(copied.document) == load_model(shipped_models()[name])
    assert copied.assumed == ()


def job(words, nodes=("4x8 h100",)):
    model = load_model(shipped_models()["llama-3-8b"])
    drafted = drafted_job(words, model, Cluster.from_nodes(*nodes))
    return load_job(drafted.document), drafted


def test_a_job_says_what_was_said_and_marks_what_was_not():
    found, drafted = job(JobWords())
    assert (found.global_batch_size, found.sequence_length) == (1024, 4096)
    assert (found.precision, found.optimizer) == (Precision.BFLOAT16, Optimizer.ADAMW)
    assert found.target == "megatron"
    assert drafted.assumed == ("batch 1,024, sequences of 4,096, bfloat16, target megatron",)
    words = JobWords(
        batch=8, sequence=128, tokens=2 * 10**12, target="torchtitan", precision="fp16",
        optimizer="adam",
    )  # fmt: skip
    found, drafted = job(words)
    assert (found.global_batch_size, found.sequence_length) == (8, 128)
    assert (found.precision, found.total_tokens) == (Precision.FLOAT16, 2 * 10**12)
    assert found.target == "torchtitan"
    assert drafted.assumed == ()
    assert "assumed" not in drafted.document.text


def test_several_libraries_need_a_trainer_that_mixes_them():
    found, drafted = job(JobWords(), ("4x8 h100", "4x8 mi300x"))
    assert found.target == "flagscale"
    assert "trains nccl, rccl together" in drafted.document.text


def test_devices_without_bfloat16_train_in_float16():
    found, drafted = job(JobWords(), ("4x8 v100", "4x8 a100"))
    assert found.precision is Precision.FLOAT16
    assert "float16" in drafted.assumed[0]


def test_fp8_is_a_format_of_products():
    found, _ = job(JobWords(precision="fp8"))
    assert found.precision is Precision.BFLOAT16
    assert found.trainer.product_format is ProductFormat.FLOAT8


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (JobWords(precision="int4"), "--precision: found 'int4'; write one of float32"),
        (JobWords(optimizer="lion"), "--optimizer: found 'lion'"),
        (JobWords(target="deepspeed"), "--target: found 'deepspeed'"),
    ],
)
def test_wrong_words_of_a_job_are_refused(words, says):
    with pytest.raises(InputError) as caught:
        job(words)
    assert says in str(caught.value)


def test_a_drafted_cluster_can_be_read_again_from_its_text():
    text = draft_cluster_text(SITES, LINK).text
    assert load_cluster(document_of("x.yaml", text.encode())).num_devices == 112
    assert all(len(line) <= 110 for line in text.splitlines())
