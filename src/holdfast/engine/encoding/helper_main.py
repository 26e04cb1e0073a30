"""What a helper process does: it encodes units until the process that started it is gone."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
from contextlib import suppress

import msgspec

from holdfast.clock import SystemClock
from holdfast.engine.buffers import copy_part
from holdfast.engine.encoding.chunk_encoder import ChunkEncoder, PairedWeight
from holdfast.engine.encoding.helper_messages import (
    MESSAGE_BYTES_MAX,
    READY,
    SLOTS,
    SlotMemory,
    StoredChunk,
    UnitReply,
    UnitRequest,
)
from holdfast.ports.codec import Codecs

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler sends to all processes of a job before it ends: the last save still needs helpers."""

_LOOK_SECONDS = 30.0
"""How often a helper looks whether its parent lives, where the system does not report the end of a process."""


def serve(codecs: Codecs) -> int:
    """Encode what is asked for on the socket that `Helper` passes; return an exit status."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    theirs, memory, chunk_bytes, counts_nonfinite, parent = map(int, sys.argv[2:7])
    worker = _Worker(codecs, SlotMemory(memory, SLOTS, chunk_bytes), counts_nonfinite=bool(counts_nonfinite))
    with socket.socket(fileno=theirs) as asked:
        events = select.poll()
        events.register(theirs, select.POLLIN)
        # The end of the parent, although another child of the parent may keep the socket open. PR_SET_PDEATHSIG reports
        # the end of the thread that started this process.
        with suppress(OSError):
            events.register(os.pidfd_open(parent), select.POLLIN)
        try:
            asked.send(READY)
            while os.getppid() == parent:
                if theirs not in dict(events.poll(_LOOK_SECONDS * 1000)):
                    continue
                message = asked.recv(MESSAGE_BYTES_MAX)
                if not message:
                    break
                asked.send(msgspec.msgpack.encode(worker.encoded(msgspec.msgpack.decode(message, type=UnitRequest))))
        except OSError:
            pass  # The parent is gone.
    return 0


class _Worker:
    def __init__(self, codecs: Codecs, memory: SlotMemory, *, counts_nonfinite: bool) -> None:
        self._encoder = ChunkEncoder(codecs, counts_nonfinite=counts_nonfinite)
        self._memory, self._clock = memory, SystemClock()

    def encoded(self, request: UnitRequest) -> UnitReply:
        """Encode a unit; leave its stored forms in the memory."""
        begin, start = self._clock.monotonic_seconds(), self._clock.thread_seconds()
        try:
            chunks = None if self._memory.is_taken_back(request.slot) else self._stored(request)
        except Exception:
            # The parent encodes it then, and meets the same error if the unit is to blame.
            logger.exception("a chunk of %s could not be encoded in a helper process", request.dtype)
            chunks = None
        return UnitReply(
            request.slot, chunks, self._clock.thread_seconds() - start, self._clock.monotonic_seconds() - begin
        )

    def _stored(self, request: UnitRequest) -> list[StoredChunk]:
        raw = self._memory.raw(request.slot, request.sizes)
        weight = None if request.weight is None else PairedWeight(*request.weight)
        start, room = self._memory.stored_room(request.slot)
        end, stored = 0, []
        for chunk in self._encoder.encoded(request.dtype, request.codec, raw, weight):
            first = end
            # A raw chunk is stored from where it lies.
            for part in chunk.parts if chunk.codec else ():
                copy_part(part, 0, room[end : end + len(part)])
                end += len(part)
            stored.append(StoredChunk(chunk.digest, chunk.codec, start + first, start + end, chunk.nonfinite))
        return stored
