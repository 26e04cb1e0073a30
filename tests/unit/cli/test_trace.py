"""`holdfast trace -o`: a file is replaced whole, and nothing that is not one."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    holdfast.save(tmp_path / "checkpoint", {"w": torch.ones(3)})
    return tmp_path / "checkpoint"


def test_what_is_no_regular_file_is_written_into(checkpoint: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()), daemon=True)
    reader.start()
    assert CliRunner().invoke(app, ["trace", str(checkpoint), "-o", str(pipe)]).exit_code == 0
    assert pipe.is_fifo()
    reader.join(30)
    assert json.loads(texts[0])["traceEvents"]


def test_what_a_link_names_is_replaced_and_not_the_link(checkpoint: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    target.write_text("old")
    link.symlink_to(target)
    assert CliRunner().invoke(app, ["trace", str(checkpoint), "-o", str(link)]).exit_code == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["traceEvents"]


@pytest.mark.parametrize("output", [".", "..", "/", ""])
def test_a_path_without_a_name_is_refused(checkpoint: Path, output: str) -> None:
    result = CliRunner().invoke(app, ["trace", str(checkpoint), "-o", output])
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)
