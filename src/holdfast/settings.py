"""Settings of saves and loads, each with its reason, and what a job does on a signal."""

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


def _require(settings: object, name: str, is_valid: bool, expected: str) -> None:
    if not is_valid:
        kind = "object settings" if isinstance(settings, ObjectSettings) else "settings"
        raise InvalidError(f"{kind}: {name}={repr(getattr(settings, name))[:80]}; expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Constants that no user needs to choose. Tests choose smaller ones, to reach every path with small states."""

    window_bytes: int = 1 * MIB
    """Bytes of one write in flight. At 1 MiB, all windows in flight stay in the processor's cache from copy to write
    while the caller waits (measured: 0.8 of the time with 4 MiB; docs/performance.md)."""

    read_window_bytes: int = 16 * MIB
    """Most bytes of one read task. Larger than for writing: cached files are copied chunk by chunk anyway, other files
    are read 1 MiB at a time, and each task costs a switch between threads (measured: 1.2 times as fast as 4 MiB)."""

    windows_in_flight: int = 8
    """Writes or reads in flight per rank: enough to keep an NVMe queue busy. Each write has `window_bytes` of memory,
    each read `read_window_bytes`, of which a cold load touches the first MiB."""

    unchanged_bytes_min: int = 64 * KIB
    """Smallest piece that deduplication looks at. A smaller piece takes less time to write than to compare."""

    coded_bytes_min: int = 64 * KIB
    """Smallest piece that is compressed. A smaller piece saves less than it costs in headers and reads."""

    zero_copy_bytes_min: int = 64 * KIB
    """Smallest chunk that is read straight into the target's memory. For a smaller chunk, finding that memory costs
    more than a copy out of the read buffer."""

    exchange_bytes_max: int = 64 * MIB
    """Host memory per rank for bytes that ranks pass to each other. In one round a rank reads into a quarter of it and
    receives into another quarter. A larger chunk is still exchanged, alone in its round."""

    pack_header_bytes_max: int = 64 * MIB
    """Header of one pack; stock safetensors refuses more than 100 MB."""

    cell_elements: int = 8 * MIB
    """Elements at which a tensor is cut for a store of objects: 16 MiB of bfloat16, 32 MiB of float32."""

    full_pack_bytes: int = 32 * MIB
    """Bytes from which on a pack in a store of objects takes no further piece: it is sent whole, from memory. Smaller
    ones cost more requests; of larger ones fewer are in flight."""

    capped_pack_share: int = 4
    """By how much packs and cells are smaller under `max_bytes_per_second`: 8 MiB instead of 32 MiB."""

    index_chunks_max: int = 1 << 17
    """Most chunks of an index in one file, which every rank gets whole. A larger index is split into files of about an
    eighth of that, and a rank reads only those it needs."""

    requests_in_flight_max: int = 64
    """Most packs and ranges that a process moves to and from one server at a time, and most other requests. A server
    that takes fewer shows it, and the limit follows."""

    sample_blocks: int = 64
    """Blocks sampled of each plain tensor when replicas are compared."""

    sample_block_bytes: int = 1 * KIB
    """Bytes of one sampled block."""

    sample_whole_bytes: int = 16 * MIB
    """Size up to which the first save of a job compares a plain tensor whole."""

    def __post_init__(self) -> None:
        for name in ("window_bytes", "read_window_bytes"):
            is_valid = PAGE_BYTES <= getattr(self, name) <= 64 * MIB and getattr(self, name) % PAGE_BYTES == 0
            _require(self, name, is_valid, f"a multiple of {PAGE_BYTES} up to {64 * MIB}")
        _require(self, "windows_in_flight", 1 <= self.windows_in_flight <= 64, "a whole number from 1 to 64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """How an object store is reached, and limits of its requests. None: as the vendor's variables and files say.

    Credentials have no place here: they come from the vendor's variables, files and services only.

    Raises:
        InvalidError: A value is outside its range, or a URL has a user or a password.
    """

    endpoint: str | None = None
    """URL of the server, for stores that are not the vendor's own. None: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, or
    the vendor's."""

    region: str | None = None
    """Region of the bucket (`s3://`). None: `AWS_REGION`, `AWS_DEFAULT_REGION`, the profile, or us-east-1."""

    virtual_hosted: bool = False
    """Whether the bucket is part of the host name (`s3://`). The endpoint then has it too."""

    ca_file: str | None = None
    """File of certificates (PEM) to trust beside those of the system. None: `AWS_CA_BUNDLE`."""

    proxy: str | None = None
    """URL of an HTTP proxy, without a password. None: `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`."""

    profile: str | None = None
    """Profile of the shared configuration (`s3://`). None: `AWS_PROFILE`."""

    anonymous: bool = False
    """Whether requests are not signed, to read what is public."""

    kms_key: str | None = None
    """Key of the vendor's key service that encrypts new objects (`s3://`). None: as the bucket says."""

    single_writer: bool = False
    """Whether a store is accepted that lets two writers create one object: an object store, or a file system of fsspec.
    Then the caller makes sure that only one job writes to a path: nothing else prevents a checkpoint of mixed parts."""

    bytes_in_flight_max: int = 256 * MIB
    """Host memory per rank for objects on their way to an object store. A larger object is sent alone."""

    retry_seconds_per_call: float = 60.0
    """How long one call to an object store is tried again after it failed, beside the time limit of a request. Long
    enough for a server that restarts, short enough that a save fails before the next one is due."""

    retry_seconds_per_save: float = 300.0
    """How long one save or load may wait in all for calls that are tried again. A store that fails half of its calls
    for an hour fails the save, although each call would succeed in the end."""

    silence_timeout_seconds: float = 30.0
    """How long a request to an object store may stay without an answer, or without a byte, before it is tried again.
    Servers under load answer within seconds."""

    bytes_per_second_min: int = 1 * MIB
    """A request to an object store that moves bytes more slowly than this counts as unanswered. Lower it for a thin
    line. Fewer requests at a time follow from each time-out, so several of them share the line first."""

    def __post_init__(self) -> None:
        for name in ("endpoint", "proxy"):
            url = getattr(self, name)
            if url is None:
                continue
            if not isinstance(url, str) or not url.startswith(("http://", "https://")):
                raise InvalidError(f"object settings: {name}: expected a URL that begins with http:// or https://")
            if "@" in url or "?" in url:
                raise InvalidError(
                    f"object settings: {name}: the URL has a user, a password or a query; expected none. For a proxy "
                    "with a password set HTTPS_PROXY"
                )
        for name in ("region", "ca_file", "profile", "kms_key"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text or not text.isprintable()):
                raise InvalidError(f"object settings: {name}={text!r}; expected a text, or None")
        for name in ("virtual_hosted", "anonymous", "single_writer"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidError(f"object settings: {name}={getattr(self, name)!r}; expected True or False")
        is_memory = MIB <= self.bytes_in_flight_max <= 1 << 40
        _require(self, "bytes_in_flight_max", is_memory, f"a whole number from {MIB} to {1 << 40}")
        for name in ("retry_seconds_per_call", "retry_seconds_per_save"):
            _require(self, name, 0 <= getattr(self, name) < math.inf, "a finite number of seconds, 0 or more")
        _require(self, "silence_timeout_seconds", 0 < self.silence_timeout_seconds < math.inf, "a positive number")
        _require(self, "bytes_per_second_min", self.bytes_per_second_min >= 1, "a whole number from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How Holdfast saves and loads. The defaults suit a training run on local disks.

    Raises:
        InvalidError: A value is outside its range; the message names it.
    """

    chunk_bytes: int = 1 * MIB
    """Bytes of one chunk. 1 to 4 MiB: small enough that a slice reads little else, large enough that
    digests and index stay negligible. Values down to one page are accepted for tests."""

    arena_bytes_max: int | None = None
    """Host memory for copies of the state in background saves. None: half of the memory that is free at the first save,
    within the limits of all control groups, shared by the ranks of the same host or group; at most 512 MiB with
    `staging="lazy"`, which reuses memory during the save. If the copies do not fit, the save writes before it returns
    (except `staging="lazy"`). 0: always."""

    staging: Literal["copy", "lazy"] = "copy"
    """When a background save returns. `copy`: once everything is copied into the arena. `lazy`: at once. Parameters and
    optimizer state are then copied while training runs, and the fence (the next optimizer step or `load_state_dict`)
    waits for the remaining copies. `docs/performance.md` lists changes that the fence does not see."""

    deduplicate: bool = True
    """Whether a step refers to packs of earlier steps for unchanged pieces. Frozen weights are stored once then, and a
    step needs the packs of other steps that its manifest names, or links to them."""

    link_unchanged: bool = True
    """Whether a step also has a hard link to each pack of another step that it refers to, if the file system can. It
    takes no space, and the step can be copied, moved and kept without the others."""

    verify_lazy_copy: bool = False
    """Whether a lazy save also hashes the state at the call, and fails if it copied other bytes. Finds writes that
    change no version counter (`.data`, numpy views). Costs about one copy of the state at the call."""

    share_reads: Literal["auto", "always", "never"] = "auto"
    """Whether one rank reads bytes that several ranks need and sends them to the others. auto: if that is expected to
    take less time than reading on every rank, and the first rounds confirm it. auto also skips an exchange whose plan
    would take a second or two: more than two million distinct byte ranges (16,384 ranks of 128 ranges), or more than
    134 million counted once per rank. Rank 0's value decides, but `never` on any rank prevents it."""

    commit_timeout_seconds: float = 600.0
    """How long a rank waits for the others after its own vote, counted from the last bytes that one of them wrote."""

    agreement_timeout_seconds: float | None = None
    """How long a rank waits for the others to agree on a save, from its own arrival; training waits meanwhile. None:
    half of the timeout of the process group, at most 300 s and at most `commit_timeout_seconds`."""

    stall_timeout_seconds: float | None = None
    """How long a save may hold the training thread while this process writes no byte. Then that save fails, and
    training goes on. While the write hangs, later saves fail at once. Slow storage is waited for, and under
    `max_bytes_per_second` the time of a pack is added. None: half of the timeout of the process group, at most
    300 s."""

    failed_saves_max: int | None = None
    """After how many failed saves in a row a call of `save` or `maybe_save` raises, on every rank. None: never. A
    failed save does not end training, so without a limit a job may run for long with nothing but log lines."""

    lease_seconds: float = 10.0
    """How long the writer of a root may send no heartbeat before another job takes over; it sends one every third of
    that time. Only counts if the other job cannot see the writer's process, as on another machine. Long enough for a
    store that stalls for seconds, short enough to wait for."""

    collect_grace_seconds: float = 10.0
    """Time between the mark and the removal of a step. It protects readers that chose the step just before, and readers
    without a lease because they may not write to the root. `close` waits for the rest of it, up to a minute, so it is
    as long as a lease and no longer: a script should end."""

    count_nonfinite: bool = False
    """Whether a save counts NaN and infinite elements, while it hashes them. A step with more than the last good one is
    committed, but marked unhealthy. Off, since the count takes processor time from training
    (`docs/performance.md`)."""

    nonfinite_expected: tuple[str, ...] = ()
    """Patterns, as in `skip`, of tensors that hold such values on purpose: counted, never marked."""

    compression: Literal["off", "auto", "on"] = "off"
    """Whether saves compress large tensors, without a change of a bit. `on`: whatever shrinks by 5 %. `auto`: what
    measured rates say makes the save faster, or no slower. The same on every rank. Off, since stock safetensors readers
    see nothing of compressed tensors (`docs/compression.md`)."""

    compression_skip: tuple[str, ...] = ()
    """Patterns, as in `skip`, of tensors that stay as they are: `("model.*",)` leaves weights to stock readers."""

    compare_replicas: bool = False
    """Whether a save compares complete replicas: each rank hashes its copies during the call, and ranks whose copy
    differs are named. Finds what samples miss: a flipped bit, a replica that missed a step. Off, since the call then
    reads the state once (`docs/performance.md`)."""

    replicas: Literal["refuse", "lowest"] = "refuse"
    """What a save does if samples of replicas differ: of plain tensors between ranks, or of DTensors between sibling
    meshes. `refuse`: it saves nothing, because undeclared parts of one tensor look the same, and so do two pipeline
    stages that reuse a name. `lowest`: it saves the lowest rank's, and of siblings those of the mesh with the lowest
    rank, marks the step unhealthy (`divergent`), and warns once. For replicas that drift on real hardware. Rank 0's
    value decides."""

    reports: bool = True
    """Whether every rank writes a report beside the checkpoint that it saved or loaded, for `holdfast trace` and for
    people. False for a checkpoint that many jobs load and none should write to."""

    allowed_roots: tuple[str, ...] = ()
    """Folders, as paths or `file://` URLs, whose files a checkpoint may reference (an import without `copy` does). None
    by default: an untrusted checkpoint must not choose which files a job reads."""

    file_mode: int | None = None
    """Permission bits of new files, such as `0o640`, less those that the umask takes; folders get the matching search
    bits. None: those of the run or checkpoint that is written to, and of a new one all that the umask leaves, as for
    other programs (`docs/modes.md`). Files with `0o600` are their owner's alone."""

    object_store: ObjectSettings = ObjectSettings()
    """How object stores (`s3://`, `gs://`, `az://`) are reached, and limits of requests to stores over a network."""

    max_bytes_per_second: int | None = None
    """Most bytes per second that all ranks of the job together send to an object store, so that saves leave the network
    to training. Each rank has an equal share. Loads are not capped: training waits for them. None: no cap."""

    # Not a field: users see it in no signature and no repr.
    _tuning: ClassVar[Tuning] = Tuning()

    def __post_init__(self) -> None:
        is_chunk = PAGE_BYTES <= self.chunk_bytes <= 4 * MIB and self.chunk_bytes % PAGE_BYTES == 0
        _require(self, "chunk_bytes", is_chunk, f"a multiple of {PAGE_BYTES} up to {4 * MIB}")
        arena = self.arena_bytes_max
        _require(
            self,
            "arena_bytes_max",
            arena is None or 0 <= arena <= 1 << 50,
            f"a whole number from 0 to {1 << 50}, or None",
        )
        _require(self, "staging", self.staging in ("copy", "lazy"), "'copy' or 'lazy'")
        _require(self, "replicas", self.replicas in ("refuse", "lowest"), "'refuse' or 'lowest'")
        _require(self, "share_reads", self.share_reads in ("auto", "always", "never"), "'auto', 'always' or 'never'")
        _require(
            self, "commit_timeout_seconds", 0 < self.commit_timeout_seconds < math.inf, "a positive, finite number"
        )
        for name in ("agreement_timeout_seconds", "stall_timeout_seconds"):
            seconds = getattr(self, name)
            _require(self, name, seconds is None or 0 < seconds < math.inf, "a positive, finite number, or None")
        failures = self.failed_saves_max
        _require(self, "failed_saves_max", failures is None or failures >= 1, "a whole number from 1, or None")
        lease_range = f"seconds from {LEASE_SECONDS_MIN} to {LEASE_SECONDS_MAX}"
        _require(self, "lease_seconds", LEASE_SECONDS_MIN <= self.lease_seconds <= LEASE_SECONDS_MAX, lease_range)
        _require(
            self, "collect_grace_seconds", 0 <= self.collect_grace_seconds < math.inf, "a finite number, 0 or more"
        )
        _require(self, "object_store", isinstance(self.object_store, ObjectSettings), "an ObjectSettings")
        cap = self.max_bytes_per_second
        _require(self, "max_bytes_per_second", cap is None or cap >= 1, "a whole number from 1, or None")
        _require(self, "compression", self.compression in ("off", "auto", "on"), "'off', 'auto' or 'on'")
        _require(self, "compression_skip", _are_texts(self.compression_skip), "a tuple of patterns")
        mode = self.file_mode
        is_mode = mode is None or (0 <= mode <= 0o777 and bool(mode & 0o400))
        _require(self, "file_mode", is_mode, "permission bits such as 0o640, with which the owner may read, or None")
        roots = self.allowed_roots
        _require(self, "allowed_roots", _are_texts(roots) and all(map(_is_path, roots)), "a tuple of paths of folders")
        _require(self, "nonfinite_expected", _are_texts(self.nonfinite_expected), "a tuple of patterns")


def _is_path(text: str) -> bool:
    return text.removeprefix("file://") != "" and "\0" not in text


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Signals on which a training loop saves and ends, and the time that it has."""

    signals: tuple[str, ...] = ("SIGTERM", "SIGINT")
    """Names of signals, such as `SIGUSR1` for Slurm's `--signal`."""

    grace_seconds: float = 30.0
    """Time from the signal until the scheduler kills the process."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Differential:
    """How a run keeps the gradients of every step beside its checkpoints, so that a killed run loses no step."""

    flush_every: int = 1
    """Records that each rank seals together. A kill loses these records and those in flight."""

    log_bytes_max: int | None = None
    """Bytes of the log in storage, of all ranks. Beyond half of them a checkpoint is saved early, and older records go.
    None: 16 times the bytes of a checkpoint, or 1 GiB if that is more; at most a quarter of the free space then."""

    optimizers: tuple[type, ...] = ()
    """Optimizer classes of yours whose step is a function of state, gradients and groups alone. The optimizers of torch
    need no entry."""

    compression: Literal["off", "on"] = "off"
    """Whether gradients are compressed, without loss. Costs processor time at each step: for spare cores."""

    def __post_init__(self) -> None:
        _require(self, "compression", self.compression in ("off", "on"), "'off' or 'on'")
        count: object = self.flush_every
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1000:
            raise InvalidError(f"Differential(flush_every={count!r}): expected a whole number from 1 to 1,000")
        limit: object = self.log_bytes_max
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InvalidError(f"Differential(log_bytes_max={limit!r}): expected a positive number of bytes, or None")
        classes: object = self.optimizers
        if not isinstance(classes, tuple) or not all(isinstance(each, type) for each in classes):
            raise InvalidError(f"Differential(optimizers={classes!r}): expected a tuple of optimizer classes")
