"""Relinking: the packs that several steps of a run share become one object again, where digests prove them equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from holdfast.checkpoint.location import require_no_checkpoint
from holdfast.clock import Clock
from holdfast.errors import InvalidError, MissingError
from holdfast.leases.writer import WriterLease
from holdfast.offline.links.shared_packs import (
    Names,
    SharedPack,
    manifests_of,
    names_of,
    proven,
    remove_unfinished,
    replace_by_link,
    shared_packs,
)
from holdfast.ports.codec import NO_CODECS, Codecs
from holdfast.ports.observer import ByteProgress, Observer
from holdfast.ports.store import Store
from holdfast.repository.catalog import read_run_id


@dataclass(slots=True)
class RelinkReport:
    """What a relinking changed, or in a dry run would change."""

    url: str
    """The root of the run."""

    linked: int = 0
    """Links that were made, or took the place of a copy."""

    freed_bytes: int = 0
    """Bytes of the copies that are gone."""

    differing: list[str] = field(default_factory=list)
    """Keys of files that are not what was saved; they were left alone. `repair` replaces them."""

    refused: int = 0
    """Links that the file system refused."""


class Relinking:
    """Relinks one run."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        lease_seconds: float,
        *,
        codecs: Codecs = NO_CODECS,
        dry_run: bool = False,
        observer: Observer | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            store: The root of the run.
            clock: Gives random names.
            lease_seconds: How long the writer lease lives without a heartbeat.
            codecs: What decodes coded chunks.
            dry_run: Change nothing.
            observer: Receives progress while copies are compared.
        """
        self._store, self._clock, self._dry_run, self._observer = store, clock, dry_run, observer
        self._codecs = codecs
        self._writer_lease = WriterLease(store, clock, lease_seconds)
        self._report = RelinkReport(store.url)

    def run(self) -> RelinkReport:
        """Relink every pack that steps share.

        Raises:
            MissingError: There is no run.
            ConflictError: A job writes to the run.
            InvalidError: It is in a store of objects, which have no links.
            UnavailableError: Storage failed; the same call continues.
        """
        store = self._store
        require_no_checkpoint(store)
        run_id = read_run_id(store)
        if run_id is None:
            raise MissingError(f"{store.url}: no root of a run; expected a folder that holds holdfast.json")
        if store.object_bytes_max is not None:
            raise InvalidError(
                f"{store.url}: objects have no links, and a run has each pack once there; expected a run on a file "
                "system. There is nothing to link: `holdfast cp` makes links where it copies to a disk"
            )
        try:
            if not self._dry_run:
                self._writer_lease.hold(run_id)
            packs = [(pack, names_of(store, pack.record, pack.links)) for pack in shared_packs(manifests_of(store))]
            # Objects of one pack are read only where there are several: each is proven before one takes its place.
            total = sum(pack.record.bytes * len(names.whole) for pack, names in packs if len(names.whole) > 1)
            progress = ByteProgress(total, self._observer)
            for pack, names in packs:
                self._relink(pack, names, progress)
            if not self._dry_run:
                remove_unfinished(store)
        finally:
            self._writer_lease.release()
        return self._report

    def _relink(self, pack: SharedPack, names: Names, progress: ByteProgress) -> None:
        report, groups = self._report, list(names.whole)
        report.differing += names.other
        if len(groups) > 1:
            groups = proven(self._store, pack.record, groups, pack.referring, self._codecs, progress.add)
            report.differing += [key for keys in names.whole if keys not in groups for key in keys]
        if not groups:
            return
        source = groups[0][0]
        for key in names.absent:
            report.linked += self._is_done(partial(self._store.link, source, key))
        for keys in groups[1:]:
            done = [self._is_done(partial(replace_by_link, self._store, self._clock, source, key)) for key in keys]
            report.linked += sum(done)
            report.freed_bytes += pack.record.bytes * all(done)

    def _is_done(self, link: Callable[[], bool]) -> bool:
        """Make a link; count it if it is refused."""
        if self._dry_run:
            return True
        self._writer_lease.require()
        is_linked = link()
        self._report.refused += not is_linked
        return is_linked
