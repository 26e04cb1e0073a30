"""Copies off a GPU: queued on a stream of their own, beside training, and waited for by events.

Nothing here has run on a GPU yet; every call is as torch's own source has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Protocol, SupportsInt

import torch

from holdfast.errors import InvalidError, UnavailableError
from holdfast.frameworks.torch.tickets import Unsure
from holdfast.ports.framework import Ticket, Unpin


class SideStream:
    """One device's stream for copies, of the lowest priority, so that it takes from training as little as can be.

    Every call first makes the device the thread's own: a thread that has chosen none would otherwise make a context on
    the first device, which costs every rank half a gigabyte there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # the stub lacks `staticmethod`
            self._stream = torch.cuda.Stream(device, priority=lowest)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Have copies that are queued from now on come after what the caller's stream was given up to now.

        Raises:
            InvalidError: A graph is being captured on the caller's stream, which would take the copies for its own.
        """
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise InvalidError(
                    f"a CUDA graph is being captured on the current stream of {self._device}: what is saved would be "
                    "copied at each replay, and not now. Save before the capture or after it"
                )
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def queued(self, queue: Callable[[], None]) -> Ticket:
        """Have what a call does queued here; return what waits for it, and for all that was queued before.

        Where it fails, that is raised once nothing of it is under way any more, or, if nobody can tell, at the wait.
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
            UnavailableError: The runtime refused.
        """
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(self._device):
            error = int(_runtime().cudaHostRegister(address, memory.nbytes, _PORTABLE))
        if error:
            self._forget_error()
            raise UnavailableError(f"CUDA error {error} at page-locking {memory.nbytes} bytes of host memory")

        def unpin() -> None:
            # Where the device is lost there is nothing to undo, whatever comes back.
            with suppress(RuntimeError), torch.cuda.device(self._device):
                if int(_runtime().cudaHostUnregister(address)):
                    self._forget_error()

        return unpin

    def _forget_error(self) -> None:
        """Have the runtime forget the error that a call of this thread met.

        The next kernel's launch would be taken for what failed. A copy on the device asks for the error as well, and
        whoever asks has it forgotten.
        """
        with suppress(RuntimeError), torch.cuda.device(self._device):
            torch.zeros(1, device=self._device).clone()


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run a block on a stream, on whatever thread; None for host memory, which has none."""
    if stream is None:
        yield
        return
    # The device first, so that leaving the stream does not go back to another device.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class _Queued:
    """A copy on a device's side stream."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        # Blocking: who waits sleeps, rather than to take a core from training.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """Return once the copy is complete, and all that was queued before it."""
        with torch.cuda.device(self._device):
            self._event.synchronize()


class _Runtime(Protocol):
    """What is called of the CUDA runtime itself; an error comes back as a number, 0 for none."""

    def cudaHostRegister(self, address: int, count: int, flags: int) -> SupportsInt: ...

    def cudaHostUnregister(self, address: int) -> SupportsInt: ...


def _runtime() -> _Runtime:
    runtime: _Runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return runtime


_PORTABLE = 1
"""`cudaHostRegisterPortable`: for every device's context, as torch's own saving pins."""


@cache
def side_stream(device: torch.device) -> SideStream:
    """Return a device's side stream, the same for all saves of this process: one copies after the other anyhow."""
    return SideStream(device)
