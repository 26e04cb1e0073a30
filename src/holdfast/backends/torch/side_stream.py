"""Copies off a GPU: queued on a separate stream beside training; events tell when they are complete.

Nothing here has run on a GPU yet; every call follows torch's own source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import torch

from holdfast.backends.torch.tickets import Unsure
from holdfast.base.ports.framework import Ticket, Unpin
from holdfast.errors import InvalidError, UnavailableError


class SideStream:
    """One device's stream for copies, of the lowest priority, to slow training as little as possible.

    Every call sets the thread's current device first. A thread without one would create a context on the first device,
    which costs half a gigabyte there for every rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # the stub lacks `staticmethod`
            self._stream = torch.cuda.Stream(device, priority=lowest)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Order later copies after the work that the caller's stream holds now.

        Raises:
            InvalidError: A graph is being captured on the caller's stream; the capture would include the copies.
        """
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise InvalidError(
                    f"a CUDA graph is being captured on the current stream of {self._device}: the save would copy at "
                    "each replay, and not now. Save before the capture or after it"
                )
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def queued(self, queue: Callable[[], None]) -> Ticket:
        """Call `queue` on this stream; return a ticket for its copies and all earlier ones.

        An error of `queue` is raised once none of its copies runs. If that cannot be observed, the ticket raises it.
        """
        with torch.no_grad(), on_stream(self._stream):
            try:
                queue()
                return _Queued(self._device, self._stream)
            except BaseException as error:
                try:
                    self._stream.synchronize()
                except RuntimeError:
                    return Unsure(error)
                raise

    def pin(self, memory: memoryview) -> Unpin:
        """Page-lock host memory for this device and all others.

        Raises:
            UnavailableError: The CUDA runtime returned an error.
        """
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(self._device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
        if error:
            self._forget_error()
            raise UnavailableError(f"CUDA error {error} at page-locking {memory.nbytes} bytes of host memory")

        def unpin() -> None:
            # If the device is lost, there is nothing to undo.
            with suppress(RuntimeError), torch.cuda.device(self._device):
                if int(torch.cuda.cudart().cudaHostUnregister(address)):  # type: ignore[no-untyped-call]
                    self._forget_error()

        return unpin

    def _forget_error(self) -> None:
        """Clear the error that the runtime keeps for this thread.

        Otherwise the next kernel launch would report it as its own. A copy on the device reads the error, and reading
        clears it.
        """
        with suppress(RuntimeError), torch.cuda.device(self._device):
            torch.zeros(1, device=self._device).clone()


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run a block on a stream, in any thread; None for host memory, which has no stream."""
    if stream is None:
        yield
        return
    # The device first: leaving the stream would otherwise switch to another device.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class _Queued:
    """A copy on a device's side stream."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        # Blocking: the waiting thread sleeps and takes no core from training. Any: 2.10 does not annotate `record`.
        self._event = cast("Any", torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """Return once this copy and all earlier ones are complete."""
        with torch.cuda.device(self._device):
            self._event.synchronize()


_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for every device's context, as torch's own async save does."""


@cache
def side_stream(device: torch.device) -> SideStream:
    """Return a device's side stream. All saves of the process share it, since their copies share one link anyway."""
    return SideStream(device)
