"""Each layout to each: real gloo processes train, save, build anew, load and step on; whole tensors are compared.

What was found is the table in `docs/layouts.md`. `HOLDFAST_WRITE_LAYOUTS=1` writes it; otherwise it must say the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.matrix import cases
from tests.distributed.matrix.layouts import KINDS
from tests.support.forked_processes import REPOSITORY
from tests.support.gloo_worlds import Case, Launch

TABLE = REPOSITORY / "docs" / "layouts.md"
DEADLINE_SECONDS = 840.0

_DRAWN_BY = os.environ.get("COMPRESSED_LAYOUTS", str(os.getpid()))
SEED = None if _DRAWN_BY == "all" else int(_DRAWN_BY)
"""Which pairs of layouts are loaded from a compressed checkpoint too: one in ten, all of them in `make campaign`."""

Digests = dict[str, str]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
"""The first test to ask for the matrix waits for all of it."""


def _joined(values: Iterable[Mapping[str, str]], what: str) -> Digests:
    """Return what all ranks say of whole tensors; those that say something of one tensor say the same."""
    found: Digests = {}
    for rank, digests in enumerate(values):
        for name, said in digests.items():
            assert found.setdefault(name, said) == said, f"{what}: rank {rank} says otherwise of {name}"
    return found


@dataclass(frozen=True)
class Matrix:
    saved: Mapping[str, Digests]
    """Digests of what each layout held when it saved."""

    stored_bytes: Mapping[str, int]
    """Bytes of tensors that all ranks of a layout wrote."""

    loaded: Mapping[tuple[str, str], Digests]
    """Digests after loading: (saved on, loaded on)."""

    unexpected: Mapping[tuple[str, str], list[str]]
    """Names in the checkpoint that no rank's state has."""

    compressed: Mapping[tuple[str, str], Digests]
    """Digests after loading what was saved compressed, of the pairs that were drawn."""


Found = dict[str, list[dict[str, object]]]
"""What each rank returned, by layout."""


def _kinds_of(ranks: int) -> list[str]:
    return [kind for kind, each in KINDS.items() if each.ranks == ranks]


def _launch(ranks: int, root: Path) -> Launch:
    """Start a world that saves all layouts of so many ranks, and loads all layouts there are: each at its turn."""
    module = "tests.distributed.matrix.cases"
    sequence: list[Case] = []
    for function in ("save", "load"):
        turn = str(root / f"{function}-{ranks}.turn")
        sequence.append(Case(f"{module}:await_turn", {"turn": turn}, f"{function}-turn"))
        sequence += [
            Case(
                f"{module}:{function}",
                {"kind": kind, "root": str(root), **({"seed": SEED} if function == "load" else {})},
                f"{function}-{kind}",
            )
            for kind in _kinds_of(ranks)
        ]
    return Launch(ranks, sequence, root / f"world-{ranks}", deadline_seconds=DEADLINE_SECONDS)


def _run(root: Path) -> tuple[Found, Found]:
    """Save every layout, then load each on each: one world for each number of ranks, one after the other.

    What a layout has compiled and looked up in torch when it saves is there when it loads.
    """
    saved: Found = {kind: [cases.save(None, kind, str(root))] for kind in _kinds_of(1)}
    loaded: Found = {}
    with ExitStack() as stack:
        sizes = sorted({each.ranks for each in KINDS.values()} - {1})
        worlds = {ranks: stack.enter_context(_launch(ranks, root)) for ranks in sizes}
        for function in ("save", "load"):
            for ranks, world in worlds.items():
                (root / f"{function}-{ranks}.turn").touch()
                for rank in range(ranks):
                    world.wait_for(f"{function}-{_kinds_of(ranks)[-1]}.{rank}.json")
        for ranks, world in worlds.items():
            results = world.join()
            for kind in _kinds_of(ranks):
                for function, found in (("save", saved), ("load", loaded)):
                    values = results.values(f"{function}-{kind}")
                    found[kind] = [each for each in values if isinstance(each, dict)]
    loaded |= {kind: [cases.load(None, kind, str(root), SEED)] for kind in _kinds_of(1)}
    return saved, loaded


def _digests(value: object) -> Digests:
    assert isinstance(value, dict)
    return value


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    root = tmp_path_factory.mktemp("matrix")
    saved, loaded = _run(root)
    pairs = [(source, kind) for source in KINDS for kind in KINDS]
    return Matrix(
        {kind: _joined((_digests(each["digests"]) for each in ranks), kind) for kind, ranks in saved.items()},
        {kind: sum(int(str(each["bytes"])) for each in ranks) for kind, ranks in saved.items()},
        {
            (source, kind): _joined(
                (_digests(_digests(rank[source])["digests"]) for rank in loaded[kind]), f"{source} on {kind}"
            )
            for source, kind in pairs
        },
        {
            (source, kind): [str(name) for rank in loaded[kind] for name in _digests(rank[source])["unexpected"]]
            for source, kind in pairs
        },
        {
            (source, kind): _joined(
                (_digests(_digests(rank[source])["compressed"]) for rank in loaded[kind]),
                f"{source} compressed on {kind}, seed {SEED}",
            )
            for source, kind in pairs
            if cases.is_drawn(source, kind, SEED)
        },
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_holds_the_same_names(matrix: Matrix, kind: str) -> None:
    assert matrix.saved[kind].keys() == matrix.saved["one"].keys()
    assert {"experts.weight/exp_avg", "blocks.1.gain/step", "head.bias/group", "seen"} <= matrix.saved[kind].keys()


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_stores_every_byte_once(matrix: Matrix, kind: str) -> None:
    assert matrix.stored_bytes[kind] == matrix.stored_bytes["one"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_each_to_each(matrix: Matrix, source: str, kind: str) -> None:
    assert matrix.loaded[source, kind] == matrix.saved[source]


def test_a_compressed_checkpoint_holds_the_same(matrix: Matrix) -> None:
    """All of them in `make campaign`."""
    assert len(matrix.compressed) >= len(KINDS) ** 2 // 40
    for (source, kind), digests in matrix.compressed.items():
        assert digests == matrix.saved[source], f"{source} on {kind}: COMPRESSED_LAYOUTS={SEED} draws it again"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_checkpoint_is_unexpected_anywhere(matrix: Matrix, kind: str) -> None:
    assert {source: matrix.unexpected[source, kind] for source in KINDS} == {source: [] for source in KINDS}


def test_training_leaves_layouts_with_different_numbers(matrix: Matrix) -> None:
    """Or a load that did nothing could pass."""
    moments = {kind: digests["experts.weight/exp_avg"] for kind, digests in matrix.saved.items()}
    assert len(set(moments.values())) > 5


def test_the_table_says_what_was_found(matrix: Matrix) -> None:
    found = _table(matrix)
    if os.environ.get("HOLDFAST_WRITE_LAYOUTS"):
        TABLE.write_text(found)
    assert TABLE.read_text() == found, "run this file with HOLDFAST_WRITE_LAYOUTS=1 and look at what changed"


def _table(matrix: Matrix) -> str:
    titles = [each.title for each in KINDS.values()]
    lines = ["| saved on ↓ · loaded on → | " + " | ".join(titles) + " |", "|-|" + "-|" * len(titles)]
    for source, row in KINDS.items():
        cells = []
        for kind in KINDS:
            same = matrix.loaded[source, kind] == matrix.saved[source] and not matrix.unexpected[source, kind]
            cells.append("✓" if same else "✗")
        lines.append(f"| {row.title} | " + " | ".join(cells) + " |")
    tensors = sum(not name.endswith("/group") for name in matrix.saved["one"])
    return TEXT.format(table="\n".join(lines), tensors=tensors, stored_bytes=matrix.stored_bytes["one"])


TEXT = """\
# Layouts

Holdfast loads every layout of this table onto every other, bit for bit. `tests/distributed/matrix/test_matrix.py`
writes this page from its results if `HOLDFAST_WRITE_LAYOUTS=1` is set. Otherwise the test fails if its results differ
from this page.

Real gloo processes train one model for two steps of AdamW with two parameter groups, and save it. They build the
model again on another layout with another seed, load the checkpoint, and take one more step.

✓ means that a load restored the saved content exactly. The test compares digests of the whole tensors: {tensors}
tensors ({stored_bytes} bytes) of parameters, buffers, moments and step counts. It also compares the hyperparameters
of each parameter. Half of the loads fill an optimizer that has already stepped, and half fill one that has not.

{table}

The layouts:

- **FSDP1**: `FullyShardedDataParallel` with `use_orig_params=True`, each block wrapped by itself. Each parameter is
  one run of this rank's flat shard. Holdfast stores and loads that run in place. No collective runs, and no padding
  is stored. Holdfast refuses `use_orig_params=False`, and FSDP1 over tensor parallelism. The error names the cause:
  use `fully_shard`.
- **FSDP2** and **HSDP**: `fully_shard` on every block and the root, on one-dimensional and (replicate, shard) meshes.
- **TP**: `parallelize_module` on embedding, feed-forward and head. All other parameters are plain and equal on all
  ranks.
- **FSDP2 × TP**: strided shards if both split the same dimension. Parameters outside tensor parallelism are
  replicated DTensors on its mesh, as with `SequenceParallel`.
- **partial plan**: the tensor-parallel plan names some modules only, as plans of Transformers do. `fully_shard` over
  `mesh["dp"]` leaves every other module on one mesh for each tensor-parallel rank. These meshes are *siblings*:
  disjoint, of equal shape, with equal name, dtype, shape and placements. Siblings are replicas: a save stores every
  byte once. Meshes of any other kind under one name are refused before the first byte. So are siblings whose samples
  differ, as plain tensors are: 64 KiB of each tensor at each save, every time at other places. The first save of a job
  compares tensors of up to 16 MiB whole. A difference in a few rows of a larger tensor may pass some saves before it
  is found; `Settings(compare_replicas=True)` compares all bytes at every save.
- **DP by hand**: tensor or expert parallelism on `mesh["tp"]` or `mesh["ep"]`, and gradients averaged over the other
  dimension by the training loop. The split modules are on siblings.
- **SP**: the sequence is split, and parameters are replicated DTensors. Context parallelism treats parameters the
  same way.
- **PP**: each rank keeps the modules of its stages under their own names. A rank has one or several stages.
- **EP**: experts and their optimizer state are `Shard(0)` on a mesh of their own. All other parameters are under
  FSDP2. Every rank of the mesh must have the state: where an expert got no token, give it a gradient of zeros before
  the first `optimizer.step()`. Otherwise the save is refused, and names the ranks.
- **flat ranges**: parameters are concatenated and cut into equal runs that split rows, as in ZeRO. The caller
  declares them with `holdfast.Sharded`.
"""
