"""Plain values, each with its reason."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import ClassVar, Literal

from holdfast.errors import InvalidError

KIB = 1 << 10
MIB = 1 << 20
PAGE_BYTES = 4096
"""Alignment of direct I/O: a multiple of every logical block size in use."""

LEASE_SECONDS_MIN, LEASE_SECONDS_MAX = 0.1, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Constants that no user needs to choose. Tests choose smaller ones, to reach every path with small states."""

    unchanged_bytes_min: int = 64 * KIB
    """Smallest piece that deduplication looks at. A smaller piece takes less time to write than to compare."""

    zero_copy_bytes_min: int = 64 * KIB
    """Smallest chunk that is read straight into the target's memory. For a smaller chunk, finding that memory costs
    more than a copy out of the read buffer."""

    exchange_bytes_max: int = 64 * MIB
    """Host memory per rank for bytes that ranks pass to each other. In one round a rank reads into a quarter of it and
    receives into another quarter. A larger chunk is still exchanged, alone in its round."""

    pack_header_bytes_max: int = 64 * MIB
    """Header of one pack; stock safetensors refuses more than 100 MB."""

    index_chunks_max: int = 1 << 17
    """Most chunks of an index in one file, which every rank gets whole. A larger index is split into files of about an
    eighth of that, and a rank reads only those it needs."""

    sample_blocks: int = 64
    """Blocks sampled of each plain tensor when replicas are compared."""

    sample_block_bytes: int = 1 * KIB
    """Bytes of one sampled block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How Holdfast saves and loads; the defaults suit a training run on local disks.

    Raises:
        InvalidError: A value is outside its range; the message names it.
    """

    chunk_bytes: int = 1 * MIB
    """Bytes of one chunk. 1 to 4 MiB: small enough that a slice reads little else, large enough that
    digests and index stay negligible. Values down to one page are accepted for tests."""

    window_bytes: int = 1 * MIB
    """Bytes of one write in flight. In a save that is awaited, all windows in flight together stay in the processor's
    cache, from copying to writing (measured: 0.8 of the time that it takes with 4 MiB; docs/performance.md)."""

    read_window_bytes: int = 16 * MIB
    """Bytes that one thread reads at a turn, at most. Larger than for writing: what lies in the page cache goes where
    it belongs chunk by chunk anyhow, what does not comes a MiB at a time, and each turn costs a hand-over between
    threads (measured: 1.2 times as fast as 4 MiB)."""

    windows_in_flight: int = 8
    """Writes or reads in flight per rank: enough to keep an NVMe queue busy. Each write has a window; each read has
    `read_window_bytes` of memory, of which a cold load touches the first MiB."""

    arena_bytes_max: int | None = None
    """Host memory for copies of what is being saved in the background. None: half of what is free when the first save
    asks, shared among the ranks of the host; lazily 512 MiB of it at most, since copies are written while others are
    made. A state of which the copies do not fit is written before the call returns, unless it is taken lazily; 0 has
    every save written so."""

    staging: Literal["copy", "lazy"] = "copy"
    """What a save in the background waits for. `copy`: until everything is copied into the arena. `lazy`: for nothing;
    parameters that an optimizer of the state steps, and its state, are taken while training goes on, until a
    fence, the next optimizer step or `load_state_dict`, waits for what is not copied yet. See `docs/performance.md` for
    what the fence cannot see."""

    deduplicate: bool = True
    """Whether a run leaves what has not changed since its last committed step where that one holds it, and refers to it
    there. Frozen weights are stored once then, and a step is not whole without the packs of others that it names."""

    verify_lazy_copy: bool = False
    """Whether what is taken lazily is also hashed at the call, and a save refused that took anything else: finds
    writes that move no version counter (`.data`, numpy views). Costs about one copy of the state at the call."""

    share_reads: Literal["auto", "always", "never"] = "auto"
    """Whether bytes that several ranks want are read by one of them and passed to the others. auto: where that is
    expected, and after a few rounds measured, to take less time than everybody reading. auto plans no exchange that
    would take every rank more than a second or two to plan: more than two million runs described by ranks that differ
    (16,384 ranks of 128 runs each), or more than 134 million, counted once for each rank that wants them. Rank 0's word
    counts, but one rank that says never is enough."""

    commit_timeout_seconds: float = 600.0
    """How long a rank waits for the others, at the opening and again after its own vote."""

    lease_seconds: float = 10.0
    """How long whoever may write to a root can give no sign of life before another job takes over; it gives one every
    third of it. Counts where nobody can see whether its process still runs: on another machine. Long enough for a store
    that stalls for seconds, short enough to wait for."""

    collect_grace_seconds: float = 30.0
    """How long a step that is about to be collected is left in peace after it was marked: for readers that chose it
    just before, and for those that cannot say that they read, on a root that they may not write to."""

    count_nonfinite: bool = False
    """Whether elements that are NaN or infinite are counted in what is saved, while it lies in the processor's
    cache to be hashed. A step that has more of them than the last good one is committed, but marked unhealthy. Off,
    since looking at all bytes costs processor time beside training (`docs/performance.md`)."""

    nonfinite_expected: tuple[str, ...] = ()
    """Names of tensors that hold such values on purpose, as patterns like those of `skip`: counted, never marked."""

    compare_replicas: bool = False
    """Whether whole copies of what several ranks hold are compared: each rank hashes what it holds of it at the call,
    before training may change it, and a rank whose copy differs is named. Finds what samples miss: a flipped bit, a
    replica that missed a step. Off, since the call takes longer by reading the state once (`docs/performance.md`)."""

    reports: bool = True
    """Whether every rank leaves a report of what it did beside the checkpoint that it saved or loaded, for
    `holdfast trace` and for people. False for a checkpoint that many load and nobody should write to."""

    allowed_roots: tuple[str, ...] = ()
    """Folders, as paths or `file://` URLs, under which files may be read that a checkpoint references, as an import
    without `copy` leaves them. None by default: a checkpoint from a stranger must not make a job read whatever it
    likes."""

    file_mode: int = 0o600
    """Permission bits of new files; folders get the search bits that go with them."""

    # Not a field: users see it in no signature and no repr.
    _tuning: ClassVar[Tuning] = Tuning()

    def __post_init__(self) -> None:
        _require("chunk_bytes", self.chunk_bytes, PAGE_BYTES, 4 * MIB)
        _require("window_bytes", self.window_bytes, PAGE_BYTES, 64 * MIB)
        _require("read_window_bytes", self.read_window_bytes, PAGE_BYTES, 64 * MIB)
        _require("windows_in_flight", self.windows_in_flight, 1, 64)
        if self.arena_bytes_max is not None:
            _require("arena_bytes_max", self.arena_bytes_max, 0, 1 << 50)
        if self.share_reads not in ("auto", "always", "never"):
            raise InvalidError(f"settings: share_reads={self.share_reads!r}; expected 'auto', 'always' or 'never'")
        if not LEASE_SECONDS_MIN <= self.lease_seconds <= LEASE_SECONDS_MAX:
            raise InvalidError(
                f"settings: lease_seconds={self.lease_seconds}; expected seconds from {LEASE_SECONDS_MIN} to "
                f"{LEASE_SECONDS_MAX}"
            )
        if not 0 <= self.collect_grace_seconds < float("inf"):
            raise InvalidError(
                f"settings: collect_grace_seconds={self.collect_grace_seconds}; expected a finite number, 0 or more"
            )
        for name in ("chunk_bytes", "window_bytes", "read_window_bytes"):
            if getattr(self, name) % PAGE_BYTES:
                raise InvalidError(f"settings: {name}={getattr(self, name)}; expected a multiple of {PAGE_BYTES}")
        if not _are_paths(self.allowed_roots):
            raise InvalidError(
                f"settings: allowed_roots={str(self.allowed_roots)[:80]!r}; expected a tuple of paths of folders"
            )
        if not _are_texts(self.nonfinite_expected):
            raise InvalidError(
                f"settings: nonfinite_expected={str(self.nonfinite_expected)[:80]!r}; expected a tuple of patterns"
            )
        if self.staging not in ("copy", "lazy"):
            raise InvalidError(f"settings: staging={self.staging!r}; expected 'copy' or 'lazy'")
        if not 0 < self.commit_timeout_seconds < float("inf"):
            raise InvalidError(
                f"settings: commit_timeout_seconds={self.commit_timeout_seconds}; expected a positive, finite number"
            )


def _require(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise InvalidError(f"settings: {name}={value}; expected a whole number from {lowest} to {highest}")


def _are_texts(found: object) -> bool:
    return isinstance(found, tuple) and all(isinstance(each, str) for each in found)


def _are_paths(found: object) -> bool:
    return isinstance(found, tuple) and all(
        isinstance(path, str) and path.removeprefix("file://") and "\0" not in path for path in found
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Which signals tell a training loop to save and end, and how long it has."""

    signals: tuple[str, ...] = ("SIGTERM", "SIGINT")
    """Names of signals, such as `SIGUSR1` for Slurm's `--signal`."""

    grace_seconds: float = 30.0
    """From the signal until whoever sent it kills the process."""

    def __post_init__(self) -> None:
        names: object = self.signals
        if not isinstance(names, tuple) or not names:
            raise InvalidError(f"Preemption(signals={names!r}): expected a tuple of names, such as ('SIGTERM',)")
        for name in names:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                raise InvalidError(
                    f"Preemption(signals=…): {str(name)[:80]!r}; expected names of signals that a process may handle, "
                    "such as 'SIGTERM', 'SIGINT' or 'SIGUSR1'"
                )
        seconds: object = self.grace_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise InvalidError(
                f"Preemption(grace_seconds={seconds!r}): expected a positive, finite number of seconds; for no "
                "preemption at all, CheckpointManager(…, preemption=False)"
            )
