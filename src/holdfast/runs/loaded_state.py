"""Whether a state is still as a load left it, so that a save at the loaded step has nothing to write.

Three things are compared: address and version counter of every tensor, the objects of the state that hold them, and the
names that take part. Plain values and tensors that are made anew at each look, such as those of random generators, are
not: a loop that has not trained may have drawn from a generator. Writes that move no counter go unseen, as in a lazy
save.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from holdfast.loading.load import Loaded, LoadRequest
from holdfast.loading.statuses import names_of
from holdfast.ports.framework import Collected, Framework, Selection


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state that one load filled as a whole."""

    step: int
    """The step that was loaded."""

    digest: str
    """Digest of its manifest."""

    _selection: Selection
    _objects: Mapping[str, weakref.ref[object]]
    _stamps: Mapping[str, object]

    def is_still(self, step: int, state: Mapping[str, object], selection: Selection, collected: Collected) -> bool:
        """Return whether a save of a step would write what was loaded.

        Args:
            step: The step.
            state, selection: What is saved.
            collected: The state taken apart.
        """
        if step != self.step or selection != self._selection or collected.refused:
            return False
        objects = dict(_objects_in(state, ""))
        if any(each() is not objects.get(path, self) for path, each in self._objects.items()):
            return False
        stamps = _stamps_of(collected)
        return all(stamps.get(fqn) == stamp for fqn, stamp in self._stamps.items())


def loaded_state(framework: Framework, request: LoadRequest, loaded: Loaded) -> LoadedState | None:
    """Return the state that a load filled; None unless the load was a whole one.

    Args:
        framework: Takes the state apart.
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
        # Twice, and the first is alive at the second: what has moved is made anew at each look.
        first, second = (framework.collect(state, request.selection) for _ in range(2))
        before, after = _stamps_of(first), _stamps_of(second)
        stable = {fqn: stamp for fqn, stamp in before.items() if after.get(fqn) == stamp}
        # An object that cannot be told from a later one at its address raises here.
        objects = {path: weakref.ref(each) for path, each in _objects_in(state, "") if _holds_any(path, stable)}
    except Exception:  # noqa: BLE001 - a state that can be filled need not be one that can be saved
        return None
    return LoadedState(step, manifest.digest, request.selection, objects, stable)


def _is_below(name: str, state: Mapping[str, object]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in state)


def _stamps_of(collected: Collected) -> dict[str, object]:
    return {local.shard.tensor.fqn: local.source.stamp() for local in collected.shards}


def _objects_in(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Return the objects of a state by path: all but its containers."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _objects_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _objects_in(item, f"{path}.{number}")
    else:
        yield path, value


def _holds_any(path: str, fqns: Iterable[str]) -> bool:
    return any(fqn == path or fqn.startswith(f"{path}.") for fqn in fqns)
