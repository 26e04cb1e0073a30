"""Calls that raise on all processes or on none: one that raised alone would leave the others waiting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.utils import gather_object

from holdfast.errors import UnavailableError
from holdfast.integrations.host import error_of_rank, sent_error

logger = logging.getLogger(__name__)

HINT_SECONDS = 10.0
"""After so long a process that waits for the others says what it waits for."""

_EVERY_PROCESS = (
    "expected save_state, load_state, wait_for_saves and end_training on every process. Do not call them under "
    "`if accelerator.is_main_process:`"
)

T = TypeVar("T")


def together(call: Callable[[], T]) -> T:
    """Call on every process; return this process's result. A collective.

    Raises:
        Exception: What the call raised on this process.
        CheckpointError: It raised on other processes only. The message names the lowest.
    """
    result, _ = _called(call, lambda result: None)
    return result


def agreed(call: Callable[[], T]) -> T:
    """Call on every process; return the result of process 0 on all. A collective; errors as `together`."""
    _, results = _called(call, lambda result: result)
    return results[0]


def _called(call: Callable[[], T], shown: Callable[[T], T | None]) -> tuple[T, list[T]]:
    """Return this process's result, and what each process shows of its own."""
    own: T | None = None
    error: Exception | None = None
    try:
        own = call()
    except Exception as raised:  # noqa: BLE001 - every process learns of it, then it is raised
        error = raised
    failure = None if error is None else sent_error(error)
    told: list[tuple[tuple[str, str] | None, T]]
    told = _gathered((failure, None if own is None else shown(own)))
    if error is not None:
        raise error
    for process, (failure, _) in enumerate(told):
        if failure is not None:
            raise error_of_rank(f"process {process}", *failure)
    return own, [each for _, each in told]  # type: ignore[return-value]


def _gathered(value: object) -> list[Any]:
    """Return the values of all processes."""
    hint = threading.Timer(
        HINT_SECONDS,
        lambda: logger.warning("this process has waited %s s for the others; %s", HINT_SECONDS, _EVERY_PROCESS),
    )
    hint.daemon = True
    hint.start()
    try:
        gathered: list[Any] = gather_object([value])
    except RuntimeError as error:
        # Another process was in a collective of the training, or has ended.
        raise UnavailableError(f"the processes did not meet: {error}; {_EVERY_PROCESS}") from error
    finally:
        hint.cancel()
    return gathered
