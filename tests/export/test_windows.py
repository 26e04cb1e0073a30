"""Windows through a format of the tests' own: elements that windows cut, gaps, literals and checksums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face import wiring
from holdfast.base.types.export import ExportContent, ExportOptions
from holdfast.offline.export.request import ExportRequest
from holdfast.settings import MIB, PAGE_BYTES
from tests.export.odd import OddWriter, content_of
from tests.export.sources import SMALL, export_by, noise, saved_by_ranks

WHOLE = {
    "flat.wide": noise((61, 103), torch.complex128, 1),
    "flat.narrow": noise((5000, 3), torch.int16, 2),
    "float": torch.randn(77, 331),
    "deep": noise((9, 50, 13), torch.float64, 4),
    "byte": noise((3, 5001), torch.uint8, 5),
}


def require_odd(folder: Path, source: Path, options: ExportOptions) -> None:
    checkpoint = wiring.checkpoint_at(source, SMALL)
    content = ExportContent(checkpoint.index.tensors, checkpoint.aliases, checkpoint.manifest.tree)
    tensors = {f"model.{name}": each for name, each in WHOLE.items()}
    for file in OddWriter().files(content, options):
        assert (folder / file.name).read_bytes() == content_of(file, tensors)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("pages", [1, 3, 64])
def test_what_windows_cut_is_put_together_again(tmp_path: Path, pages: int, dtype: str | None) -> None:
    source = saved_by_ranks(tmp_path / "run", WHOLE, 3)
    options = ExportOptions(dtype=dtype)
    request = ExportRequest(memory_bytes=64 * MIB, workers=1, window_bytes_max=pages * PAGE_BYTES)
    export_by(OddWriter(), source, tmp_path / "out", request, options)
    require_odd(tmp_path / "out", source, options)


def test_shares_carried_out_apart_make_the_same(tmp_path: Path) -> None:
    source = saved_by_ranks(tmp_path / "run", WHOLE, 2)
    request = ExportRequest(memory_bytes=192 * MIB, workers=3, window_bytes_max=PAGE_BYTES)
    export_by(OddWriter(), source, tmp_path / "out", request)
    require_odd(tmp_path / "out", source, ExportOptions())


def test_a_destination_may_be_one_file(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(9000.0)}
    holdfast.save(tmp_path / "saved", dict(tensors), process_group=False)
    report = export_by(OddWriter([""]), tmp_path / "saved", tmp_path / "out.bin")
    assert list(report.files) == [""]
    checkpoint = wiring.checkpoint_at(tmp_path / "saved", SMALL)
    content = ExportContent(checkpoint.index.tensors, checkpoint.aliases, checkpoint.manifest.tree)
    (file,) = OddWriter([""]).files(content, ExportOptions())
    assert (tmp_path / "out.bin").read_bytes() == content_of(file, tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "saved"]
