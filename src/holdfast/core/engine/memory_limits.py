"""How much memory this process may still take: free memory of the host, the limits of its control groups, its ranks.

Ranks that share the host or a limited control group share what it leaves. Environment variables of launchers do not
state this: `srun`, `mpirun` and pods set none that all of them share. So ranks state the identities of their domains to
each other once, and each counts.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path, PurePosixPath

from holdfast.core.format.digest import short_digest_of

_IDENTITY_BYTES = 8
_STATED_DOMAINS_MAX = 4
"""Domains that a rank states: 32 bytes. The host, and the three groups that leave least; deeper trees are rare."""


_UNLIMITED_MIN = 1 << 62
"""Version 1 states the most that the kernel can count where a group has no limit: 2**63 less a page."""


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of the files of one version of control groups, and the usual mount of its memory hierarchy."""

    limit: str
    usage: str
    cached: tuple[str, ...]
    usual_mount: str


_V1 = _Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
    "/sys/fs/cgroup/memory",
)
_V2 = _Version("memory.max", "memory.current", ("active_file", "inactive_file"), "/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryDomain:
    """Memory that all processes of a domain share: the host's, or what the limit of a control group leaves them."""

    identity: bytes
    """Eight bytes, equal in every process of the domain and in no other."""

    free_bytes: int
    """Bytes that its processes may still allocate together."""


def memory_domains(proc: Path = Path("/proc"), root: Path = Path("/")) -> list[MemoryDomain]:
    """Return the domains of this process: the host, then each control group with a limit, least free bytes first.

    Files that cannot be read are skipped: without any limit, the host is the only domain.

    Args:
        proc: Mount point of procfs.
        root: Folder to which mount points are relative.
    """
    available = _numbers_in(proc / "meminfo").get("MemAvailable:")
    free = available * 1024 if available is not None else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    boot = _boot_of(proc)
    groups: dict[bytes, MemoryDomain] = {}
    # A parent's limit applies to all groups below it together, so every level is a domain.
    for version in (_V1, _V2):
        for folder in _group_folders(version, proc, root):
            headroom, stat = _headroom_bytes(version, folder), _stat_of(folder)
            if headroom is not None and stat is not None:
                # Not the path: every pod sees its own group as the root. The inode numbers the group on its host.
                identity = short_digest_of(
                    boot.encode(), version.limit.encode(), f"{stat.st_dev}:{stat.st_ino}".encode()
                )
                groups[identity] = MemoryDomain(identity, max(headroom, 0))
    host = MemoryDomain(short_digest_of(boot.encode()), max(free, 0))
    return [host, *sorted(groups.values(), key=attrgetter("free_bytes"))]


def host_identity(proc: Path = Path("/proc")) -> bytes:
    """Return bytes that are equal in every process of the host since its boot, and nowhere else."""
    return _boot_of(proc).encode()


def memory_statement() -> bytes:
    """Return what this rank states to the others, so that each of them can count who shares its memory."""
    return b"".join(domain.identity for domain in memory_domains()[:_STATED_DOMAINS_MAX])


class MemoryShare:
    """This rank's share of the free memory, by the number of ranks in each of its domains."""

    def __init__(self, statements: Iterable[bytes] = ()) -> None:
        """Count the ranks of each domain.

        Args:
            statements: The `memory_statement` of every rank; none for a rank that did not ask the others.
        """
        self._ranks: Counter[bytes] = Counter()
        for statement in statements:
            self._ranks.update(
                {statement[at : at + _IDENTITY_BYTES] for at in range(0, len(statement), _IDENTITY_BYTES)}
            )

    def free_bytes(self) -> int:
        """Return the bytes that this rank may still allocate if all ranks of its domains allocate as much."""
        # Ranks outside this group state nothing here, such as those of other managers with `process_group=False`.
        least = ranks_on_host()
        return min(domain.free_bytes // max(self._ranks[domain.identity], least) for domain in memory_domains())


def ranks_on_host() -> int:
    """Return how many ranks torchrun started on the host, as LOCAL_WORLD_SIZE states; 1 if nothing states it.

    Other launchers state it elsewhere, but `srun` and `mpirun` bind each rank to processors of its own. So this is the
    number by which ranks divide the processors that all of them may use.
    """
    stated = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(stated), 1) if stated.isdigit() else 1


def _boot_of(proc: Path) -> str:
    return "".join(_lines_of(proc / "sys/kernel/random/boot_id")) or socket.gethostname()


def _headroom_bytes(version: _Version, folder: Path) -> int | None:
    """Return the bytes that a control group's limit leaves; None if it has no limit."""
    limit = _number_of(folder / version.limit)
    if limit is None or limit >= _UNLIMITED_MIN:
        return None
    usage = _number_of(folder / version.usage)
    if usage is None:
        return None
    # The kernel counts page cache as used, but reclaims it before it refuses an allocation.
    counts = _numbers_in(folder / "memory.stat")
    return limit - usage + sum(counts.get(kind, 0) for kind in version.cached)


def _group_folders(version: _Version, proc: Path, root: Path) -> Iterator[Path]:
    """Yield the folder of this process's control group and of every group above it that is mounted."""
    group = _group_path(version, proc)
    mounts = _mounts(version, proc) or [(PurePosixPath("/"), version.usual_mount)]
    below = [(group.relative_to(top), point) for top, point in mounts if group.is_relative_to(top)]
    # In a container the group's path may be outside every mount, because the host names it; the mount is then its own.
    for relative, point in below or [(PurePosixPath(), point) for _, point in mounts]:
        folder = root / point.lstrip("/")
        yield from (folder / level for level in (relative, *relative.parents))


def _group_path(version: _Version, proc: Path) -> PurePosixPath:
    """Return the path of this process's group in the hierarchy of a version; the root if the kernel states none."""
    for line in _lines_of(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (version is _V2 and number == "0" and not controllers) or (
            version is _V1 and "memory" in controllers.split(",")
        ):
            return PurePosixPath(path)
    return PurePosixPath("/")


def _mounts(version: _Version, proc: Path) -> list[tuple[PurePosixPath, str]]:
    """Return the mounts of a version's memory hierarchy: for each its root group and its mount point."""
    mounts = []
    for line in _lines_of(proc / "self" / "mountinfo"):
        # Before the separator come any number of optional fields.
        before, _, after = line.partition(" - ")
        fields, source = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(source) < 3:
            continue
        is_v1 = source[0] == "cgroup" and "memory" in source[-1].split(",")
        if is_v1 if version is _V1 else source[0] == "cgroup2":
            mounts.append((PurePosixPath(_unescaped(fields[3])), _unescaped(fields[4])))
    return mounts


def _unescaped(field: str) -> str:
    """Return a field of a list of mounts, in which the kernel writes blanks and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), field)


def _number_of(path: Path) -> int | None:
    """Return the number in a file; None if it holds something else or cannot be read."""
    (word, *_) = (*_lines_of(path), "")
    return int(word) if word.strip().isdigit() else None


def _numbers_in(path: Path) -> dict[str, int]:
    """Return the named numbers in a file, one per line; none if it cannot be read."""
    rows = [line.split() for line in _lines_of(path)]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _stat_of(folder: Path) -> os.stat_result | None:
    try:
        return folder.stat()
    except OSError:
        return None


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
