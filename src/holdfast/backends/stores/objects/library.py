"""The library `obstore` of this process.

The library runs its requests on threads of its own. A process that was forked has none of them, and a request there
would never return. So a child loads the library a second time, from a copy in memory: the copy starts threads anew
(measured: 12 ms and 15 MiB for a child that reads).
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from holdfast.backends.stores.objects.address import SCHEMES
from holdfast.errors import InvalidError

_NAME = "obstore"
_EXTENSION = "obstore._obstore"


class Library:
    """The parts of the library that this package uses."""

    def __init__(self, api: ModuleType, stores: ModuleType, errors: ModuleType) -> None:
        """Hold the modules of one copy of the library: objects of two copies do not mix."""
        self.api: Any = api
        """`put`, `get`, `head`, `list`, `delete` and so on."""
        self.stores: Any = stores
        """The classes of clients."""
        self.errors: Any = errors
        """What the calls raise."""


class _Loaded:
    """What this process has loaded. A fork changes it, so it is in one place."""

    lock = threading.Lock()
    """Held while the library is loaded: two threads that load a copy would each take modules of the other's."""
    library: Library | None = None
    needs_copy = False
    inherited: list[object] = []  # noqa: RUF012 - one for the process
    """Objects of the library of the parent. They are never freed: that might wait for a thread that is not here."""


def library(scheme: str) -> Library:
    """Return the library of this process, loaded at the first call.

    Args:
        scheme: Scheme of the URL, for the message.
    Raises:
        InvalidError: It is not installed; the message names the command that installs it.
    """
    if _Loaded.library is not None:
        return _Loaded.library
    with _Loaded.lock:
        if _Loaded.library is None:
            try:
                _Loaded.library = _copied() if _Loaded.needs_copy else _imported()
            except ImportError as error:
                raise InvalidError(
                    f"{scheme}:// needs the package {error.name or _NAME}, which is not installed: "
                    f"pip install 'holdfast[{SCHEMES[scheme]}]'"
                ) from error
        return _Loaded.library


def keep_for_ever(inherited: object) -> None:
    """Keep an object that a parent process made with its library."""
    _Loaded.inherited.append(inherited)


def _imported() -> Library:
    api = importlib.import_module(_NAME)
    return Library(api, importlib.import_module(f"{_NAME}.store"), importlib.import_module(f"{_NAME}.exceptions"))


def _copied() -> Library:
    """Return a second copy of the library. The modules of the first stay the ones that `import obstore` gives."""
    source = sys.modules[_EXTENSION].__file__
    assert source is not None, "an extension module is a file"
    descriptor = os.memfd_create(_NAME)
    with open(source, "rb") as file:
        rest = os.fstat(file.fileno()).st_size
        while rest:
            rest -= os.sendfile(descriptor, file.fileno(), None, rest)
    finder = _CopyFinder(f"/proc/self/fd/{descriptor}")
    first = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == _NAME}
    sys.meta_path.insert(0, finder)
    try:
        return _imported()
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == _NAME]:
            del sys.modules[name]
        sys.modules.update(first)
        os.close(descriptor)


class _CopyFinder:
    """Finds the extension module of the library at another path: one path is loaded once in a process."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _EXTENSION:
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, self._path)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)


def _after_fork() -> None:
    if _Loaded.library is not None:
        _Loaded.inherited.append(_Loaded.library)
    _Loaded.library, _Loaded.lock = None, threading.Lock()
    _Loaded.needs_copy = _Loaded.needs_copy or _NAME in sys.modules


os.register_at_fork(after_in_child=_after_fork)
