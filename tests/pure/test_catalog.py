"""The catalog: every name loads, names are read by grammar, and a wrong name says what is near."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.catalog import load_cluster, reported_cluster
from meshwright.errors import ClusterError, FileFormatError
from meshwright.ir.cluster import Cluster
from meshwright.ir.cluster_names import cluster_names, device_names, load_device


@pytest.mark.parametrize("name", cluster_names())
def test_every_listed_cluster_loads_and_says_where_its_figures_are_from(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert all((cluster.source, cluster.device.source, *(level.source for level in cluster.levels)))
    assert cluster.device == load_device(cluster.device.name)


def test_devices_and_clusters_are_listed() -> None:
    names = device_names()
    assert {"a100-40gb", "a100-80gb", "a800", "b200", "generic-cpu", "h100", "h200", "mi250x", "tpu-v4", "v100"} <= set(
        names
    )
    assert names == sorted(names)
    assert {"cpu-local", "a100-80gb-dgx-hdr200x8", "a100-80gb-dgx-ib800"} <= set(cluster_names())


def test_a_device_may_have_other_names() -> None:
    assert load_device("h100-80gb") == load_device("h100")
    assert load_cluster("v100-32gb-dgx2h-edr100x8").device.name == "v100"
    assert load_cluster("v100-16gb-dgx").device.name == "v100-16gb"


def test_boxes_have_their_own_number_of_devices() -> None:
    sizes = {"v100-dgx2h": 16, "a100-40gb-p4d": 8, "h100-hgx": 8, "a100-80gb-pcie4": 4, "gb200-box72": 72}
    assert {name: load_cluster(name).num_devices for name in sizes} == sizes
    assert load_cluster("a100-80gb-pcie4").levels[0].source.startswith("pcie; ")


@pytest.mark.parametrize("name", device_names())
def test_float32_is_never_faster_than_the_narrower_types(name: str) -> None:
    peaks = load_device(name).peak_flops_per_s
    assert all(peaks.get("float32", 0.0) <= peaks[dtype] for dtype in peaks if dtype != "float64")


def test_a_name_is_read_as_device_box_fabric() -> None:
    cluster = load_cluster("a100-80gb-dgx-hdr200x8")
    box, pod = cluster.levels
    assert cluster.device.peak("bfloat16") == 312e12
    assert (box.name, box.fan_out, pod.name, pod.fan_out) == ("box", 8, "pod", 1)
    assert pod.links == 8
    assert 1 / pod.beta_s_per_byte == pytest.approx(0.8 * 25e9)


def test_a_named_cluster_has_as_many_boxes_as_are_asked_for() -> None:
    assert load_cluster("a100-80gb-dgx-hdr200x8").num_devices == 8
    assert load_cluster("a100-80gb-dgx-hdr200x8", 3072).levels[1].fan_out == 384
    assert load_cluster("a100-80gb-dgx-hdr200x8", 4).ranks_per("box") == 4
    assert load_cluster("cpu-local", 16).ranks_per("box") == 16
    with pytest.raises(ClusterError, match=r"12 devices do not fill whole units of level 'box', which hold 8"):
        load_cluster("a100-80gb-dgx-hdr200x8", 12)


def test_a_rate_without_links_is_the_total_of_a_box() -> None:
    four = load_cluster("a100-80gb-dgx-ib800").levels[1]
    assert four.links == 4
    assert four.beta_s_per_byte == load_cluster("a100-80gb-dgx-ib200x4").levels[1].beta_s_per_byte
    assert four.shared_beta_s_per_byte(8) == pytest.approx(2 * four.beta_s_per_byte)
    assert load_cluster("h100-dgx-eth100").levels[1].links == 1
    assert load_cluster("h100-dgx-ib100").levels[1].links == 1


def test_without_a_fabric_there_is_one_box() -> None:
    box = load_cluster("v100-workstation")
    assert (box.num_devices, len(box.levels)) == (4, 1)
    with pytest.raises(ClusterError, match="cluster v100-workstation: it cannot have 8 devices"):
        box.resized(8)


def test_a_box_takes_the_best_link_its_devices_have() -> None:
    nvlink, memory = load_cluster("h100-box4").levels[0], load_cluster("generic-cpu-box16").levels[0]
    assert nvlink.source.startswith("nvlink; ")
    assert memory.source.startswith("memory; ")
    assert nvlink.beta_s_per_byte < load_cluster("h100-workstation").levels[0].beta_s_per_byte


@given(
    st.sampled_from(device_names()),
    st.integers(1, 64),
    st.sampled_from(["", "-edr100", "-hdr200x4", "-ndr400x8", "-ib800", "-eth10", "-eth25x2"]),
    st.integers(1, 9),
)
def test_the_grammar_knows_any_combination(device: str, size: int, fabric: str, boxes: int) -> None:
    name = f"{device}-box{size}{fabric}"
    cluster = load_cluster(name, size * boxes if fabric else None)
    assert (cluster.name, cluster.device.name) == (name, device)
    assert cluster.num_devices == size * (boxes if fabric else 1)


BOXES = "dgx, hgx, dgx1, dgx2, dgx2h, p3, p3dn, p4d, p4de, p5, nvl72, pcieN, workstation, boxN"
FABRICS = "edr, hdr, ndr, ib, fdr, xdr, roce, efa, ss, eth"


@pytest.mark.parametrize(
    ("name", "problem", "near"),
    [
        ("a100-80g-dgx-hdr200x8", f"'80g' is not a box ({BOXES})", "`a100-80gb-dgx-hdr200x8`"),
        ("a200-dgx", "it starts with no device of the catalog", "`h200-dgx`"),
        ("perlmuter", "it starts with no device of the catalog", "`perlmutter`"),
        ("h100-dgx-ndr100x8", "a link of ndr has 200 or 400 Gb/s, not 100", "`h100-dgx-ndr400x8`"),
        (
            "h100-dgx-nrd400x8",
            f"'nrd400x8' is not a fabric (one of {FABRICS} with a rate in Gb/s, such as hdr200x8)",
            "`h100-dgx-ndr400x8`",
        ),
        ("v100-dgx16-edr100x4", f"'dgx16' is not a box ({BOXES})", "`v100-dgx-edr100x4`"),
        ("v100-box-edr100x4", f"'box' is not a box ({BOXES})", "`v100-dgx-edr100x4`"),
        ("generic-cpu-dgx", "a dgx joins devices by mesh or nvlink, and generic-cpu has memory", "`generic-cpu-box4`"),
        ("cpu-locl", "it starts with no device of the catalog", "`cpu-local`"),
    ],
)
def test_an_unknown_name_says_what_is_wrong_and_what_is_near(name: str, problem: str, near: str) -> None:
    with pytest.raises(ClusterError) as caught:
        load_cluster(name)
    text, remedy = str(caught.value).split("\n  -> ")
    assert text == f"unknown cluster {name!r}: {problem}"
    assert remedy.startswith(f"did you mean {near}")
    assert remedy.endswith(
        "? a name is DEVICE-BOX-FABRIC, such as a100-80gb-dgx-hdr200x8, with DEVICE one of "
        f"{', '.join(device_names())}; a file's name ends in .toml"
    )


def test_an_unknown_device_says_what_there_is() -> None:
    with pytest.raises(ClusterError) as caught:
        load_device("h10")
    assert str(caught.value) == (
        f"unknown device 'h10'\n  -> did you mean `h100`? devices: {', '.join(device_names())}"
    )


@pytest.mark.parametrize(
    ("name", "spelled", "devices"),
    [
        ("dgx-2h", "v100-dgx2h-edr100x8", 64), ("dgx-a100", "a100-80gb-dgx-hdr200x8", 64),
        ("dgx-h100", "h100-dgx-ndr400x8", 64), ("p3.16xlarge", "v100-16gb-p3-eth25", 16),
        ("p4d.24xlarge", "a100-40gb-p4d-efa400", 16), ("p5.48xlarge", "h100-p5-efa3200", 16),
        ("perlmutter", "a100-40gb-box4-ss200x4", 64), ("frontier", "mi250x-box8-ss200x4", 64),
        ("alps", "gh200-box4-ss200x4", 64), ("a100-dgx", "a100-80gb-dgx", 8), ("gb200-nvl72", "gb200-box72", 72),
        ("mi250x-frontier-slingshot200x4", "mi250x-box8-ss200x4", 64),
    ],
)  # fmt: skip
def test_machines_go_by_their_own_names_too(name: str, spelled: str, devices: int) -> None:
    cluster, other = load_cluster(name, devices), load_cluster(spelled, devices)
    assert cluster.name == name
    assert (cluster.device, cluster.levels) == (other.device, other.levels)


def test_a_path_is_a_file_and_no_name() -> None:
    for path in ("a100-80gb-dgx-hdr200x8.toml", "./cpu-local"):
        with pytest.raises(FileFormatError, match="cannot read the file: No such file or directory"):
            Cluster.load(path)


def test_the_noun_loads_names_too() -> None:
    assert Cluster.load("h200-dgx-ndr400x8", 16) == load_cluster("h200-dgx-ndr400x8", 16)


GIB = 2**30
REPORTED = {
    "A100-SXM4-40GB": (39.4, 108, "a100-40gb", "nvlink"),
    "A100-SXM4-80GB": (79.2, 108, "a100-80gb", "nvlink"),
    "NVIDIA A100-SXM4-40GB": (39.4, 108, "a100-40gb", "nvlink"),
    "NVIDIA A100-SXM4-80GB": (79.2, 108, "a100-80gb", "nvlink"),
    "NVIDIA A100-PCIE-40GB": (39.4, 108, "a100-40gb", "pcie"),
    "NVIDIA A100 80GB PCIe": (79.2, 108, "a100-80gb", "pcie"),
    "NVIDIA A800-SXM4-80GB": (79.2, 108, "a800", "nvlink"),
    "NVIDIA A800 80GB PCIe": (79.2, 108, "a800", "pcie"),
    "NVIDIA H100 80GB HBM3": (79.1, 132, "h100", "nvlink"),
    "NVIDIA H100": (95.0, 132, "h100-96gb", "nvlink"),
    "NVIDIA H200": (139.7, 132, "h200", "nvlink"),
    "NVIDIA H800": (79.1, 132, "h800", "nvlink"),
    "NVIDIA GH200 480GB": (95.0, 132, "gh200", "nvlink"),
    "NVIDIA GH200 120GB": (94.5, 132, "gh200", "nvlink"),
    "NVIDIA B200": (178.4, 148, "b200", "nvlink"),
    "NVIDIA GB200": (184.0, 148, "gb200", "nvlink"),
    "Tesla V100-SXM2-16GB": (15.8, 80, "v100-16gb", "mesh"),
    "Tesla V100-SXM2-32GB": (31.7, 80, "v100", "mesh"),
    "Tesla V100-SXM3-32GB": (31.7, 80, "v100", "mesh"),
    "Tesla V100-PCIE-16GB": (15.8, 80, "v100-16gb", "pcie"),
    "Tesla V100-PCIE-32GB": (31.7, 80, "v100", "pcie"),
    "Tesla V100-DGXS-32GB": (31.7, 80, "v100", "mesh"),
    "Tesla P100-SXM2-16GB": (15.9, 56, "p100", "nvlink"),
    "Tesla P100-PCIE-16GB": (15.9, 56, "p100", "pcie"),
    "AMD Instinct MI250X": (64.0, 110, "mi250x", "nvlink"),
    "AMD Instinct MI300X": (191.5, 304, "mi300x", "nvlink"),
}
UNKNOWN = [
    "NVIDIA A100-SXM-64GB", "NVIDIA A100X", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 PCIe", "NVIDIA H100 NVL",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA H200 NVL", "NVIDIA H20", "NVIDIA GH200 144G HBM3e", "NVIDIA L40S",
    "NVIDIA L4", "NVIDIA A10G", "NVIDIA A10", "NVIDIA A40", "NVIDIA RTX A6000", "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 3090", "Tesla T4", "Tesla V100S-PCIE-32GB", "Tesla P100-PCIE-12GB", "GRID A100X-40C",
    "AMD Instinct MI210", "AMD Radeon Graphics", "",
]  # fmt: skip


@pytest.mark.parametrize("reported", REPORTED)
def test_what_a_driver_reports_names_a_device_and_its_link(reported: str) -> None:
    memory_gib, processors, name, link = REPORTED[reported]
    cluster = reported_cluster(reported, int(memory_gib * GIB), processors, 2)
    assert (cluster.device.name, cluster.levels[0].source.split(";")[0]) == (name, link)
    assert cluster.device.memory_bytes == int(memory_gib * GIB)
    assert cluster.num_devices == (2 if link == "pcie" else 8)


@pytest.mark.parametrize("reported", UNKNOWN)
def test_what_the_catalog_does_not_have_is_refused(reported: str) -> None:
    with pytest.raises(ClusterError, match=f"the catalog has no device {reported!r}") as caught:
        reported_cluster(reported, 40 * GIB, 108, 1)
    assert str(caught.value).endswith(
        "\n  -> pass cluster=, the name or the file of a cluster: `meshwright clusters` lists names"
    )


def test_other_kinds_of_an_unknown_device_are_told() -> None:
    with pytest.raises(ClusterError, match=r"no device 'NVIDIA H100 PCIe' \(it has other kinds: h100, h100-96gb\)"):
        reported_cluster("NVIDIA H100 PCIe", 80 * GIB, 114, 1)


def test_a_part_of_a_device_is_not_the_device() -> None:
    problem = r"NVIDIA A100-SXM4-80GB reports 39\.6 GiB of memory, the catalog's a100-80gb has 79\.2 GiB"
    with pytest.raises(ClusterError, match=problem):
        reported_cluster("NVIDIA A100-SXM4-80GB", int(39.6 * GIB), 108, 1)


def test_a_device_with_some_of_its_processors_is_not_the_device() -> None:
    with pytest.raises(ClusterError, match="NVIDIA H100 80GB HBM3 reports 66 processors, the catalog's h100 has 132"):
        reported_cluster("NVIDIA H100 80GB HBM3", int(79.1 * GIB), 66, 8)
