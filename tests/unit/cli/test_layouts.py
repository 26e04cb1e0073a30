"""Layouts on the command line, against checkpoints that Megatron-core wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import holdfast as package
from tests.unit.cli.running import holdfast, separately
from tests.unit.test_layouts import CASES, FIXTURES, megatron

case = pytest.mark.parametrize("name", CASES)

KEYS_OF_LAYER_1 = """\
layout megatron-hf-llama …
model.model.layers.1.self_attn.k_proj.weight   float32 [8, 16]   rule qkv
  rows 0-4   decoder.layers.1.self_attention.linear_qkv.weight [32, 16]  rows 8-12
  rows 4-8   …                                                           rows 24-28
skipped: none · padding not read: none · sizes: heads 4 (args.num_attention_heads), groups 2 (args.num_query_groups), …
layout megatron-dist …
decoder.layers.1.self_attention.linear_qkv.weight   float32 [32, 16]   rule layers
  all   decoder.layers.self_attention.linear_qkv.weight [2, 32, 16]  row 1
skipped: none · padding not read: none · sizes: none
"""

RULES = """\
layout = 1
about = "for this test"
[sizes]
rows = [{ given = "rows of the first half" }]
[[rule]]
name = "halves"
from = "w"
sections = { dim = 0, parts = [{ length = "rows", to = "a" }, { length = 2, transpose = true, to = "b" }] }
[[rule]]
name = "mixed"
from = "m"
pad = { dim = 0, content = 4 }
interleave = { dim = 0, block = 4, by = 2 }
to = "n"
[[rule]]
from = "old"
skip = "not needed"
"""

SECOND_RULES = """\
layout = 1
[sizes]
rows = [{ given = "as in the first layout" }]
other = [{ given = "rows to leave out" }]
[[rule]]
from = "a"
pad = { dim = 0, content = "rows - other" }
to = "c"
[[rule]]
from = "{rest:*}"
to = "{rest}"
"""


def stack(name: str) -> list[str]:
    return ["--layout", "megatron-dist", "--layout", CASES[name]]


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, list[str]]:
    """A checkpoint, and the options of a layout in a file."""
    state = {"w": torch.arange(15.0).reshape(5, 3), "m": torch.arange(6.0), "old": torch.zeros(2)}
    package.save(tmp_path / "own", state, process_group=False)
    rules = tmp_path / "halves.toml"
    rules.write_text(RULES)
    return tmp_path / "own", ["--layout", str(rules), "--size", "rows=3"]


@case
def test_diff_of_megatron_through_layouts_with_the_files_of_hugging_face(name: str) -> None:
    compared = holdfast("diff", megatron(name), FIXTURES / name / "hf", *stack(name), "--tensors", "model.*", "--json")
    document = compared.json()
    assert (compared.status, compared.err) == (0, "")
    assert len(document["tensors"]) == len(load_file(FIXTURES / name / "hf" / "model.safetensors"))


@case
def test_export_and_import_through_layouts(name: str, tmp_path: Path) -> None:
    assert holdfast("export", megatron(name), tmp_path / "hf", "--to", "safetensors", *stack(name)).status == 0
    wanted, made = (load_file(folder / "model.safetensors") for folder in (FIXTURES / name / "hf", tmp_path / "hf"))
    assert made.keys() == wanted.keys()
    assert all(np.array_equal(made[each], wanted[each]) for each in wanted)
    ended = separately("import", megatron(name), tmp_path / "run", "--copy", *stack(name))
    assert (ended.status, ended.err) == (0, "")
    assert holdfast("diff", tmp_path / "run", FIXTURES / name / "hf", "--tensors", "model.*").status == 0


@case
def test_the_way_back_reverses_the_order_and_each_layout(name: str) -> None:
    back = holdfast("inspect", FIXTURES / name / "hf", *stack(name), "--reversed", "--json").json()
    ahead = holdfast("inspect", megatron(name), "--json").json()
    shapes = {each: tensor["shape"] for each, tensor in ahead["tensors"].items() if not each.startswith("chained_")}
    padded = {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert back["tensors"].keys() == shapes.keys()
    for each, tensor in back["tensors"].items():
        assert tensor["shape"] == ([37, 16] if each in padded else shapes[each])


def test_inspect_shows_the_tensors_that_layouts_make() -> None:
    shown = holdfast("inspect", megatron("dense_tp2_pp2"), *stack("dense_tp2_pp2"))
    assert shown.status == 0
    assert "seen by    layout megatron-dist " in shown.out
    assert "model.model.layers.1.self_attn.k_proj.weight" in shown.out


def matches(shown: str, expected: str) -> bool:
    """Return whether each line is as expected, up to an ellipsis at its end."""
    pairs = zip(shown.splitlines(), expected.splitlines(), strict=True)
    return all(line == want or (want[-1] == "…" and line.startswith(want[:-1])) for line, want in pairs)


def test_explain_shows_boxes_rules_and_sizes_down_to_the_stored_tensors() -> None:
    options = (*stack("dense_tp2_pp2"), "--explain", "--tensors", "*.1.self_attn.k_proj.*")
    shown = separately("inspect", megatron("dense_tp2_pp2"), *options)
    assert (shown.status, shown.err) == (0, "")
    assert matches(shown.out, KEYS_OF_LAYER_1), shown.out


def test_explain_counts_padding_of_weights_and_optimizer_state() -> None:
    shown = holdfast("inspect", megatron("moe_ep2"), *stack("moe_ep2"), "--explain")
    assert shown.status == 0
    # Embedding and output: the weight, the master and two moments of each have 3 rows of 16.
    assert f"padding not read: 8 tensors, {8 * 3 * 16} elements" in shown.out


def test_explain_as_json_has_terms_padding_and_sizes() -> None:
    options = (*stack("dense_tp2_pp2"), "--explain", "--tensors", "model.model.embed*", "--json")
    document = holdfast("inspect", megatron("dense_tp2_pp2"), *options).json()
    (llama, dist) = document["layouts"]
    assert document["step"] == 100
    assert (llama["layout"], llama["reversed"], dist["layout"]) == ("megatron-hf-llama", False, "megatron-dist")
    assert llama["unread"] == {"embedding.word_embeddings.weight": 3 * 16}
    assert llama["sizes"]["vocab"] == {"number": 37, "from": "args.vocab_size"}
    embedding = llama["tensors"]["model.model.embed_tokens.weight"]
    assert (embedding["shape"], embedding["rule"]) == ([37, 16], "embedding")
    (term,) = embedding["terms"]
    assert term["source"] == "embedding.word_embeddings.weight"
    assert [along["count"] for along in term["along"]] == [37, 16]
    assert dist["tensors"]["embedding.word_embeddings.weight"]["terms"] == []


def test_explain_of_a_file_of_rules_reads_no_tensor(own: tuple[Path, list[str]]) -> None:
    path, options = own
    for pack in path.glob("**/*.safetensors"):
        pack.write_bytes(bytes(pack.stat().st_size))
    shown = holdfast("inspect", path, *options, "--explain")
    assert (shown.status, shown.err) == (0, "")
    lines = shown.out.splitlines()[1:]
    assert lines == [
        "a   float32 [3, 3]   rule halves",
        "  all   w [5, 3]  rows 0-3",
        "b   float32 [3, 2]   rule halves",
        "  all   w [5, 3]  rows 3-5, dimensions [1, 0]",
        "n   float32 [4]   rule mixed",
        "  rows 0-2   m [6]  rows 0-3 by 2",
        "  rows 2-4   …      rows 1-4 by 2",
        "skipped: old (not needed) · padding not read: 1 tensor, 2 elements · sizes: rows 3 (--size rows)",
    ]


@pytest.mark.parametrize("verb", ("inspect", "verify"))
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--size", "heads"], "expected NAME=N"),
        (["--size", "=3"], "expected NAME=N"),
        (["--size", "heads=-3"], "expected NAME=N"),
        (["--size", "depth=3"], "--size depth: no layout has such a size; expected one of ffn, groups"),
        (["--size", "heads=3"], "3 from --size heads, and 4 from args.num_attention_heads"),
        (["--layout", "llama"], "no shipped layout and no readable file"),
        (["--reversed"], "no line of follow matches"),
    ],
)
def test_wrong_options_are_refused_in_one_line(verb: str, options: list[str], why: str) -> None:
    refused = holdfast(verb, megatron("dense_tp2_pp2"), *stack("dense_tp2_pp2"), *options)
    assert (refused.status, refused.out) == (2, "")
    assert why in refused.err
    assert refused.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--size", "heads=4"], "--size without --layout"),
        (["--reversed"], "--reversed without --layout"),
        (["--explain"], "--explain without --layout"),
        (["--plan", "dp=2", *stack("dense_tp2_pp2")], "--plan with --layout"),
    ],
)
def test_options_that_need_or_exclude_a_layout(options: list[str], why: str) -> None:
    refused = holdfast("inspect", megatron("dense_tp2_pp2"), *options)
    assert refused.status == 2
    assert why in refused.err


def test_a_size_goes_to_each_layout_that_declares_the_size(own: tuple[Path, list[str]]) -> None:
    path, options = own
    second = path.parent / "second.toml"
    second.write_text(SECOND_RULES)
    both = ("--layout", second, "--size", "other=1", "--json")
    document = holdfast("inspect", path, *options, *both).json()
    assert document["tensors"]["c"]["shape"] == [2, 3]


def test_verify_with_a_layout_checks_stored_bytes_and_that_the_layout_fits(own: tuple[Path, list[str]]) -> None:
    path, options = own
    plain, viewed = holdfast("verify", path), holdfast("verify", path, *options)
    assert (viewed.status, viewed.out) == (0, plain.out)
    unfit = holdfast("verify", path, *options[:2], "--size", "rows=4")
    assert unfit.status == 2 and "rule halves" in unfit.err
    pack = next(path.glob("**/*.safetensors"))
    pack.write_bytes(pack.read_bytes()[:-8] + bytes([1] * 8))
    assert holdfast("verify", path, *options).status == 1


def test_layouts_lists_the_shipped_ones() -> None:
    shown, document = separately("layouts"), holdfast("layouts", "--json").json()
    assert (shown.status, shown.err) == (0, "")
    assert list(document) == list(package.api.shipped())
    for name, layout in document.items():
        assert layout == {"about": package.Layout(name).file.about, "rules": package.api.shipped()[name]}
        assert name in shown.out and layout["about"] in shown.out


def test_layouts_prints_the_rules_of_one() -> None:
    assert holdfast("layouts", "megatron-dist").out == package.api.shipped()["megatron-dist"]
    assert list(holdfast("layouts", "megatron-dist", "--json").json()) == ["megatron-dist"]
    refused = holdfast("layouts", "llama")
    assert refused.status == 2 and "expected one of hf-experts" in refused.err
