"""A store of the user's own is taken where a path is: the one of docs/stores.md passes the suite and holds runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import api, policies
from holdfast.errors import InvalidError
from holdfast.testing.store import StoreSuite

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stores.md"
LINES_MAX = 60

SECTION = PAGE.read_text().split("\n## Your own store\n")[1].split("\n## ")[0]
STORE, *_ = (code for code in re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL))
NAMES: dict[str, Any] = {"__name__": "own_store"}
exec(compile(STORE, str(PAGE), "exec"), NAMES)
SqliteStore: type[Any] = NAMES["SqliteStore"]


def test_the_store_of_the_page_is_short() -> None:
    assert len([line for line in STORE.splitlines() if line.strip()]) <= LINES_MAX


class TestSqliteStore(StoreSuite):
    """The suite, as the page shows it."""

    is_asked_for_cached = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[holdfast.Store]:
        # In memory where the machine can: SQLite waits for the disk at each of the 5,000 statements.
        shared = Path("/dev/shm")
        with TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as folder:
            yield SqliteStore(Path(folder) / "objects.db")


def state_of(seed: int) -> dict[str, object]:
    """Return a model and its optimizer after one step."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": holdfast.RngState()}


def weight_of(state: dict[str, object]) -> torch.Tensor:
    model = state["model"]
    assert isinstance(model, torch.nn.Linear)
    return model.weight.detach().clone()


def test_a_run_is_saved_and_goes_on_under_another_manager(tmp_path: Path) -> None:
    state = state_of(0)
    with holdfast.CheckpointManager(SqliteStore(tmp_path / "run.db"), every=10, keep_last=2) as manager:
        for step in range(10, 60, 10):
            manager.maybe_save(step, state)
        saved = weight_of(state)
    other = state_of(1)
    store = SqliteStore(tmp_path / "run.db")
    with holdfast.CheckpointManager(store, every=10, keep_last=2) as manager:
        assert manager.load(other) == 50
        manager.maybe_save(60, other)
    assert torch.equal(weight_of(other), saved)
    steps = {record.step for record in api.list_steps(store).steps}
    assert {50, 60} <= steps and 10 not in steps


def test_every_verb_takes_the_store(tmp_path: Path) -> None:
    state, root = state_of(0), SqliteStore(tmp_path / "run.db")
    with holdfast.CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.save(step, state).wait()
    assert holdfast.load(root, state, step=2).step == 2
    assert holdfast.read(root, step=3)["model"]["weight"].shape == (64, 64)
    api.tag(root, 1, "first")
    assert holdfast.load(root, state, step="first").step == 1
    assert api.trace(root).saves == 3
    checkpoint = holdfast.open_checkpoint(root, step=3)
    assert not list(checkpoint.verify())
    assert np.array_equal(checkpoint.read("model.weight"), weight_of(state).numpy())
    copy, lone = SqliteStore(tmp_path / "copy.db"), tmp_path / "lone"
    assert api.copy_run(root, copy).steps == 3
    api.copy_checkpoint(root, lone, step=3)
    assert holdfast.diff(checkpoint, lone).equal
    api.export(root, tmp_path / "out", to="safetensors", step=3)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    exported = SqliteStore(tmp_path / "exported.db")
    api.export(root, exported, to="holdfast", step=3)
    assert holdfast.diff(exported, lone).equal
    holdfast.import_checkpoint(lone, copy, step=4, copy=True)
    assert api.remove_steps(root, [2], grace_seconds=0).steps == ("2",)
    assert api.collect(root, keep=policies.LatestN(1), grace_seconds=0).steps == (1,)
    assert [record.step for record in api.list_steps(root).steps] == [3]
    copy.put("step-000000000003/manifest.json", b"overwritten")
    assert [(found.step, found.outcome) for found in api.repair(copy).steps] == [(3, "repaired")]


def test_another_process_is_refused(tmp_path: Path) -> None:
    root = SqliteStore(tmp_path / "run.db")
    with holdfast.CheckpointManager(root) as manager:
        manager.save(1, state_of(0)).wait()
    with pytest.raises(InvalidError, match=r"sqlite://.*path of its own on a file or object store only"):
        api.export(root, tmp_path / "out", to="safetensors", step=1, workers=2)


def without(*names: str) -> type[holdfast.Store]:
    """Return the class of the page less some methods."""
    kept = {name: value for name, value in vars(SqliteStore).items() if name not in names}
    return type("LeanStore", (holdfast.Store,), kept)


@pytest.mark.parametrize("method", ("put", "put_if_absent", "size", "get", "read_into", "list", "delete", "move"))
def test_a_missing_method_is_named_with_the_suite(tmp_path: Path, method: str) -> None:
    store = without(method)(tmp_path / "run.db")  # type: ignore[call-arg]
    with pytest.raises(
        InvalidError, match=rf"LeanStore: has no method {method};.*holdfast\.testing\.store\.StoreSuite"
    ):
        holdfast.save(store, {"x": 1})
    assert not store._run("SELECT * FROM objects")[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("traits", "named"),
    (
        ({"read_alignment": 3}, "traits.read_alignment=3; expected a power of two"),
        ({"read_alignment": 8192}, "traits.read_alignment=8192; expected a power of two up to 4096"),
        ({"read_alignment": []}, "traits.read_alignment=[]; expected a power of two"),
        ({"object_bytes_max": 4096}, "traits.object_bytes_max=4096; expected at least 1048576"),
        ({"object_bytes_max": "512"}, "traits.object_bytes_max=512; expected at least 1048576"),
        ({"page_entries": 1.5}, "traits.page_entries=1.5; expected at least 1"),
        ({"maps_files": 1}, "traits.maps_files=1; expected True or False"),
        ({"failed_calls_are_over": None}, "traits.failed_calls_are_over=None; expected True or False"),
        ({"page_entries": 0}, "traits.page_entries=0; expected at least 1"),
        ({"maps_files": True}, "traits.maps_files=True promises a method mapped"),
        ({"appears_whole": False}, "traits.appears_whole=False promises a method upload"),
        ({"checks_exclusive_creates": True}, "promises a method require_exclusive_creates"),
    ),
)
def test_an_impossible_trait_is_named_with_the_suite(tmp_path: Path, traits: dict[str, Any], named: str) -> None:
    store = SqliteStore(tmp_path / "run.db")
    store.traits = holdfast.StoreTraits(**traits)
    with pytest.raises(InvalidError, match=f"SqliteStore: .*{re.escape(named)}.*StoreSuite"):
        holdfast.CheckpointManager(store)


@pytest.mark.parametrize("url", ("", "run.db", "://run", "s3://bucket", "memory://run", "file:///run", "x://a\n", None))
def test_a_store_has_a_url(tmp_path: Path, url: Any) -> None:
    store = SqliteStore(tmp_path / "run.db")
    store.url = url
    with pytest.raises(InvalidError, match=r"SqliteStore: url=.*expected the place as a URL with a scheme of its own"):
        holdfast.load(store, {"x": 1})


def test_a_name_that_is_no_method_is_missing(tmp_path: Path) -> None:
    store = type("Odd", (SqliteStore,), {"put": None})(tmp_path / "run.db")
    with pytest.raises(InvalidError, match="Odd: has no method put;"):
        holdfast.save(store, {"x": 1})


def test_a_store_that_ignores_on_range_loads_nothing_in_silence(tmp_path: Path) -> None:
    class Ignoring(SqliteStore):  # type: ignore[misc, valid-type]
        def read_into(self, key: str, ranges: Any, buffers: Any, on_range: Any = None) -> None:
            super().read_into(key, ranges, buffers)

    holdfast.save(SqliteStore(tmp_path / "run.db"), {"x": torch.ones(5000)})
    store = Ignoring(tmp_path / "run.db")
    for read in (lambda: holdfast.load(store, {"x": torch.zeros(5000)}), lambda: api.open_checkpoint(store).read("x")):
        with pytest.raises(InvalidError, match=r"read_into gave 0 of \d+ ranges to on_range; .*StoreSuite"):
            read()


def test_an_object_of_another_class_is_no_store() -> None:
    with pytest.raises(InvalidError, match=r"path is object; expected a folder as str or Path, or a holdfast[.]Store"):
        holdfast.open_checkpoint(object())  # type: ignore[arg-type]


def test_one_checkpoint_is_saved_overwritten_and_loaded(tmp_path: Path) -> None:
    store, state = SqliteStore(tmp_path / "best.db"), state_of(0)
    holdfast.save(store, state)
    with pytest.raises(holdfast.ConflictError, match=r"sqlite://"):
        holdfast.save(store, state)
    other = state_of(1)
    holdfast.async_save(store, other, overwrite=True).wait()
    holdfast.load(store, state)
    assert torch.equal(weight_of(state), weight_of(other))
