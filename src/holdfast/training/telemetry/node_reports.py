"""Stores the reports of the ranks of one node in one file.

The ranks of a node meet in a local folder, because their reports should cost the key-value store and its host nothing.
No rank waits for another. Each rank puts its report into the folder. Then, one at a time, each stores all reports that
are there in the file of the node's lowest rank, unless a rank before it has stored its report too. So a rank returns
with its report stored, or with the lowest rank about to store it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.base.ports.store import Store
from holdfast.base.types.events import RankReport
from holdfast.core.engine.memory_limits import host_identity
from holdfast.core.format.digest import short_digest_of
from holdfast.errors import CheckpointError
from holdfast.stored.repository.reports import decode_reports, encode_reports, put_reports

IDENTITY_BYTES = 8
_MEETINGS_MAX = 8
"""Meetings that may be left in the folder: if storage takes no reports, each save leaves one."""

_TRIES = 100
"""How often a rank comes to a meeting whose folder is removed meanwhile: each time another meeting has just ended."""

_RANKS_MAX = 64
"""Most ranks that share a file: a reader takes files up to 1 MiB."""


def node_identity() -> bytes:
    """Return eight bytes that are equal on ranks of one host that share the folder for temporary files.

    Pods of one host have a folder each. Zeros if this rank cannot use the folder.
    """
    try:
        stat = os.stat(folder := tempfile.gettempdir())
        is_usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return bytes(IDENTITY_BYTES)
    at = f"{stat.st_dev}:{stat.st_ino}:{os.getuid()}"
    return short_digest_of(host_identity(), at.encode()) if is_usable else bytes(IDENTITY_BYTES)


class NodeReports:
    """The reports of the ranks of one node, as one of them stores them."""

    def __init__(self, rank: int, identities: Sequence[bytes], job: str) -> None:
        """Find the ranks of the node.

        Args:
            rank: This rank.
            identities: The `node_identity` of every rank; none if ranks did not exchange them.
            job: Text that distinguishes the job from others on the node.
        """
        own = identities[rank] if rank < len(identities) else bytes(IDENTITY_BYTES)
        ranks = [other for other, identity in enumerate(identities) if any(own) and identity == own] or [rank]
        first = ranks.index(rank) // _RANKS_MAX * _RANKS_MAX
        self.ranks = tuple(ranks[first : first + _RANKS_MAX])
        """The ranks that share a file, ascending."""
        self._folder = Path(tempfile.gettempdir()) / f"holdfast-{job}-{self.ranks[0]}" if len(self.ranks) > 1 else None

    def put(self, store: Store, folder: str, report: RankReport) -> None:
        """Store a report of this rank beside a checkpoint, with those of the other ranks of the node so far.

        Raises:
            CheckpointError: The report could not be written.
        """
        if self._folder is None:
            put_reports(store, folder, [report])
            return
        meeting = self._folder / f"{report.operation.verb}-{report.id}"
        try:
            for tries_left in reversed(range(_TRIES)):
                try:
                    self._come(self._folder, meeting, report)
                    break
                except (FileNotFoundError, FileExistsError):
                    # The last rank of an earlier meeting has just removed the folder: before `mkdir`, or between the
                    # two looks that `mkdir` takes. The lowest rank does not give up: the other ranks leave their
                    # reports to the lowest rank.
                    if not tries_left:
                        raise
        except OSError:
            put_reports(store, folder, [report])  # The rank cannot meet the others.
            return
        try:
            with _locked(meeting):
                self._store_all(meeting, store, folder, report)
        except CheckpointError:
            raise  # Of the store, which may lack its bucket.
        except FileNotFoundError:
            return  # Another rank has stored the reports.

    def _come(self, folder: Path, meeting: Path, report: RankReport) -> None:
        """Put a report of this rank into a meeting."""
        _make_own(folder)
        if report.operation.rank == self.ranks[0]:
            _remove_old(folder)
        meeting.mkdir(mode=0o700, exist_ok=True)
        _write(meeting / _waiting(report.operation.rank), encode_reports([report]))

    def _store_all(self, meeting: Path, store: Store, folder: str, own: RankReport) -> None:
        """Store what the ranks have put into their meeting, if this rank's report is not stored yet."""
        rank, lowest = own.operation.rank, self.ranks[0]
        if not (meeting / _waiting(rank)).exists():
            return
        found = {
            path.name: decode_reports(path.read_bytes(), str(path), own.operation.url)[0]
            for path in sorted(meeting.glob("r*"))
        }
        reports = {report.operation.rank: report for report in found.values()}
        if lowest not in reports:
            return  # It names the file, and stores the reports that it finds when it comes.
        put_reports(store, folder, [reports[rank] for rank in sorted(reports)])
        if len(reports) == len(self.ranks):
            shutil.rmtree(meeting, ignore_errors=True)
            with suppress(OSError):
                meeting.parent.rmdir()  # Other saves of the job may be in it.
            return
        for name in found:
            os.replace(meeting / name, meeting / f"{name.removesuffix(_WAITING)}")


_WAITING = ".waiting"
"""Suffix of a report that is not stored yet."""


def _waiting(rank: int) -> str:
    return f"r{rank:05d}{_WAITING}"


def _make_own(folder: Path) -> None:
    """Make a folder that nobody else can write to.

    Raises:
        OSError: The folder belongs to somebody else.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.lstat()
    if stat.st_uid != os.getuid() or folder.is_symlink() or stat.st_mode & 0o077:
        raise PermissionError(f"{folder} is not private to this user")


def _remove_old(folder: Path) -> None:
    """Remove all meetings but the newest."""
    oldest_first = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for meeting in oldest_first[:-_MEETINGS_MAX]:
        shutil.rmtree(meeting, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    """Write a file that appears whole."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(data)
    os.replace(hidden, path)


@contextmanager
def _locked(meeting: Path) -> Iterator[None]:
    """Hold the lock of a meeting. If its last rank has removed it meanwhile, the body finds it empty."""
    fd = os.open(meeting / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
