"""Processes that encode chunks beside the thread that writes: threads would share Python's lock with it.

A helper maps memory of this process. It finds raw chunks there, and leaves their stored forms there. A unit takes a
slot of that memory until it is written. Whatever becomes of a helper, its raw chunks stay in the slot, and the thread
that writes encodes them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from holdfast.engine.buffers import copy_bytes
from holdfast.engine.child_python import command_of
from holdfast.engine.encoding.chunk_encoder import EncodedChunk, PairedWeight
from holdfast.engine.encoding.helper_messages import MESSAGE_BYTES_MAX, READY, SLOTS, SlotMemory, UnitReply, UnitRequest
from holdfast.settings import Settings

logger = logging.getLogger(__name__)

_EXIT_SECONDS_MAX = 5.0
"""A helper ends as soon as its socket does. One that takes longer is killed."""

_CAN_HELP = hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")


class HelperTask:
    """A unit that a helper encodes."""

    def __init__(self, helper: Helper, slot: int, raw: Sequence[memoryview]) -> None:
        self._helper, self._slot = helper, slot
        self.raw = raw
        """Its raw chunks, memory of the slot."""
        self.is_done = False
        """Whether the helper has answered, or never will."""
        self.chunks: list[EncodedChunk] | None = None
        """The chunks as they are stored, memory of the slot; None: the helper did not encode them."""
        self.seconds = self.elapsed_seconds = 0.0
        """Processor seconds of the helper, and seconds that passed meanwhile."""
        self._is_released = False

    def take_back(self) -> None:
        """Ask the helper to leave it, unless it has begun. It answers either way, and the slot is in use until then."""
        self._helper.memory.note_taken_back(self._slot, True)

    def wait(self, seconds_max: float) -> bool:
        """Wait until it is done, at most this long for each message of the helper; return whether it is."""
        while not self.is_done and self._helper.receive(seconds_max):
            pass
        return self.is_done

    def end(self, reply: UnitReply | None) -> None:
        """Take the answer of the helper; None: there is none.

        Raises:
            ValueError: It answers for another number of chunks.
        """
        if reply is not None and reply.chunks is not None:
            memory = self._helper.memory
            self.chunks = [
                EncodedChunk(each.digest, each.codec, (memory.stored(each) if each.codec else raw,), each.nonfinite)
                for each, raw in zip(reply.chunks, self.raw, strict=True)
            ]
            self.seconds, self.elapsed_seconds = reply.seconds, reply.elapsed_seconds
        self.is_done = True
        self._free_slot()

    def release(self) -> None:
        """Give the slot back: at once, or when the helper has answered."""
        self._is_released = True
        self._free_slot()

    def _free_slot(self) -> None:
        if self.is_done and self._is_released:
            self._helper.free_slots.append(self._slot)


class Helper:
    """One helper process. The thread to which it is lent uses it."""

    def __init__(self, entry: str, settings: Settings) -> None:
        """Start the process; it is ready some tenths of a second later.

        Raises:
            OSError: It cannot be started.
        """
        self.memory = SlotMemory.new(SLOTS, settings.chunk_bytes)
        self.free_slots = list(range(SLOTS))
        """Slots that no unit has."""
        self.is_ready = self.is_lost = False
        self._pid = os.getpid()
        self._tasks: dict[int, HelperTask] = {}
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = self._started(entry, theirs, settings)
        finally:
            os.close(self.memory.descriptor)

    def _started(self, entry: str, theirs: socket.socket, settings: Settings) -> subprocess.Popen[bytes]:
        passed = theirs.fileno(), self.memory.descriptor
        arguments = *passed, settings.chunk_bytes, int(settings.count_nonfinite), self._pid
        try:
            return subprocess.Popen(
                command_of(entry, *map(str, arguments)),
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                # Ctrl-C in the terminal must not reach it: it ends when its socket does.
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            raise

    def has_room(self, raw_bytes: int) -> bool:
        """Return whether it takes a unit of so many raw bytes."""
        # Nobody waits for units that were taken back: their answers are read here.
        while not self.free_slots and self.receive(0.0):
            pass
        return not self.is_lost and bool(self.free_slots) and raw_bytes <= self.memory.raw_bytes_max

    def begin(self, dtype: str, codec: str, chunks: Sequence[memoryview], weight: PairedWeight | None) -> HelperTask:
        """Copy the raw chunks of a unit that it has room for to a slot, and let them be encoded.

        Args:
            dtype: Element type.
            codec: The codec that is tried first.
            chunks, weight: As `ChunkEncoder.encoded`.
        """
        slot = self.free_slots.pop()
        self.memory.note_taken_back(slot, False)
        sizes = list(map(len, chunks))
        raw = self.memory.raw(slot, sizes)
        for chunk, room in zip(chunks, raw, strict=True):
            copy_bytes(chunk, room)
        task = self._tasks[slot] = HelperTask(self, slot, raw)
        pair = None if weight is None else (weight.dtype, weight.digest)
        try:
            # There is room for a message to each slot: it never blocks.
            self._socket.send(msgspec.msgpack.encode(UnitRequest(slot, dtype, codec, sizes, pair)))
        except OSError as error:
            self._lose(str(error))
        return task

    def receive(self, seconds_max: float) -> bool:
        """Take one message, waiting for it at most this long; return whether anything changed."""
        if self.is_lost:
            return False
        self._socket.settimeout(seconds_max)
        try:
            message = self._socket.recv(MESSAGE_BYTES_MAX)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:
            self._lose(str(error))
            return True
        if not message:
            self._lose("it has ended")
        elif self.is_ready:
            self._end_task(message)
        elif message == READY:
            self.is_ready = True
        else:
            self._lose(f"it is of another version: it says {message[:80]!r}, expected {READY!r}")
        return True

    def _end_task(self, message: bytes) -> None:
        try:
            reply = msgspec.msgpack.decode(message, type=UnitReply)
            self._tasks[reply.slot].end(reply)
            del self._tasks[reply.slot]
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            self._lose(f"it answered something else: {error!r}")

    def hang_up(self) -> None:
        """Let the process end, and the thread that uses it find it lost. On any thread."""
        # A forked process does not end those of its parent.
        if os.getpid() == self._pid:
            # Not `close` alone: a forked process may hold the socket open for long.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process, unless that was done."""
        self.is_lost = True
        self.hang_up()
        self._socket.close()
        if os.getpid() != self._pid:
            return
        try:
            self._process.wait(_EXIT_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # One that hangs in the kernel does not end.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS_MAX)

    def _lose(self, why: str) -> None:
        self.close()
        status = self._process.returncode
        if status is not None and status < 0:
            why = f"it was ended by signal {-status}"
            why += ", perhaps for memory: then lower compression_threads" if status == -signal.SIGKILL else ""
        elif status:
            why = f"it ended with status {status}; its error output says why"
        logger.warning(
            "process %d that compresses is lost: %s. The thread that writes compresses what it had; saves take longer",
            self._process.pid,
            why,
        )
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.end(None)


class CodingHelpers:
    """The helper processes of a job: as many as the settings say, started when first lent."""

    def __init__(self, entry: str, settings: Settings) -> None:
        """Start none yet.

        Args:
            entry: The function that each process calls, as "package.module:function"; it calls `helper_main.serve`.
                Empty: there are no helpers.
            settings: How many threads code, one of which is the one that writes.
        """
        self.entry, self._settings = entry, settings
        self._helpers: list[Helper] | None = None
        # Whoever finds it taken does without helpers, in a signal handler too.
        self._in_use = threading.Lock()
        self._pid = os.getpid()
        self.count_max = settings.compression_threads - 1 if entry and _CAN_HELP else 0
        """How many helpers there are at most."""

    @property
    def ready_count(self) -> int:
        """How many helpers can be lent. None is started for that."""
        if self._helpers is None:
            return 0
        with self.lent():
            return sum(helper.is_ready and not helper.is_lost for helper in self._helpers)

    def start(self) -> None:
        """Start the helpers, unless that was done: they are ready some tenths of a second later."""
        with self.lent():
            pass

    @contextmanager
    def lent(self) -> Iterator[Sequence[Helper]]:
        """Lend the helpers that are ready, for the length of a block. Meanwhile nobody else gets any."""
        if not self.count_max or os.getpid() != self._pid or not self._in_use.acquire(blocking=False):
            yield ()
            return
        try:
            yield self._ready()
        finally:
            self._in_use.release()

    def wait_ready(self, seconds_max: float) -> int:
        """Start the helpers if there are none, and wait until all are ready; return how many are."""
        with self.lent():
            for helper in self._helpers or ():
                if not helper.is_ready:
                    helper.receive(seconds_max)
        return self.ready_count

    def close(self) -> None:
        """End the processes, and start none any more."""
        self.count_max = 0
        _close(self._helpers or [], self._in_use)

    def _ready(self) -> list[Helper]:
        if self._helpers is None:
            self._helpers = []
            self._start(self._helpers)
        for helper in self._helpers:
            while helper.receive(0.0):
                pass
        return [helper for helper in self._helpers if helper.is_ready and not helper.is_lost]

    def _start(self, helpers: list[Helper]) -> None:
        # The list is closed, not this object: a finalizer that refers to its own object would keep it alive.
        weakref.finalize(self, _close, helpers, self._in_use)
        try:
            for _ in range(self.count_max):
                helpers.append(Helper(self.entry, self._settings))
        except Exception as error:  # noqa: BLE001 - a save does without
            logger.warning(
                "%d of %d processes that compress were started: %r. The thread that writes compresses too",
                len(helpers),
                self.count_max,
                error,
            )


def _close(helpers: list[Helper], in_use: threading.Lock) -> None:
    """End helpers. At the exit of the process a save on another thread may use them: it finds them lost."""
    if not in_use.acquire(blocking=False):
        for helper in helpers:
            helper.hang_up()
        return
    try:
        for helper in helpers:
            helper.hang_up()  # All end at once.
        while helpers:
            helpers.pop().close()
    finally:
        in_use.release()
