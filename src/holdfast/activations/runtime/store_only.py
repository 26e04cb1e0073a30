"""A call whose backward never runs an op again: hooks for saved tensors around a plain forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from holdfast.activations.runtime.frame import CallFrame


def call_storing(frame: CallFrame, forward: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Return the output of a call, whose saved tensors a frame stores.

    Args:
        frame: Holds the call's stored tensors.
        forward: Takes the tensors of the arguments.
        tensors: The tensors of the arguments.
    """
    pack = partial(frame.pack, hooks=None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: token.unpack()):
        output = forward(*tensors)
    frame.end_forward()
    return output
