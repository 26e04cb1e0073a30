"""A box of a tensor with its memory, as a caller that has planned already names it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.base.geometry.box import Box
from holdfast.errors import InvalidError


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of a tensor, and the memory that holds its elements or takes them."""

    fqn: str
    """Name of the tensor."""

    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""

    start: tuple[int, ...]
    """First coordinate of the box."""

    tensor: object
    """A dense tensor of the box's shape, on any device."""

    def box(self, shape: tuple[int, ...]) -> Box:
        """Return the box, whose memory has a shape.

        Raises:
            InvalidError: It is not inside the tensor.
        """
        if len(shape) == len(self.start) == len(self.global_shape):
            box = Box(self.start, tuple(first + length for first, length in zip(self.start, shape, strict=True)))
            if min(self.start, default=0) >= 0 and Box.whole(self.global_shape).contains(box):
                return box
        raise InvalidError(
            f"{self.fqn}: a piece of shape {list(shape)} at {list(self.start)}; expected a box inside "
            f"{list(self.global_shape)}. Nothing was saved or loaded; correct the plan that names it"
        )
