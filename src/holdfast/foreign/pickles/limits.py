"""What was read, held against what a walk over it would cost: cycles, depth, and containers shared ever again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from holdfast.errors import InvalidError
from holdfast.foreign.pickles.objects import OpaqueObject
from holdfast.foreign.pickles.opcodes import CONTAINERS_MAX
from holdfast.foreign.pickles.tensors import StoredTensor

DEPTH_MAX = 200
"""Containers within one another; what is nested deeper could not be kept as values either."""

_VALUES_MIN = 1 << 20
_CONTAINERS = frozenset({list, dict, OrderedDict, Counter, tuple, set, frozenset})
"""Every type of container that is made of a pickle."""


def require_walkable(value: object, instances: Iterable[OpaqueObject], where: str, bytes_read: int) -> None:
    """Refuse values over which a plain walk would not end, go too deep, or take out of all proportion.

    Args:
        value: What was read.
        instances: Every object in it; what each holds is looked at by itself.
        where: Its file, for messages.
        bytes_read: Bytes that it was read from, of which each makes one value at most.
    Raises:
        InvalidError: A container holds itself, is nested deeper than `DEPTH_MAX`, or shared so that a walk would meet
            many more values than there are.
    """
    walk = _Walk(where, _VALUES_MIN + bytes_read)
    walk.over(value)
    for each in instances:
        for part in (each.args, each.state, each.items):
            walk.over(part)


class _Walk:
    """The plain walk itself, as far as it may go: what is shared is entered each time, and nothing is written down."""

    def __init__(self, where: str, values_max: int) -> None:
        self._where = where
        self._values_max = self._values_left = values_max
        self._containers_left = CONTAINERS_MAX
        self._open: set[int] = set()

    def over(self, root: object) -> None:
        """Walk what hangs on a value, without recursion."""
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
        """Return what a container holds; of a dict the values, since keys are small and hold little."""
        assert isinstance(container, dict | list | tuple | set | frozenset)
        if id(container) in self._open:
            kind = type(container).__name__
            raise InvalidError(f"{self._where}: a {kind} in it holds itself; save values without cycles")
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
            f"{self._where}: containers shared so often that they amount to over {most}; expected fewer in a file of "
            "its size. Save without sharing"
        )
