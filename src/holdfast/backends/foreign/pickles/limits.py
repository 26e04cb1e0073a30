"""Refuses unpickled values that a plain walk cannot visit in bounded time: cycles, depth, heavily shared containers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from holdfast.backends.foreign.pickles.objects import OpaqueObject
from holdfast.backends.foreign.pickles.opcodes import CONTAINERS_MAX
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.errors import InvalidError

DEPTH_MAX = 200
"""Largest depth of containers. Values could not store deeper ones either."""

_VALUES_MIN = 1 << 20
_CONTAINERS = frozenset({list, dict, OrderedDict, Counter, tuple, set, frozenset})
"""All types of containers that the machine makes."""


def require_walkable(value: object, objects: Iterable[OpaqueObject], where: str, bytes_read: int) -> None:
    """Refuse a value if a plain walk over it would not end, go too deep, or meet too many values.

    Args:
        value: The unpickled value.
        objects: All opaque objects in it. The content of each is checked by itself.
        where: The file, for messages.
        bytes_read: Bytes of the pickle. Each byte makes at most one value.
    Raises:
        InvalidError: A container contains itself, is nested deeper than `DEPTH_MAX`, or is shared so often that a walk
            would meet many more values than the pickle has bytes.
    """
    walk = _Walk(where, _VALUES_MIN + bytes_read)
    walk.over(value)
    for opaque in objects:
        for part in (opaque.args, opaque.state, opaque.items):
            walk.over(part)


class _Walk:
    """A plain walk with limits. It visits shared containers again each time, like every reader of the value."""

    def __init__(self, where: str, values_max: int) -> None:
        self._where = where
        self._values_max = self._values_left = values_max
        self._containers_left = CONTAINERS_MAX
        self._open: set[int] = set()

    def over(self, root: object) -> None:
        """Visit all values inside a value, without recursion."""
        if type(root) not in _CONTAINERS:
            return
        path = [(root, self._entered(root, 0))]
        while path:
            container, children = path[-1]
            for child in children:
                kind = type(child)
                if kind in _CONTAINERS:
                    if child:
                        path.append((child, self._entered(child, len(path))))
                        break
                    self._count_container()
                elif kind is StoredTensor:
                    self._count_container()
            else:
                self._open.remove(id(container))
                path.pop()

    def _entered(self, container: object, depth: int) -> Iterator[object]:
        """Return the content of a container. Keys of dicts are left out: their size is limited already."""
        assert isinstance(container, dict | list | tuple | set | frozenset)
        if id(container) in self._open:
            kind = type(container).__name__
            raise InvalidError(f"{self._where}: a {kind} contains itself; save values without cycles")
        if depth >= DEPTH_MAX:
            raise InvalidError(f"{self._where}: values nested deeper than {DEPTH_MAX}; flatten them, then save again")
        self._open.add(id(container))
        self._count_container()
        self._values_left -= len(container)
        if self._values_left < 0:
            self._refuse(f"{self._values_max} values")
        return iter(container.values() if isinstance(container, dict) else container)

    def _count_container(self) -> None:
        self._containers_left -= 1
        if self._containers_left < 0:
            self._refuse(f"{CONTAINERS_MAX} containers and tensors")

    def _refuse(self, most: str) -> None:
        raise InvalidError(
            f"{self._where}: containers are shared so often that a walk meets over {most}; expected fewer in a file "
            "of its size. Save without sharing"
        )
