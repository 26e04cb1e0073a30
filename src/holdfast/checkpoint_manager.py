"""The manager of a run: what a training loop saves and loads its steps with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from holdfast import wiring
from holdfast.arguments import Globs, policies_of, preemption_of, require_state, selection_of
from holdfast.errors import InvalidError
from holdfast.loading.load import LoadRequest
from holdfast.policies import KeepPolicy, SavePolicy
from holdfast.ports.observer import Observer
from holdfast.saving.handle import SaveHandle
from holdfast.settings import Preemption, Settings
from holdfast.types.reports import LoadReport


class CheckpointManager:
    """Saves and loads the steps of one run under a root. A context manager; every rank of the group makes one.

    Making it is a collective: rank 0's nonce goes to every rank. Saving runs none.
    """

    def __init__(
        self,
        root: wiring.Path,
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        every: int | None = None,
        keep_last: int | None = None,
        preemption: Preemption | bool = True,
        process_group: wiring.ProcessGroup = None,
        settings: Settings = wiring.DEFAULT_SETTINGS,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Open a root.

        Args:
            root: The folder that holds `step-*`; it is made at the first save.
            save: When `maybe_save` saves; the same on every rank. See `holdfast.policies`.
            keep: Which steps are kept; None for all. The newest valid one always is.
            every: Short for `save=AnyOf(EveryNSteps(every), OnRequest())`.
            keep_last: Short for `keep=AnyOf(LatestN(keep_last), Tagged())`.
            preemption: Which signals have `maybe_save` save and end the process, from its first call until `close`.
                True for SIGTERM and SIGINT, with a grace of 30 s; False for none. See `holdfast.Preemption`.
            process_group: None for the default group, False for this process alone, or a group.
            settings: How to save and load.
            observers: Who hears of saves and loads as they go: those of `holdfast.observers`, or your own. None of
                them can hurt a save, however slow or broken.
        Raises:
            InvalidError: The root is one checkpoint, or no path, or a policy is none or contradicts another, or
                `preemption` is given on a thread that hears no signals.
        """
        policies = policies_of(save, every, keep, keep_last)
        self._run = wiring.run_at(root, process_group, settings, policies, observers, preemption_of(preemption))

    def maybe_save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        metrics: Mapping[str, object] | None = None,
        only: Globs = None,
        skip: Globs = None,
        grads: bool = False,
    ) -> SaveHandle | None:
        """Do what is due at a step of the training loop; return the save that begins, or None if none does.

        Every rank calls it after every step, and all decide alike without waiting for each other. Rank 0's `metrics`
        count, numbers by name. Other arguments and errors as `save`; a step that was just saved or loaded is not saved
        again.

        Raises:
            InvalidError: The manager was made without `save` and `every`.
            Preempted: A rank was told to end: all ranks leave their loops at this step, `code` says whether it is
                saved. A `SystemExit`, not an `Exception`.
        """
        _require_step_first(step, "maybe_save")
        require_state(state, "maybe_save(step, state)")
        return self._run.maybe_save(step, state, selection_of(only, skip, grads), metrics)

    def request_save(self) -> None:
        """Ask `maybe_save` for a save soon: from any rank, any thread, or a signal handler.

        A rank hands it on at its next `maybe_save`; all save a step or a second or so later.

        Raises:
            InvalidError: The policy has no `OnRequest()`.
        """
        self._run.request_save()

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        metrics: Mapping[str, object] | None = None,
        tags: Sequence[str] | str = (),
        only: Globs = None,
        skip: Globs = None,
        grads: bool = False,
    ) -> SaveHandle:
        """Begin to save a step; return once it is staged, or at once where it is taken lazily. As `async_save`.

        Args:
            step: The training iteration.
            state: As `async_save`, and so `only`, `skip` and `grads`.
            metrics: What to say of the step, numbers by name; rank 0's count.
            tags: Names that the step is given once it is committed, as `tag` does; rank 0's count.
        """
        _require_step_first(step, "save")
        require_state(state, "save(step, state)")
        return self._run.save(step, state, selection_of(only, skip, grads), metrics, tags)

    def load(
        self,
        state: Mapping[str, object],
        step: int | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        only: Globs = None,
        skip: Globs = None,
        grads: bool = False,
    ) -> int | None:
        """Fill a state from a step, or from the newest that is whole; return the step, or None if there is none yet.

        Newer steps that are damaged are told of (`load_report.passed_over`), put under quarantine and passed over, on
        all ranks together. Arguments and errors as the function `load`; a step that is asked for and absent is
        `MissingError`, and damage in it `CorruptError`.

        Where newer steps exist than the one that was asked for, `save` and `maybe_save` then raise `InvalidError`:
        going back within a root is not yet supported. The error says how to continue in a new root.
        """
        require_state(state, "load(state, step)")
        return self._run.load(LoadRequest(state, selection_of(only, skip, grads), strict, cast), step)

    @property
    def load_report(self) -> LoadReport | None:
        """What the last load did."""
        return self._run.load_report

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return self._run.steps()

    @property
    def latest(self) -> int | None:
        """The newest committed step, or None."""
        return next(reversed(self.steps()), None)

    def tag(self, step: int, name: str) -> None:
        """Give a committed step a name; nothing changes if it has it already. One rank is enough.

        Raises:
            InvalidError: It cannot be a name.
            MissingError: There is no such step.
            ConflictError: The tag names another step; it was not touched.
        """
        self._run.tag(step, name)

    def untag(self, name: str) -> None:
        """Take a name away from its step, which stays as it is. One rank is enough.

        Raises:
            MissingError: There is no such tag.
        """
        self._run.untag(name)

    def kept(self) -> dict[int, tuple[str, ...]]:
        """Return the steps that stay as things are now, by `keep` or because they must, each with why. Removes nothing.

        Raises:
            InvalidError: It ranks by a metric that no step has.
            CorruptError: A tag cannot be read: it may name a step that must stay.
        """
        return self._run.kept()

    def wait(self) -> None:
        """Wait for every save under way; raise what failed and nobody was told."""
        self._run.wait()

    def close(self) -> None:
        """Wait for every save under way, then end; raise what failed and nobody was told."""
        self._run.close()

    def __enter__(self) -> Self:
        """Return the manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; what close raises never hides an error of the block."""
        try:
            self._run.close(hand_on=error is None)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"closing the checkpoint manager also failed: {failure}")


def _require_step_first(step: object, call: str) -> None:
    if isinstance(step, Mapping):
        raise InvalidError(f"{call}(step, state): step is a dict; the arguments are swapped, the step comes first")
