"""Carries out a load plan: several reads in flight, every chunk checked before any of it is placed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.engine.slabs import Slabs
from holdfast.errors import CorruptError, MissingError
from holdfast.ports.framework import Target
from holdfast.ports.store import Store
from holdfast.repository.digest import digest_of
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.spec.plan import LoadPlan, ReadRun


def carry_out(plan: LoadPlan, store: Store, prefix: str, targets: Sequence[Target], settings: Settings) -> None:
    """Read, check and place everything a plan lists.

    Args:
        plan: What to read.
        store: Where from.
        prefix: Folder of the attempt.
        targets: Where to, by wanted number.
        settings: Windows in flight.
    Raises:
        CorruptError: A chunk is not what was saved; the message names tensor, pack and byte range.
        UnavailableError: The store failed.
    """
    if not plan.runs:
        return
    longest = max(run.stop - run.start for run in plan.runs)
    count = min(settings.windows_in_flight, len(plan.runs))
    slabs = Slabs(count, longest + 2 * PAGE_BYTES)

    def read(run: ReadRun) -> None:
        with slabs.lent() as slab:
            _read_run(run, store, prefix, targets, slab)

    with ThreadPoolExecutor(count, thread_name_prefix="holdfast-read") as threads:
        reads = [threads.submit(read, run) for run in plan.runs]
        try:
            for each in reads:
                each.result()
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def _read_run(run: ReadRun, store: Store, prefix: str, targets: Sequence[Target], slab: memoryview) -> None:
    key = f"{prefix}{run.pack}"
    try:
        (data,) = store.get_ranges(key, [(run.start, run.stop)], [slab])
    except MissingError as missing:
        fqn = run.chunks[0].piece.tensor.fqn
        raise CorruptError(
            f"{fqn}: {store.url}/{key}: the pack is missing; the manifest names it. Read another copy"
        ) from missing
    for chunk in run.chunks:
        at = chunk.offset - run.start
        raw = data[at : at + chunk.bytes]
        found = digest_of(raw)
        if found != chunk.expected:
            raise CorruptError(
                f"{chunk.piece.tensor.fqn}: {store.url}/{key}: bytes {chunk.offset}–{chunk.offset + chunk.bytes} "
                f"hash to {found.hex()}; expected {chunk.expected.hex()}. Read another copy or another step"
            )
        itemsize = chunk.piece.tensor.itemsize
        for part in chunk.parts:
            source = raw[part.source_start : part.source_start + part.source_box.numel * itemsize]
            targets[part.wanted_number].place(part.box, source, part.source_box)
