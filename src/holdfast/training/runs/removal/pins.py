"""The steps that saves of this process need, so that garbage collection leaves them alone."""

from __future__ import annotations

import threading

from holdfast.base.interrupts import GUARD


class StepPin:
    """What one save needs. Each save has its own: after training went back, two saves of one step may be in flight."""

    def __init__(self, step: int, *, is_drain: bool = False) -> None:
        """Pin nothing yet."""
        self.step = step
        """The step that is saved."""
        self.is_drain = is_drain
        """Whether the step is saved already, and is copied from the near tier to the root."""
        self.base: int | None = None
        """The step that the save may refer to. Set by `Pins`."""
        self.is_over = False
        """Whether the save has ended. Set by `Pins`."""


class Pins:
    """Steps that the saves of this process need or may still publish. Thread-safe."""

    def __init__(self) -> None:
        # The end of a removal wakes the waiting threads, which are no training threads. GUARD guards all fields.
        self._condition = threading.Condition(GUARD)
        self._pinned: set[StepPin] = set()
        self._unknown: set[StepPin] = set()
        self.current: tuple[int, str] | None = None
        """The step that this process saved or loaded last, and the digest of its manifest. Training continues from it,
        even if newer steps exist."""
        self.log = ""
        """Id of the redo log that this process writes; empty if there is none."""
        self._to_delete: frozenset[int] = frozenset()

    def pin(self, pin: StepPin, base: int | None) -> bool:
        """Pin the step of a save, and its base; return whether the save may refer to the base."""
        with GUARD:
            # The collector may be removing an invalid manifest at this step: wait, or it would remove the new one too.
            self._condition.wait_for(lambda: pin.step not in self._to_delete)
            if pin.is_over:
                return False  # Rank 0 gave up before storage answered: nobody would unpin it.
            pin.base = None if base in self._to_delete else base
            self._pinned.add(pin)
            return pin.base is not None

    def note_unknown(self, pin: StepPin) -> None:
        """Record that the outcome of a save is unknown: it stays pinned until its step is committed."""
        with GUARD:
            self._unknown.add(pin)

    def unpin(self, pin: StepPin, *, is_committed: bool) -> None:
        """Unpin what a save needed that is committed, or has certainly failed."""
        with GUARD:
            pin.is_over = True
            self._pinned.discard(pin)
            if is_committed:
                # The manifest at the step keeps every other attempt at it from publishing.
                settled = {other for other in self._unknown if other.step == pin.step}
                self._unknown -= settled
                self._pinned -= settled

    def saves(self) -> frozenset[StepPin]:
        """Return the pins of the saves that are under way, or whose outcome is unknown."""
        with GUARD:
            return frozenset(self._pinned)

    def under_way(self) -> frozenset[int]:
        """Return the steps that are being saved, or whose outcome is unknown."""
        return frozenset(pin.step for pin in self.saves())

    def needed(self) -> frozenset[int]:
        """Return the steps under way and their bases."""
        pins = self.saves()
        return frozenset({pin.step for pin in pins} | {pin.base for pin in pins if pin.base is not None})

    def release_for_removal(self, steps: frozenset[int]) -> frozenset[int]:
        """Return which of some steps no save needs. From now on no save can refer to these."""
        with GUARD:
            self._to_delete = steps - self.needed() - ({self.current[0]} if self.current is not None else set())
            self._condition.notify_all()
            return self._to_delete
