"""What was read, held against what a walk over it would cost: cycles, depth, and containers shared ever again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from holdfast.errors import InvalidError
from holdfast.formats.inert import Instance

DEPTH_MAX = 200
"""Containers within one another; what is nested deeper could not be kept as values either."""

_VALUES_MIN = 1 << 20
_VALUES_PER_BYTE = 4
_CONTAINERS = frozenset({list, dict, OrderedDict, Counter, tuple, set, frozenset})
"""Every type of container that is made of a pickle."""


def require_walkable(value: object, instances: Iterable[Instance], where: str, data_bytes: int) -> None:
    """Refuse values over which a plain walk would not end, go too deep, or take out of all proportion.

    Args:
        value: What was read.
        instances: Every object in it; what each holds is looked at by itself.
        where: Its file, for messages.
        data_bytes: Bytes that it was read from.
    Raises:
        InvalidError: A container holds itself, is nested deeper than `DEPTH_MAX`, or shared so that a walk would meet
            many more values than there are.
    """
    walk = _Walk(where, _VALUES_MIN + _VALUES_PER_BYTE * data_bytes)
    walk.over(value)
    for each in instances:
        for part in (each.args, each.state, each.items):
            walk.over(part)


class _Walk:
    """Counts values below each container, every container once."""

    def __init__(self, where: str, values_max: int) -> None:
        self._where, self._values_max = where, values_max
        self._known: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()

    def over(self, root: object) -> None:
        """Walk what hangs on a value, without recursion."""
        if type(root) not in _CONTAINERS or id(root) in self._known:
            return
        path: list[tuple[object, Iterator[object], int, int]] = [(root, _below(root), 1, 0)]
        self._open.add(id(root))
        while path:
            container, children, count, height = path.pop()
            for child in children:
                if type(child) not in _CONTAINERS:
                    count += 1
                    continue
                known = self._known.get(id(child))
                if known is None:
                    self._require_new(child, len(path))
                    path.append((container, children, count, height))
                    container, children, count, height = child, _below(child), 1, 0
                    path.append((container, children, count, height))
                    break
                count, height = count + known[0], max(height, known[1])
            else:
                self._close(container, count, height + 1)
                if path:
                    above, siblings, total, tallest = path.pop()
                    path.append((above, siblings, total + count, max(tallest, height + 1)))

    def _require_new(self, child: object, depth: int) -> None:
        if id(child) in self._open:
            raise InvalidError(
                f"{self._where}: a {type(child).__name__} in it holds itself; save values without cycles"
            )
        if depth >= DEPTH_MAX:
            raise InvalidError(f"{self._where}: values nested deeper than {DEPTH_MAX}; flatten them, then save again")
        self._open.add(id(child))

    def _close(self, container: object, count: int, height: int) -> None:
        if height > DEPTH_MAX:
            raise InvalidError(f"{self._where}: values nested deeper than {DEPTH_MAX}; flatten them, then save again")
        if count > self._values_max:
            raise InvalidError(
                f"{self._where}: containers shared so often that they amount to {count} values; expected at most "
                f"{self._values_max} for a file of its size. Save without sharing"
            )
        self._open.remove(id(container))
        self._known[id(container)] = (count, height)


def _below(container: object) -> Iterator[object]:
    """Return what a container holds; of a dict the values, since keys are small and hold little."""
    assert isinstance(container, dict | list | tuple | set | frozenset)
    return iter(container.values() if isinstance(container, dict) else container)
