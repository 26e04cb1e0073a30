"""`holdfast export`, run where there is no torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.numpy

import holdfast
from tests.export.sources import trained_state
from tests.unit.cli.running import on_terminal, separately


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "saved"
    holdfast.save(path, trained_state(), process_group=False)
    return path


def test_it_needs_no_torch_and_says_what_it_did(tmp_path: Path, saved: Path) -> None:
    ended = separately(
        "export", saved, tmp_path / "out", "--to", "safetensors", "--dtype", "float16", "--with-optimizer", "--json"
    )
    assert (ended.status, ended.err) == (0, "")
    document = ended.json()
    files = {each["name"]: each["bytes"] for each in document["files"]}
    assert files == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert set(files) == {"model.safetensors", "optimizer.safetensors"}
    assert document["bytes"] == sum(files.values())
    assert document["seconds"] > 0 and not document["resumed_bytes"] and not document["begun_anew"]
    assert document["read_bytes"] > document["bytes"] / 2
    assert document["url"] == str(tmp_path / "out") and document["format"] == "safetensors"
    assert safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")["0.weight"].dtype == "float16"


def test_workers_write_shards(tmp_path: Path, saved: Path) -> None:
    ended = separately(
        "export", saved, tmp_path / "out", "--to", "safetensors", "--workers", "2", "--memory", "128MiB",
        "--shard-size", "40KB",
    )  # fmt: skip
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("exported ")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_a_terminal_shows_a_bar_and_then_what_was_done(tmp_path: Path, saved: Path) -> None:
    shown = on_terminal("export", saved, tmp_path / "out", "--to", "safetensors").out
    assert "exporting" in shown
    assert "in 1 file to" in shown.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "onnx"), "to='onnx'; expected one of"),
        (("--to", "safetensors", "--memory", "much"), "--memory 'much': expected a size such as"),
        (("--to", "safetensors", "--shard-size", "0GB"), "--shard-size '0GB': expected a size"),
        (("--to", "safetensors", "--dtype", "float8"), "dtype='float8'; expected one of float32"),
        (("--to", "safetensors", "--workers", "0"), "workers=0; expected a positive"),
    ],
)
def test_a_wrong_option_is_one_line_and_writes_nothing(
    tmp_path: Path, saved: Path, options: tuple[str, ...], said: str
) -> None:
    ended = separately("export", saved, tmp_path / "out", *options)
    assert ended.status == 2
    assert said in ended.err and ended.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_root_of_a_run_stands_for_its_newest_step(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        manager.save(7, trained_state()).wait()
    ended = separately("export", tmp_path / "run", tmp_path / "out", "--to", "safetensors")
    assert ended.status == 0 and (tmp_path / "out").is_dir()
    assert "step 7, the newest valid one" in ended.err
