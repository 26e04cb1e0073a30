"""Parameters cut in every way a checkpoint can say, put together again; and what it cannot say, refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidError
from tests.unit.backends.foreign.deepspeed.assembled import assembled, listing_of
from tests.unit.backends.foreign.deepspeed.crafted import Crafted, moment_of, numbered

TP = 3


@dataclass
class Cut:
    """A whole parameter, and how it is cut."""

    whole: torch.Tensor
    held: list[torch.Tensor]
    info: dict[str, Any]


def lengths_of(draw: st.DrawFn, parts: int) -> list[list[int]]:
    return [draw(st.lists(st.integers(0, 3), min_size=TP, max_size=TP)) for _ in range(parts)]


@st.composite
def cuts(draw: st.DrawFn, name: str, first: int) -> Cut:
    """Cut a parameter by a rule drawn from all there are; ranks may hold nothing."""
    rule = draw(st.sampled_from(["replicated", "columns", "rows", "two", "several", "map", "map of blocks"]))
    rest = draw(st.integers(1, 3))
    if rule == "replicated":
        whole = numbered(draw(st.integers(1, 4)), rest, first=first)
        return Cut(whole, [whole] * TP, {"tp_replicated_parameter_patterns": [f"^{name}$"]})
    if rule in ("columns", "rows"):
        (widths,) = lengths_of(draw, 1)
        dim = int(rule == "rows")
        shape = [sum(widths), rest] if not dim else [rest, sum(widths)]
        whole = numbered(*shape, first=first)
        info = {"parameter_with_row_parallelism_patterns": [name]} if dim else {}
        return Cut(whole, list(whole.split(widths, dim)), info)
    if rule == "two":
        width = draw(st.integers(1, 3))
        whole = numbered(2 * width * TP, rest, first=first)
        halves = [half.split(width) for half in whole.split(width * TP)]
        held = [torch.cat([half[rank] for half in halves]) for rank in range(TP)]
        return Cut(whole, held, {"parameter_with_2_sub_params_cat_dim_0": [name]})
    widths = lengths_of(draw, draw(st.integers(1, 3)))
    dim = draw(st.integers(0, 1))
    sizes = [sum(each) for each in widths]
    shape = [rest, rest]
    shape[dim] = sum(sizes)
    whole = numbered(*shape, first=first)
    subs = [sub.split(each, dim) for sub, each in zip(whole.split(sizes, dim), widths, strict=True)]
    held = [torch.cat([sub[rank] for sub in subs], dim) for rank in range(TP)]
    if rule == "several":
        stated: list[Any] = list(shape)
        stated[dim] = tuple(sizes)
        entry = {"patterns": [name], "shape": tuple(stated), "partition_dim": dim}
        return Cut(whole, held, {"parameter_with_sub_params": [entry], "sub_param_shard_widths": {name: widths}})
    return Cut(whole, held, {"affine_map": {"version": 1, "params": {f"^{name}$": map_of(whole, held, widths, dim)}}})


def map_of(whole: torch.Tensor, held: Sequence[torch.Tensor], widths: list[list[int]], dim: int) -> dict[str, Any]:
    """Return an affine map of a parameter of which every rank holds a part of several, as DeepSpeed writes it."""
    ranks = {}
    for rank, local in enumerate(held):
        pieces, taken, first = [], 0, 0
        for each in widths:
            shape = list(whole.shape)
            shape[dim] = each[rank]
            source = (first + sum(each[:rank])) * whole.stride(dim)
            dest = taken * row_major(local.shape)[dim]
            pieces.append(
                {
                    "shape": shape,
                    "source": [source, row_major(whole.shape)],
                    "dest": [dest, row_major(local.shape)],
                    "locations": [rank],
                }
            )
            taken, first = taken + each[rank], first + sum(each)
        ranks[rank] = {"shard_shape": list(local.shape), "pieces": pieces}
    return {"logical_shape": list(whole.shape), "ranks": ranks}


def row_major(shape: Sequence[int]) -> list[int]:
    return [shape[1], 1]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), ranks=st.integers(1, 4), stage=st.sampled_from([1, 3]))
def test_any_cut_is_put_together(data: st.DataObject, ranks: int, stage: int, tmp_path_factory: Any) -> None:
    names = ["a.weight", "b.weight", "c.weight"]
    drawn = {name: data.draw(cuts(name, 1000 * number)) for number, name in enumerate(names)}
    info: dict[str, Any] = {"universal_checkpoint_version": 0.4, "tp_replicated_parameter_patterns": ["none"]}
    for cut in drawn.values():
        for key, value in cut.info.items():
            info[key] = merged(info.get(key), value)
    held = [{name: cut.held[tp] for name, cut in drawn.items()} for tp in range(TP)]
    folder = Crafted(held, ranks, stage, info).write(tmp_path_factory.mktemp("cut"))
    listing = listing_of(folder)
    for name, cut in drawn.items():
        master = torch.from_numpy(assembled(folder, listing, f"optimizer.state.{name}.master"))
        assert torch.equal(master, cut.whole), name
        assert torch.equal(torch.from_numpy(assembled(folder, listing, f"model.{name}")), cut.whole), name
        moment = torch.from_numpy(assembled(folder, listing, f"optimizer.state.{name}.exp_avg"))
        assert torch.equal(moment, moment_of(cut.whole)), name


def merged(known: Any, more: Any) -> Any:
    if isinstance(known, dict) and isinstance(more, dict):
        return known | {key: merged(known.get(key), value) for key, value in more.items()}
    return known + more if isinstance(known, list) else more


def refused(tmp_path: Path, held: list[torch.Tensor], info: dict[str, Any], match: str) -> None:
    folder = Crafted([{"w": each} for each in held], 1, 1, info).write(tmp_path / "refused")
    with pytest.raises(InvalidError, match=match):
        listing_of(folder)


HALVES = [numbered(2, 3), numbered(2, 3, first=6)]


@pytest.mark.parametrize(
    ("info", "match"),
    [
        ({}, "no universal_checkpoint_info"),
        ({"original_vocab_size": 3}, "no universal_checkpoint_info"),
        ({"tp_replicated_parameter_patterns": [3]}, "patterns"),
        ({"tp_replicated_parameter_patterns": "w"}, "list or dict"),
        ({"tp_replicated_parameter_patterns": ["w", "w$"]}, "several patterns"),
        ({"tp_replicated_parameter_patterns": ["(?=w)"]}, "looks around"),
        ({"tp_replicated_parameter_patterns": [], "vocabulary_parameter_patterns": ["w"]}, "original_vocab_size None"),
        (
            {"tp_replicated_parameter_patterns": [], "vocabulary_parameter_patterns": ["w"], "original_vocab_size": 9},
            "original_vocab_size 9",
        ),
        ({"affine_map": {"version": 2, "params": {}}}, "version 2"),
        ({"affine_map": {"version": 1, "params": {"^w$": {}}}}, "missing required field `ranks`"),
        ({"tp_replicated_parameter_patterns": [], "autotp_unsupported_parameter_patterns": {"w": "odd"}}, "odd"),
        ({"parameter_with_sub_params": [{"patterns": ["w"], "shape": (2, 3)}]}, "partition_dim"),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": ((4,), 3), "partition_dim": 0}],
             "universal_checkpoint_version": 0.4},
            "sub_param_shard_widths",
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": (3, 2, 2), "partition_dim": 1}]},
            "a view",
        ),
        ({"parameter_with_sub_params": [{"patterns": ["w"], "shape": (3, 3), "partition_dim": 0}]}, "shard_widths"),
    ],
)  # fmt: skip
def test_what_is_not_told_is_refused_by_name(tmp_path: Path, info: dict[str, Any], match: str) -> None:
    refused(tmp_path, HALVES, info, match)


def test_ranks_that_hold_other_shapes_than_is_told_are_refused(tmp_path: Path) -> None:
    other = [numbered(2, 3), numbered(2, 4)]
    refused(tmp_path, other, {"tp_replicated_parameter_patterns": ["w"]}, "replicated")
    refused(tmp_path, other, {"tp_replicated_parameter_patterns": []}, "cut along dimension 0")
    refused(tmp_path, [numbered(2), numbered(2)], {"parameter_with_row_parallelism_patterns": ["w"]}, "dimension 1")


def test_counts_of_older_versions_mean_even_parts(tmp_path: Path) -> None:
    whole = numbered(12, 2)
    subs = [sub.split(2) for sub in whole.split(4)]
    held = [{"w": torch.cat([sub[rank] for sub in subs])} for rank in range(2)]
    info = {"parameter_with_sub_params": [{"patterns": ["w"], "shape": (3, -1), "partition_dim": 0}]}
    folder = Crafted(held, 2, 1, info).write(tmp_path / "counts")
    assert torch.equal(torch.from_numpy(assembled(folder, listing_of(folder), "model.w")), whole)


def test_a_huge_count_of_sub_parameters_takes_no_memory(tmp_path: Path) -> None:
    """Every count divides a parameter without elements."""
    info = {"parameter_with_sub_params": [{"patterns": ["w"], "shape": (1 << 40, 3), "partition_dim": 0}]}
    refused(tmp_path, [torch.zeros(0, 3)] * 2, info, "1099511627776 sub-parameters; at most 4096 are read")


@pytest.mark.parametrize("fault", ["shape", "source", "dest", "locations", "pieces", "ranks", "shard_shape", "strides"])
def test_maps_that_do_not_fit_are_refused(tmp_path: Path, fault: str) -> None:
    stated = map_of(numbered(4, 3), HALVES, [[2, 2]], 0)
    piece = stated["ranks"][1]["pieces"][0]
    if fault == "ranks":
        stated["ranks"][2] = stated["ranks"][1]
    elif fault == "pieces":
        stated["ranks"][1]["pieces"] = []
    elif fault == "shard_shape":
        stated["ranks"][1]["shard_shape"] = [3, 2]
    elif fault == "strides":
        piece["source"] = [6, [1, 2]]
    else:
        piece[fault] = {"shape": [3, 3], "source": [7, [3, 1]], "dest": [-1, [3, 1]], "locations": [0]}[fault]
    refused(tmp_path, HALVES, {"affine_map": {"version": 1, "params": {"^w$": stated}}}, "affine_map")


def test_a_block_kept_multiplied_is_left_out(tmp_path: Path) -> None:
    stated = map_of(numbered(4, 3), HALVES, [[2, 2]], 0)
    stated["ranks"][1]["pieces"][0]["scale"] = 0.5
    held = [{"w": each, "v": numbered(1)} for each in HALVES]
    info = {"affine_map": {"version": 1, "params": {"^w$": stated}}, "tp_replicated_parameter_patterns": ["^v$"]}
    listing = listing_of(Crafted(held, 1, 1, info).write(tmp_path / "scaled"))
    assert set(listing.tensors) == {"model.v", *(f"optimizer.state.v.{key}" for key in ("master", "exp_avg", "step"))}
    remarks = [remark for remark in listing.remarks if "w and its optimizer state are left out" in remark]
    assert [remark for remark in remarks if "0.5" in remark]
