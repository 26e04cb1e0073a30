"""Bytes of `torch.save` for callers whose interface demands them: made of values, and read by the allow-list alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holdfast._face.pieces.names import mapped
from holdfast.backends.foreign.file_layout import FileLayout, SmallTensor, TensorLeaf, small_tensor_of
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.torch.archive_reader import read_torch_file
from holdfast.backends.foreign.torch.archive_writer import put_archive
from holdfast.backends.foreign.values import to_value
from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.torch.containers import tensor_of
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.tensor_piece import TensorPiece
from holdfast.base.types.values import FrameworkValue, TensorRef, Value
from holdfast.errors import InvalidError

_FILE = "value"


@dataclass(frozen=True, slots=True)
class PickledValue:
    """A value as `torch.save` wrote it. Nothing in it is executed."""

    data: bytes
    """The bytes of the archive."""


def unpickled_value(pickled: PickledValue, name: str, add: Callable[[TensorPiece], None]) -> Value:
    """Return the neutral value of an archive; its tensors become pieces of their own.

    Args:
        pickled: The archive.
        name: Its name: those of its tensors begin with it.
        add: Takes the piece of each tensor.
    Raises:
        InvalidError: It is no archive of `torch.save`, or holds an object outside the allow-list.
        CorruptError: It is damaged.
    """
    store = MemoryStore(name)
    store.put(_FILE, pickled.data)
    remarks: list[str] = []

    def on_tensor(path: str, stored: StoredTensor) -> Value:
        add(TensorPiece(path, stored.shape, (0,) * len(stored.shape), _tensor(pickled.data, stored)))
        return TensorRef(path)

    try:
        value = to_value(read_torch_file(store, _FILE), name, on_tensor, remarks)
    except InvalidError as error:
        raise InvalidError(f"{name}: {error}. {_WAY_OUT}") from error
    if remarks:
        raise InvalidError(f"{remarks[0]}. {_WAY_OUT}")
    return value


_WAY_OUT = (
    "The planner makes bytes of it, which are read as plain values alone. Leave it out of the state, or use a planner "
    "that has lookup_object and leaves objects as they are"
)


def _tensor(data: bytes, stored: StoredTensor) -> object:
    bits = np.dtype(DTYPES[stored.dtype].numpy)
    if not stored.numel:
        return tensor_of(np.empty(stored.shape, bits), stored.dtype)
    strides = tuple(step * stored.itemsize for step in stored.strides)
    return tensor_of(np.ndarray(stored.shape, bits, data, stored.offset, strides).copy(), stored.dtype)


def torch_bytes(value: Value, name: str, read: Callable[[str], SmallTensor]) -> bytes:
    """Return the archive that `torch.save` would write of a value.

    Args:
        value: A neutral value, with leaves or references for tensors.
        name: Its name, for messages.
        read: Returns a stored tensor with its elements, by FQN.
    Raises:
        InvalidError: It holds a value that torch cannot load.
        CorruptError: It holds a small tensor whose fields are none.
    """

    def with_elements(leaf: object) -> object:
        if isinstance(leaf, TensorRef | TensorLeaf):
            return read(leaf.fqn)
        if isinstance(leaf, FrameworkValue) and leaf.kind == "torch.tensor":
            return small_tensor_of(leaf, name)
        return leaf

    layout = FileLayout()
    put_archive(layout, mapped(value, with_elements))
    file = layout.file("")
    content = bytearray(file.bytes)
    for start, data in file.literals:
        content[start : start + len(data)] = data
    return bytes(content)
