"""Fuzzes the pickle of one file of a DeepSpeed checkpoint."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

from holdfast.backends.foreign.deepspeed.reader import DeepSpeedFormat
from holdfast.backends.stores.memory import MemoryStore
from holdfast.core.format.index.foreign_index import index_foreign
from holdfast.errors import CheckpointError
from holdfast.stored.checkpoint.coverage import uncovered_names

FOLDER = Path(__file__).parents[1] / "tests/fixtures/deepspeed/zero1_tp2_dp2/ckpt/global_step3"
CHANGED = {"model": "mp_rank_00_model_states.pt", "optimizer": "zero_pp_rank_1_mp_rank_01_optim_states.pt"}
"""Files whose pickle is fuzzed."""


def listed(kind: str) -> Callable[[bytes], None]:
    """Return a target that lists the checkpoint with another pickle in one file.

    Listed pieces must be inside their tensors and files.
    """

    def target(data: bytes) -> None:
        store = MemoryStore(f"fuzz-deepspeed-{kind}")
        changed = io.BytesIO()
        with zipfile.ZipFile(FOLDER / CHANGED[kind]) as file, zipfile.ZipFile(changed, "w") as archive:
            for name in file.namelist():
                archive.writestr(name, data if name.endswith("/data.pkl") else file.read(name))
        for path in FOLDER.iterdir():
            store.put(path.name, changed.getvalue() if path.name == CHANGED[kind] else path.read_bytes())
        try:
            listing = DeepSpeedFormat().listing(store, "")
            uncovered_names(index_foreign(listing, store.url)[1], 12345)
        except CheckpointError as error:
            assert str(error).startswith(store.url)

    return target


def pickle_of(kind: str) -> bytes:
    """Return the pickle of the file."""
    with zipfile.ZipFile(FOLDER / CHANGED[kind]) as file:
        return next(file.read(name) for name in file.namelist() if name.endswith("/data.pkl"))
