"""Whether a state is still as a load left it, so that a save at the loaded step has nothing to write.

Two things are compared: the objects that hold tensors, and address and version counter of each tensor. Plain values and
other objects, such as those of random generators, are not: a loop that has not trained may have drawn from a generator.
Writes that move no counter go unseen, as in a lazy save.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.loading.load import Loaded
from holdfast.loading.load_request import LoadRequest
from holdfast.loading.statuses import names_of
from holdfast.ports.framework import Framework, Selection


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state that one load filled as a whole."""

    step: int
    """The step that was loaded."""

    digest: str
    """Digest of its manifest."""

    _selection: Selection
    _watched: Mapping[str, tuple[weakref.ref[object], object]]
    """By path, an object that holds tensors, and their stamps."""

    def is_still(self, framework: Framework, step: int, state: Mapping[str, object], selection: Selection) -> bool:
        """Return whether a save of a step would write what was loaded.

        Args:
            framework: Finds the tensors.
            step: The step.
            state, selection: What is saved.
        """
        if step != self.step or selection != self._selection:
            return False
        try:
            now = framework.watched(state)
        except Exception:  # noqa: BLE001 - a state that cannot be watched is saved, or refused, by what the save finds
            return False
        return now.keys() == self._watched.keys() and all(
            known() is now[path][0] and stamps == now[path][1] for path, (known, stamps) in self._watched.items()
        )


def loaded_state(framework: Framework, request: LoadRequest, loaded: Loaded) -> LoadedState | None:
    """Return the state that a load filled; None unless the load was a whole one.

    Args:
        framework: Finds the tensors.
        request: What was loaded, and how.
        loaded: What the load did.
    """
    step, state, report = loaded.location.step, request.state, loaded.report
    if step is None or not request.is_whole or report.missing or report.unexpected or report.skipped:
        return None
    manifest = loaded.manifest
    names = names_of(loaded.index.tensors, manifest.aliases, manifest.tree)
    if not all(name.partition(".")[0] in state or _is_below(name, state) for name in names):
        return None
    try:
        # An object without weak references cannot be told from a later one at its address: it raises here.
        watched = {path: (weakref.ref(each), stamps) for path, (each, stamps) in framework.watched(state).items()}
    except Exception:  # noqa: BLE001 - a state that can be filled need not be one that can be watched
        return None
    # Where no object shows whether the loop has trained, nobody can say that nothing has changed.
    return LoadedState(step, manifest.digest, request.selection, watched) if watched else None


def _is_below(name: str, state: Mapping[str, object]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in state)
