"""`holdfast.Sharded`: layouts stated by hand, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.backends.torch.local_shards import Ranks, shards_of
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange
from holdfast.errors import InvalidError
from tests.unit.backends.rank_threads import State
from tests.unit.backends.rank_threads import declared as untyped

SHAPE = (8, 4)
WHOLE = torch.arange(32.0).reshape(SHAPE)


def declared(tensor: object, shape: Sequence[int] = SHAPE, **layout: object) -> holdfast.Sharded:
    return untyped(tensor, shape, **layout)


def test_what_a_declaration_holds_is_views_of_its_tensors() -> None:
    ranks = Ranks(1, 4, lambda rank: rank)
    tensor = torch.zeros(4, 4)
    held = shards_of(tensor, declared(tensor, start=(4, 0), replicas=[3, 1, 1]), "w", ranks)
    assert (held.global_shape, held.layout, held.holders) == (SHAPE, None, (1, 3))
    assert [part.region for part in held.parts] == [Box((4, 0), (8, 4))]
    held.parts[0].local.fill_(7.0)
    assert tensor.eq(7.0).all()
    run = torch.zeros(5)
    held = shards_of(run, declared(run, torch.Size(SHAPE), flat_start=13), "w", ranks)
    assert (held.holders, [part.region for part in held.parts]) == ((1,), [FlatRange(13, 18)])
    with pytest.raises(InvalidError, match=r"w: replicas=\(0, 2\) lacks this rank, 1"):
        shards_of(run, declared(run, flat_start=13, replicas=(0, 2)), "w", ranks)


def several_boxes() -> holdfast.Sharded:
    return declared([torch.zeros(3, 4), torch.zeros(5, 1), torch.zeros(5, 3)], start=[(0, 0), (3, 0), (3, 1)])


def several_runs() -> holdfast.Sharded:
    return declared([torch.zeros(20), torch.zeros(12)], flat_start=[12, 0])


def one_box() -> holdfast.Sharded:
    return declared(torch.zeros(SHAPE), start=(0, 0))


def one_transposed_box() -> holdfast.Sharded:
    return declared(torch.zeros(4, 8).t(), start=[0, 0])


def one_run() -> holdfast.Sharded:
    return declared(torch.zeros(64)[::2], flat_start=0)


def fill(sharded: holdfast.Sharded) -> None:
    """Write what belongs there, computed from the starts alone."""
    tensors = sharded.tensor if isinstance(sharded.tensor, list) else [sharded.tensor]
    starts = sharded.start if sharded.flat_start is None else sharded.flat_start
    for tensor, start in zip(tensors, starts if isinstance(sharded.tensor, list) else [starts], strict=True):  # type: ignore[arg-type]
        if isinstance(start, int):
            tensor.copy_(WHOLE.reshape(-1)[start : start + tensor.numel()])
        else:
            tensor.copy_(WHOLE[tuple(slice(a, a + n) for a, n in zip(start, tensor.shape, strict=True))])


FORMS: tuple[Callable[[], holdfast.Sharded], ...] = (
    one_box,
    one_transposed_box,
    several_boxes,
    one_run,
    several_runs,
)


@pytest.mark.parametrize("loaded", FORMS)
@pytest.mark.parametrize("saved", FORMS)
def test_from_one_form_to_the_other_in_place(
    tmp_path: Path, saved: Callable[[], holdfast.Sharded], loaded: Callable[[], holdfast.Sharded]
) -> None:
    source, target, expected = saved(), loaded(), loaded()
    fill(source)
    fill(expected)
    holdfast.save(tmp_path / "c", {"layer": {"w": source}}, process_group=False)
    assert list(holdfast.open_checkpoint(tmp_path / "c").tensors) == ["layer.w"]
    state = {"layer": {"w": target}}
    report = holdfast.load(tmp_path / "c", state, process_group=False)
    assert report.loaded == ("layer.w",)
    assert state["layer"]["w"] is target, "the declaration stays; its tensors are filled"
    found = target.tensor if isinstance(target.tensor, list) else [target.tensor]
    wanted = expected.tensor if isinstance(expected.tensor, list) else [expected.tensor]
    assert [each.tolist() for each in found] == [each.tolist() for each in wanted]  # type: ignore[attr-defined]
    plain = torch.zeros(SHAPE)
    holdfast.load(tmp_path / "c", {"layer": {"w": plain}}, process_group=False)
    assert torch.equal(plain, WHOLE)


def test_a_part_alone_can_be_loaded(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"w": WHOLE})
    rows, run = torch.full((2, 4), -1.0), torch.full((7,), -1.0)
    holdfast.load(tmp_path / "c", {"w": declared(rows, start=(3, 0))}, process_group=False)
    holdfast.load(tmp_path / "c", {"w": declared(run, flat_start=6)}, process_group=False)
    assert torch.equal(rows, WHOLE[3:5])
    assert run.tolist() == [float(n) for n in range(6, 13)]


def test_targets_that_overlap_are_each_filled(tmp_path: Path) -> None:
    """A halo: rows held beside those a rank owns."""
    holdfast.save(tmp_path / "c", {"w": WHOLE})
    parts = [torch.full((4, 4), -1.0), torch.full((6, 4), -1.0), torch.full((4, 4), -1.0)]
    holdfast.load(tmp_path / "c", {"w": declared(parts, start=[(0, 0), (2, 0), (0, 0)])}, process_group=False)
    assert [torch.equal(part, whole) for part, whole in zip(parts, (WHOLE[:4], WHOLE[2:], WHOLE[:4]), strict=True)] == [
        True,
        True,
        True,
    ]
    runs = [torch.full((9,), -1.0), torch.full((9,), -1.0)]
    holdfast.load(tmp_path / "c", {"w": declared(runs, flat_start=[3, 5])}, process_group=False)
    assert [run.tolist() for run in runs] == [[float(n) for n in range(a, a + 9)] for a in (3, 5)]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_an_empty_tensor_is_kept(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state: State = {
        "box": declared(torch.zeros(shape), shape, start=(0, 0)),
        "run": declared(torch.zeros(0), shape, flat_start=0),
    }
    holdfast.save(tmp_path / "c", state, process_group=False)
    tensors = holdfast.open_checkpoint(tmp_path / "c").tensors
    assert {name: each.shape for name, each in tensors.items()} == {"box": shape, "run": shape}
    holdfast.load(tmp_path / "c", state, process_group=False)


def test_a_tensor_without_dimensions(tmp_path: Path) -> None:
    state: State = {
        "box": declared(torch.tensor(3.0), (), start=()),
        "run": declared(torch.tensor([4.0]), (), flat_start=0),
    }
    holdfast.save(tmp_path / "c", state, process_group=False)
    box, run = torch.tensor(0.0), torch.tensor(0.0)
    holdfast.load(tmp_path / "c", {"box": box, "run": run}, process_group=False)
    assert (box.item(), run.item()) == (3.0, 4.0)


BAD: Mapping[str, tuple[Callable[[], holdfast.Sharded], str]] = {
    "neither start": (lambda: declared(torch.zeros(SHAPE)), "both or neither of start and flat_start; expected one"),
    "both starts": (
        lambda: declared(torch.zeros(SHAPE), start=(0, 0), flat_start=0),
        "both or neither of start and flat_start; expected one",
    ),
    "start of one dimension": (lambda: declared(torch.zeros(4, 4), start=(4,)), r"start=\(4,\)"),
    "start is a number": (lambda: declared(torch.zeros(4, 4), start=4), "start=4"),
    "start is a fraction": (lambda: declared(torch.zeros(4, 4), start=(1.5, 0)), r"start=\(1\.5, 0\)"),
    "start is text": (lambda: declared(torch.zeros(4, 4), start="40"), "start='40'"),
    "start of text": (lambda: declared(torch.zeros(4, 4), start=("4", "0")), "start="),
    "local of one dimension": (lambda: declared(torch.zeros(16), start=(4, 0)), r"shape \(16,\)"),
    "below": (lambda: declared(torch.zeros(4, 4), start=(-1, 0)), r"start=\(-1, 0\)"),
    "beyond": (lambda: declared(torch.zeros(4, 4), start=(5, 0)), r"start=\(5, 0\)"),
    "run of two dimensions": (lambda: declared(torch.zeros(4, 4), flat_start=0), r"shape \(4, 4\)"),
    "run below": (lambda: declared(torch.zeros(4), flat_start=-1), "flat_start=-1"),
    "run beyond": (lambda: declared(torch.zeros(4), flat_start=29), "flat_start=29"),
    "run starts at a fraction": (lambda: declared(torch.zeros(4), flat_start=1.0), r"flat_start=1\.0"),
    "run starts at a truth": (lambda: declared(torch.zeros(4), flat_start=True), "flat_start=True"),
    "run starts at a list": (lambda: declared(torch.zeros(4), flat_start=[1]), r"flat_start=\[1\]"),
    "replicas lack this rank": (
        lambda: declared(torch.zeros(SHAPE), start=(0, 0), replicas=[]),
        r"\[\] lacks this rank, 0",
    ),
    "replicas beyond the group": (lambda: declared(torch.zeros(SHAPE), start=(0, 0), replicas=[0, 1]), "from 0 to 0"),
    "replicas is a number": (lambda: declared(torch.zeros(SHAPE), start=(0, 0), replicas=0), "replicas=0"),
    "replicas of text": (lambda: declared(torch.zeros(SHAPE), start=(0, 0), replicas=["a"]), "replicas="),
    "too few starts": (lambda: declared([torch.zeros(4), torch.zeros(4)], flat_start=[0]), "2 tensors and 1 starts"),
    "one start for several": (lambda: declared([torch.zeros(4), torch.zeros(4)], flat_start=0), "2 tensors and 1"),
    "too many starts": (lambda: declared([torch.zeros(4)], flat_start=[0, 4]), "1 tensors and 2 starts"),
    "no tensors": (lambda: declared([], start=[]), "no tensor"),
    "not a tensor": (lambda: declared([[1.0, 2.0]], flat_start=[0]), "holds list"),
    "an array": (lambda: declared(torch.zeros(4).numpy(), flat_start=0), "holds ndarray"),
    "two dtypes": (
        lambda: declared([torch.zeros(16), torch.zeros(16, dtype=torch.float64)], flat_start=[0, 16]),
        "float32.*float64",
    ),
    "a second tensor that is sparse": (
        lambda: declared([torch.zeros(4, 4), torch.zeros(4, 4).to_sparse()], start=[(0, 0), (4, 0)]),
        "sparse",
    ),
    "a second tensor on meta": (
        lambda: declared([torch.zeros(16), torch.zeros(16, device="meta")], flat_start=[0, 16]),
        "meta",
    ),
    "shape is a number": (lambda: declared(torch.zeros(32), 32, flat_start=0), "global_shape=32"),  # type: ignore[arg-type]
    "shape of fractions": (lambda: declared(torch.zeros(32), (8.0, 4), flat_start=0), "global_shape"),  # type: ignore[arg-type]
    "shape below zero": (lambda: declared(torch.zeros(0), (-8, -4), flat_start=0), "global_shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_declaration_is_refused_by_name_when_saved_and_when_loaded(tmp_path: Path, name: str) -> None:
    make, said = BAD[name]
    expected = rf"(?s)deep\.w: .*{said}"
    with pytest.raises(InvalidError, match=expected):
        holdfast.save(tmp_path / "bad", {"deep": {"w": make()}}, process_group=False)
    assert not (tmp_path / "bad").exists()
    holdfast.save(tmp_path / "c", {"deep": {"w": WHOLE}})
    with pytest.raises(InvalidError, match=expected):
        holdfast.load(tmp_path / "c", {"deep": {"w": make()}}, process_group=False)


def test_a_declared_dtensor_is_refused_by_name(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        tensor = distribute_tensor(WHOLE, init_device_mesh("cpu", (1,)), [Shard(0)], src_data_rank=None)
        with pytest.raises(InvalidError, match=r"deep\.w: Sharded holds DTensor"):
            holdfast.save(tmp_path / "c", {"deep": {"w": declared(tensor, start=(0, 0))}}, process_group=False)
    finally:
        dist.destroy_process_group()


def test_another_global_shape_is_refused_when_loaded(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"w": WHOLE})
    with pytest.raises(InvalidError, match=r"w: .*\(4, 8\).*\(8, 4\)"):
        holdfast.load(tmp_path / "c", {"w": declared(torch.zeros(32), (4, 8), flat_start=0)}, process_group=False)


@pytest.mark.parametrize("place", [lambda w: [w], lambda w: {"a": [1, (w,)]}, lambda w: (w, torch.ones(1))])
def test_a_declaration_inside_a_list_is_refused_by_path(tmp_path: Path, place: Callable[[object], object]) -> None:
    with pytest.raises(InvalidError, match=r"deep\.(0|a\.1\.0|1).*Sharded|deep.*Sharded"):
        holdfast.save(tmp_path / "c", {"deep": place(one_box())}, process_group=False)
    assert not (tmp_path / "c").exists()


def test_elements_left_out_or_held_twice_are_refused(tmp_path: Path) -> None:
    for wrong in (
        declared(torch.zeros(7, 4), start=(0, 0)),
        declared(torch.zeros(31), flat_start=0),
        declared([torch.zeros(5, 4), torch.zeros(4, 4)], start=[(0, 0), (4, 0)]),
        declared([torch.zeros(20), torch.zeros(13)], flat_start=[0, 19]),
    ):
        with pytest.raises(InvalidError, match=r"w \[8, 4\].*|exactly once"):
            holdfast.save(tmp_path / "c", {"w": wrong, "v": torch.ones(1)}, process_group=False)
        assert not list((tmp_path / "c").glob("**/*")), "nothing is left of a save that was refused"


def test_one_memory_declared_as_two_parts_is_no_tie(tmp_path: Path) -> None:
    """Stored under one name, the second would come back as a part of the first."""
    tensor = torch.arange(16.0)
    both: State = {"a": declared(tensor, (16,), flat_start=0), "b": declared(tensor, (2, 8), flat_start=0)}
    with pytest.raises(InvalidError, match=r"b: .*\ba\b"):
        holdfast.save(tmp_path / "c", both, process_group=False)
    assert not (tmp_path / "c").exists()


def test_one_memory_declared_twice_alike_is_tied(tmp_path: Path) -> None:
    parts = [torch.arange(16.0), torch.arange(16.0, 32.0)]
    holdfast.save(
        tmp_path / "c",
        {"a": declared(parts, flat_start=[0, 16]), "b": declared(list(parts), flat_start=[0, 16])},
        process_group=False,
    )
    assert dict(holdfast.open_checkpoint(tmp_path / "c").aliases) == {"b": "a"}
    target = [torch.zeros(16), torch.zeros(16)]
    state: State = {"a": declared(target, flat_start=[0, 16]), "b": declared(list(target), flat_start=[0, 16])}
    holdfast.load(tmp_path / "c", state, process_group=False)
    assert torch.cat(target).tolist() == WHOLE.reshape(-1).tolist()


def test_lists_that_share_only_their_first_tensor_are_two(tmp_path: Path) -> None:
    first, second, third = torch.arange(16.0), torch.arange(16.0, 32.0), torch.zeros(16)
    state: State = {
        "a": declared([first, second], flat_start=[0, 16]),
        "b": declared([first, third], flat_start=[0, 16]),
    }
    with pytest.raises(InvalidError, match=r"b: .*\ba\b"):
        holdfast.save(tmp_path / "c", state, process_group=False)


def test_lists_of_a_target_that_share_only_their_first_tensor_are_refused(tmp_path: Path) -> None:
    """Taken for a tie, the third tensor would stay as it is."""
    holdfast.save(tmp_path / "c", {"a": WHOLE.clone(), "b": WHOLE.clone()}, process_group=False)
    first, second, third = torch.zeros(16), torch.zeros(16), torch.zeros(16)
    state: State = {
        "a": declared([first, second], flat_start=[0, 16]),
        "b": declared([first, third], flat_start=[0, 16]),
    }
    with pytest.raises(InvalidError, match=r"b: .*\ba\b"):
        holdfast.load(tmp_path / "c", state, process_group=False)
