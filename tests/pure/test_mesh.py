"""The mesh: coordinates, ranks, and groups that cover every rank exactly once."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.ir import files
from meshwright.ir.mesh import Axis, Mesh

NAMES = ("pp", "dp", "cp", "tp")
MESHES = st.lists(st.integers(1, 4), max_size=4).map(lambda sizes: Mesh.of(**dict(zip(NAMES, sizes, strict=False))))


def test_the_last_axis_joins_neighbouring_ranks() -> None:
    mesh = Mesh.of(pp=2, dp=2, tp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_group_may_span_several_axes() -> None:
    mesh = Mesh.of(pp=2, dp=2, tp=2)
    assert mesh.group_ranks(("pp", "tp"), 3) == (2, 3, 6, 7)
    assert mesh.groups(("dp", "tp")) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.size("pp", "tp") == 4


def test_experts_are_an_axis_of_another_mesh_over_the_same_ranks() -> None:
    dense, experts = Mesh.of(dp=4, cp=2, tp=2), Mesh.of(rest=2, ep=4, tp=2)
    assert dense.world_size == experts.world_size
    assert experts.group_ranks("ep", 0) == (0, 2, 4, 6)
    assert set(experts.group_ranks("ep", 0)) <= set(dense.group_ranks(("dp", "cp"), 0))


def test_ranks_at_some_coordinates_are_a_stage() -> None:
    assert Mesh.of(pp=2, dp=2, tp=2).ranks_at({"pp": 1}) == (4, 5, 6, 7)
    assert Mesh.of(pp=2, dp=2, tp=2).ranks_at({"dp": 1, "tp": 0}) == (2, 6)


@given(MESHES)
def test_rank_and_coordinates_are_inverse(mesh: Mesh) -> None:
    everything = itertools.product(*(range(axis.size) for axis in mesh.axes))
    for rank, values in enumerate(everything):
        coordinates = dict(zip(mesh.names, values, strict=True))
        assert mesh.rank_of(coordinates) == rank
        assert mesh.coordinates(rank) == coordinates
        assert list(mesh.coordinates(rank)) == list(mesh.names)


@given(MESHES, st.data())
def test_groups_hold_every_rank_once_and_differ_only_on_their_axes(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.names), unique=True)) if mesh.names else []
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        assert len(group) == mesh.size(*axes)
        assert list(group) == sorted(group)
        fixed = {tuple(at for name, at in mesh.coordinates(rank).items() if name not in axes) for rank in group}
        assert len(fixed) == 1
        assert all(mesh.group_ranks(axes, rank) == group for rank in group)


@given(MESHES)
def test_a_mesh_survives_json(mesh: Mesh) -> None:
    assert files.decode(files.encode_json(mesh), Mesh, where="mesh.json") == mesh


def test_a_mesh_without_axes_is_one_rank() -> None:
    assert Mesh().world_size == 1
    assert Mesh().coordinates(0) == {}
    assert Mesh().groups(()) == ((0,),)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((Axis("dp", 0),), "axes[0].size: axis 'dp' has size 0\n  -> give 1 or more"),
        ((Axis("dp", 2), Axis("dp", 2)), "axes[1].name: two axes are called 'dp'\n  -> name each axis once"),
        ((Axis("", 2),), "axes[0].name: '' is not a name\n  -> use a word such as dp or tp"),
    ],
)
def test_impossible_axes_are_refused(axes: tuple[Axis, ...], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Mesh(axes)
    assert str(caught.value) == message


def test_a_mesh_file_with_a_bad_size_names_the_file_and_the_key() -> None:
    with pytest.raises(LayoutError) as caught:
        files.decode(b'{"axes": [{"name": "dp", "size": -1}]}', Mesh, where="mesh.json")
    assert str(caught.value) == "mesh.json: axes[0].size: axis 'dp' has size -1\n  -> give 1 or more"


def test_ranks_axes_and_coordinates_that_do_not_exist_are_named() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    with pytest.raises(LayoutError) as rank:
        mesh.coordinates(8)
    assert str(rank.value) == "mesh dp=2 x tp=4: there is no rank 8\n  -> its ranks are 0 to 7"
    with pytest.raises(LayoutError) as axis:
        mesh.groups("pp")
    assert str(axis.value) == "mesh dp=2 x tp=4: there is no axis 'pp'\n  -> its axes are dp, tp"
    with pytest.raises(LayoutError) as coordinate:
        mesh.rank_of({"dp": 2, "tp": 0})
    assert str(coordinate.value) == "mesh dp=2 x tp=4: axis 'dp' has no coordinate 2\n  -> its coordinates are 0 to 1"
    with pytest.raises(LayoutError) as missing:
        mesh.rank_of({"dp": 1})
    assert str(missing.value) == "mesh dp=2 x tp=4: no coordinate on axis 'tp'\n  -> give one for every axis"


# --- stages of different sizes ---------------------------------------------------------------------------------------

STAGES = st.lists(
    st.fixed_dictionaries({"dp": st.integers(1, 4), "tp": st.integers(1, 3)}), min_size=2, max_size=4
).map(Mesh.of_stages)


def test_the_ranks_of_a_stage_follow_one_another() -> None:
    mesh = Mesh.of_stages(({"dp": 1, "tp": 1}, {"dp": 3, "tp": 1}, {"dp": 1, "tp": 2}))
    assert str(mesh) == "pp=3 of (dp=1 x tp=1), (dp=3 x tp=1), (dp=1 x tp=2)"
    assert [mesh.stage_ranks(stage) for stage in range(3)] == [range(1), range(1, 4), range(4, 6)]
    assert mesh.groups("dp") == ((0,), (1, 2, 3), (4,), (5,))
    assert mesh.groups("tp") == ((0,), (1,), (2,), (3,), (4, 5))
    assert mesh.groups("pp") == ((0, 1, 2, 3, 4, 5),)
    assert mesh.coordinates(5) == {"pp": 2, "dp": 0, "tp": 1}
    assert mesh.submesh(1) == Mesh.of(dp=3, tp=1)


def test_ranks_are_linked_that_hold_the_same_samples() -> None:
    mesh = Mesh.of_stages(({"dp": 2}, {"dp": 3}, {"dp": 1}))
    assert mesh.linked_ranks(0, 1) == (2, 3)
    assert mesh.linked_ranks(1, 1) == (3, 4)
    assert mesh.linked_ranks(3, 0) == (0, 1)
    assert mesh.linked_ranks(5, 1) == (2, 3, 4)


@given(STAGES, st.data())
def test_unequal_stages_have_every_rank_once(mesh: Mesh, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(["dp", "tp"]))
    assert sorted(rank for group in mesh.groups(axis) for rank in group) == list(range(mesh.world_size))
    for rank in range(mesh.world_size):
        coordinates = mesh.coordinates(rank)
        assert mesh.rank_of(coordinates) == rank
        assert mesh.ranks_at(coordinates) == (rank,)
        assert rank in mesh.stage_ranks(coordinates["pp"])
        stage = data.draw(st.integers(0, mesh.num_stages - 1))
        linked = mesh.linked_ranks(rank, stage)
        assert linked
        assert all(rank in mesh.linked_ranks(other, coordinates["pp"]) for other in linked)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_equal_stages_are_linked_one_to_one(pp: int, dp: int, tp: int) -> None:
    mesh = Mesh.of(pp=pp, dp=dp, tp=tp)
    for group in mesh.groups("pp"):
        for rank in group:
            assert tuple(mesh.linked_ranks(rank, stage) for stage in range(pp)) == tuple((peer,) for peer in group)


def test_stages_of_stages_are_refused() -> None:
    inner = Mesh.of_stages(({"dp": 1}, {"dp": 2}))
    with pytest.raises(LayoutError, match="a stage has stages of its own"):
        Mesh((Axis("pp", 1),), (inner,))
    with pytest.raises(LayoutError, match="give one axis, pp"):
        Mesh((Axis("pp", 2), Axis("dp", 2)), (Mesh.of(dp=1), Mesh.of(dp=3)))
