"""The framework under which an integration works: its tested versions, and the mark that its checkpoints carry."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from holdfast.api import Checkpoint
from holdfast.errors import BY_NAME, CheckpointError, ConflictError, InvalidError, UnavailableError, translated

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

MARK = "holdfast_integration"
"""Key in a state under which an integration names itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A framework whose verbs save and load through Holdfast."""

    integration: str
    """Name of the module under `holdfast.integrations`."""

    package: str
    """Name under which the framework is installed."""

    extra: str
    """Extra of Holdfast that installs it in a tested version."""

    tested_from: tuple[int, int, int]
    """Oldest version that was tested."""

    tested_to: tuple[int, int, int]
    """Newest version that was tested. A newer patch release of it is taken with a warning."""

    model_key: str
    """Name under which its checkpoints hold the model: `holdfast.load(path, {model_key: model})` reads it alone."""

    def require(self) -> str:
        """Return the version of the framework.

        Raises:
            InvalidError: It is not installed, or its version is outside the tested range.
        """
        try:
            version = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError as error:
            raise InvalidError(
                f"holdfast.integrations.{self.integration}: {self.package} is not installed; expected "
                f"{self.range}. Run: pip install 'holdfast[{self.extra}]'"
            ) from error
        found = _numbers(version)
        if found < self.tested_from or found[:2] > self.tested_to[:2]:
            raise InvalidError(
                f"holdfast.integrations.{self.integration}: {self.package} {version} is outside the tested range; "
                f"expected {self.range}. Run: pip install 'holdfast[{self.extra}]'"
            )
        if found > self.tested_to:
            logger.warning(
                "holdfast.integrations.%s: %s %s is newer than the tested %s; saves and loads go on",
                self.integration,
                self.package,
                version,
                _text(self.tested_to),
            )
        return version

    @property
    def range(self) -> str:
        """The versions that are taken, as pip writes them."""
        major, minor, _ = self.tested_to
        return f"{self.package}>={_text(self.tested_from)},<{major}.{minor + 1}"

    def mark(self) -> dict[str, str]:
        """Return what a state of this integration holds under `MARK`."""
        version = f"{self.package} {_installed(self.package)}"
        return {"name": self.integration, "version": version, "model": self.model_key}

    def require_own(self, checkpoint: Checkpoint) -> None:
        """Require a checkpoint that this integration wrote.

        Raises:
            InvalidError: Another integration wrote it, or none did.
        """
        mark = mark_of(checkpoint)
        if mark is None:
            raise InvalidError(
                f"{checkpoint.url}: no integration wrote this checkpoint; expected one of "
                f"holdfast.integrations.{self.integration}. Read it with holdfast.load(path, state)"
            )
        if mark["name"] != self.integration:
            raise InvalidError(
                f"{checkpoint.url}: holdfast.integrations.{mark['name']} wrote this checkpoint ({mark['version']}); "
                f"expected one of holdfast.integrations.{self.integration}. Resume it with that framework, or read its "
                f'model alone: holdfast.load(path, {{"{mark["model"]}": model}})'
            )

    def require_own_root(self, newest: Checkpoint | None) -> None:
        """Require that a root has no steps yet, or steps of this integration, before a first save there.

        Args:
            newest: The newest step of the root; None if it has none.
        Raises:
            ConflictError: Another integration, or a job without one, saves there.
        """
        if newest is None:
            return
        mark = mark_of(newest)
        if mark is None or mark["name"] != self.integration:
            writer = "a job without an integration" if mark is None else f"holdfast.integrations.{mark['name']}"
            raise ConflictError(
                f"{newest.url}: {writer} saved here; expected a root of holdfast.integrations.{self.integration} "
                "alone. Choose another folder for one of them"
            )


def mark_of(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Return the mark of the integration that wrote a checkpoint; None if none did."""
    mark = checkpoint.objects.get(MARK)
    if not isinstance(mark, dict):
        return None
    return {key: str(mark.get(key, "unknown")) for key in ("name", "version", "model")}


def sent_error(error: Exception) -> tuple[str, str]:
    """Return an error, as one of Holdfast, for the other ranks: the name of its type, and its message."""
    ours = translated(error)
    return type(ours).__name__, str(ours)


def error_of_rank(where: str, name: str, text: str) -> CheckpointError:
    """Return the error that a call raised on another rank.

    Args:
        where: The rank, as in `rank 0`.
        name, text: As `sent_error` returned them.
    """
    return BY_NAME.get(name, UnavailableError)(f"{where}: {text}")


def from_first(call: Callable[[], _Result], *, is_first: bool, broadcast: Callable[[Any], Any]) -> _Result:
    """Return on every rank what a call returns on rank 0, or raise there what it raises. Every rank calls.

    Args:
        call: Is called on rank 0.
        is_first: Whether this is rank 0.
        broadcast: Returns on every rank what it is given on rank 0.
    Raises:
        CheckpointError: The call raised it, or another error, which it names: as `error_of_rank`.
    """
    outcome: tuple[tuple[str, str] | None, Any] = (None, None)
    failure: Exception | None = None
    if is_first:
        try:
            outcome = (None, call())
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an outcome
            failure, outcome = error, (sent_error(error), None)
    told, result = broadcast(outcome)
    if isinstance(failure, CheckpointError):
        raise failure
    if told is not None:
        raise error_of_rank("rank 0", *told) from failure
    found: _Result = result
    return found


@cache
def _installed(package: str) -> str:
    """Return the version of a package. Asked once: to look it up takes milliseconds, and every save states it."""
    return importlib.metadata.version(package)


def _numbers(version: str) -> tuple[int, int, int]:
    """Return major, minor and patch of a version; what follows them does not count."""
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    return major, minor, patch


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(str(number) for number in version)
