"""Damage that only the CRC-32s in another system's files show: reported by verify, refused by import and copy."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.errors import CorruptError, InvalidError
from tests.unit.cli.running import holdfast as command

ZERO = Path(__file__).parents[1] / "fixtures" / "deepspeed" / "zero1_dp2" / "ckpt"
OVER_A_READ = torch.arange(1_200_000, dtype=torch.float32)
"""4.8 MB: more than verification reads at once."""


@pytest.fixture
def without_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def place_of(archive: Path, entry: str) -> tuple[int, int]:
    """Return first byte and byte past the content of an entry, as `zipfile` finds it."""
    with zipfile.ZipFile(archive) as opened, archive.open("rb") as file:
        info = opened.getinfo(entry)
        file.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        start = info.header_offset + 30 + name + extra
        return start, start + info.file_size


def written(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def flipped(path: Path, at: int) -> None:
    written(path, at, bytes([path.read_bytes()[at] ^ 0x10]))


def torch_file(folder: Path) -> tuple[Path, Path, int, str]:
    """Save a `.pt` file; return checkpoint, file, a byte of a moment beyond the first read of it, and its name."""
    path = folder / "last.pt"
    torch.save({"model": {"w": torch.ones(8)}, "ema": {"moment": OVER_A_READ}}, path)  # noqa: TID251
    return path, path, place_of(path, "last/data/1")[1] - 3, "ema.moment"


def tied_view(folder: Path) -> tuple[Path, Path, int, str]:
    """Save a slice of a storage; return a byte of the storage that no tensor has."""
    path = folder / "view.ckpt"
    torch.save({"model": {"rows": torch.randn(64, 4)[8:16]}}, path)  # noqa: TID251
    return path, path, place_of(path, "view/data/0")[1] - 1, "model.rows"


def weights_in_parts(folder: Path) -> tuple[Path, Path, int, str]:
    for number in (1, 2):
        torch.save({f"w{number}": torch.randn(300)}, folder / f"pytorch_model-0000{number}-of-00002.bin")  # noqa: TID251
    part = folder / "pytorch_model-00002-of-00002.bin"
    return folder, part, place_of(part, "pytorch_model-00002-of-00002/data/0")[0], "model.w2"


def distributed(folder: Path) -> tuple[Path, Path, int, str]:
    """Save three equal archives of one shape: all but the first are listed without a parse of their own."""
    dcp.save({"model": {name: torch.full((700,), 0.5) for name in "abc"}}, checkpoint_id=folder / "dcp", no_dist=True)
    file = next((folder / "dcp").glob("*.distcp"))
    pieces = [holdfast.open_checkpoint(folder / "dcp").index.pieces_of(f"model.{name}")[0] for name in "abc"]
    last = max(pieces, key=lambda piece: piece.offset)
    return folder / "dcp", file, last.offset + 40, last.tensor.fqn


CASES = [torch_file, tied_view, weights_in_parts, distributed]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("copy", [False, True])
def test_a_flipped_byte_is_found_and_never_imported(
    tmp_path: Path, case: Callable[[Path], tuple[Path, Path, int, str]], copy: bool
) -> None:
    checkpoint, file, at, fqn = case(tmp_path)
    assert list(holdfast.open_checkpoint(checkpoint).verify()) == []
    flipped(file, at)
    (damage,) = holdfast.open_checkpoint(checkpoint).verify()
    assert damage.start is not None and damage.stop is not None
    assert damage.start <= at < damage.stop
    assert (damage.file, damage.fqn) == (file.name, fqn)
    with pytest.raises(CorruptError, match=rf"{file.name}, bytes {damage.start}–{damage.stop}: {fqn}: .*CRC-32"):
        holdfast.import_checkpoint(checkpoint, tmp_path / "run", step=1, copy=copy)
    assert not (tmp_path / "run" / "step-1").exists()
    assert not list(tmp_path.glob("run/**/manifest*"))


def test_a_storage_of_many_tensors_names_them(tmp_path: Path) -> None:
    shutil.copytree(ZERO, tmp_path / "ckpt")
    opened = holdfast.open_checkpoint(tmp_path / "ckpt")
    [piece] = opened.index.pieces_of("optimizer.state.l1.weight.exp_avg")
    flipped(tmp_path / "ckpt" / piece.pack, piece.offset + 10)
    (damage,) = opened.verify()
    assert damage.file == piece.pack
    assert damage.fqn is None
    assert damage.start is not None and damage.start < piece.offset, "the storage is one flat partition"
    assert "holds optimizer.state.emb.weight.exp_avg, optimizer.state.l1.weight.exp_avg," in damage.message
    with pytest.raises(CorruptError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt, bytes"):
        holdfast.import_checkpoint(tmp_path / "ckpt", tmp_path / "run", copy=True)


def test_zeros_in_place_of_any_record_are_damage(tmp_path: Path) -> None:
    """A power cut leaves whole pages of zeros; each record in turn, those that a load does not read too."""
    whole = tmp_path / "whole.pt"
    torch.save({"model": {"a": torch.ones(9), "b": torch.zeros(9)}, "step": 3}, whole)  # noqa: TID251
    with zipfile.ZipFile(whole) as archive:
        entries = archive.namelist()
    assert len(entries) >= 6
    silent = []
    for entry in entries:
        torn = tmp_path / "torn.pt"
        shutil.copy(whole, torn)
        start, stop = place_of(torn, entry)
        if not any(torn.read_bytes()[start:stop]):
            continue  # Zeros already.
        written(torn, start, bytes(stop - start))
        try:
            damages = list(holdfast.open_checkpoint(torn).verify())
        except CorruptError as error:
            assert "torn.pt" in str(error)
            continue
        if [(damage.start, damage.stop) for damage in damages] != [(start, stop)]:
            silent.append((entry, damages))
    assert silent == []


@pytest.mark.parametrize(("order", "kind"), [(bytes(6), CorruptError), (b"lit", CorruptError), (b"big", InvalidError)])
def test_a_byte_order_that_torch_never_writes_is_damage(tmp_path: Path, order: bytes, kind: type[Exception]) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
        archive.writestr("a/byteorder", order)
    with pytest.raises(kind, match=r"byte ?order"):
        holdfast.open_checkpoint(path)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.usefixtures("without_checksums")
def test_an_archive_without_checksums_is_imported(tmp_path: Path, copy: bool) -> None:
    path = tmp_path / "fast.pt"
    torch.save({"model": {"w": torch.arange(50.0)}}, path)  # noqa: TID251
    with zipfile.ZipFile(path) as archive:
        assert {info.CRC for info in archive.infolist()} == {0}
    verification = holdfast.open_checkpoint(path).verification()
    assert list(verification.damages()) == []
    assert verification.total_bytes == 0
    assert "they hold no digests" in verification.notes[0]
    holdfast.import_checkpoint(path, tmp_path / "run", step=1, copy=copy)
    settings = holdfast.Settings(allowed_roots=(str(tmp_path),))
    assert holdfast.read(tmp_path / "run", step=1, settings=settings)["model"]["w"].tolist() == list(range(50))


def test_storages_filled_after_the_save_are_valid(tmp_path: Path) -> None:
    """`skip_data` reserves storages without a checksum, for a writer that fills them; other records have theirs."""
    path = tmp_path / "filled.pt"
    with torch.serialization.skip_data():
        torch.save({"model": {"w": torch.ones(50)}}, path)  # noqa: TID251
    written(path, place_of(path, "filled/data/0")[0], torch.arange(50.0).numpy().tobytes())
    verification = holdfast.open_checkpoint(path).verification()
    assert list(verification.damages()) == []
    assert 0 < verification.total_bytes < 1000
    holdfast.import_checkpoint(path, tmp_path / "run", step=1, copy=True)
    assert holdfast.read(tmp_path / "run", step=1)["model"]["w"].tolist() == list(range(50))


def test_the_command_says_which_checksums_it_used(tmp_path: Path) -> None:
    path, _, at, fqn = torch_file(tmp_path)
    with zipfile.ZipFile(path) as archive:
        count = sum(info.CRC != 0 for info in archive.infolist())
        total = sum(info.file_size for info in archive.infolist() if info.CRC)
    document = command("verify", path, "--json").json()
    assert (document["whole"], document["bytes"]) == (True, total)
    assert f"{count} entries compared with their CRC-32, {total:,} bytes" in document["notes"][0]
    flipped(path, at)
    ended = command("verify", path)
    assert ended.status == 1
    assert f"({fqn}): entry 'last/data/1' has CRC-32" in ended.out
    ended = command("export", path, tmp_path / "copy", "--to", "holdfast")
    assert ended.status != 0
    assert not (tmp_path / "copy" / "manifest.json").exists()
