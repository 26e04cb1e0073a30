"""Forms of optimizer state: whether that of an optimizer fits what was saved, and the dtype of state not made yet."""

from __future__ import annotations

import math

import torch

from holdfast.backends.torch.optimizers.state import OptimizerView
from holdfast.backends.torch.tensors import torch_dtype
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import Catalog, Misfit

_GROWING_STATE = "holdfast_growing_state"
"""Attribute of an optimizer's class: keys of state whose shape changes with the steps, such as a history."""

_COUNTS = frozenset({"step", "eta", "mu", "mu_product"})
"""Keys of torch's optimizers whose dtype is not that of the parameter."""


class StateForms:
    """The forms of the state of one optimizer."""

    def __init__(self, view: OptimizerView, catalog: Catalog, *, casts: bool) -> None:
        """Find what the classes of the optimizer say.

        Args:
            view: The optimizer.
            catalog: The checkpoint.
            casts: Whether the load converts dtypes.
        """
        self._view, self._catalog, self._casts = view, catalog, casts
        kinds = {type(member) for member in view.members.steppers()}
        self._are_of_torch = all(kind.__module__.startswith("torch.optim.") for kind in kinds)
        self._are_fused = any(group.get("fused") for member in view.members.steppers() for group in member.param_groups)
        self._growing = {key for kind in kinds for key in getattr(kind, _GROWING_STATE, ())}

    def saved_parameter(self, name: str) -> TensorSpec | None:
        """Return a parameter as it was saved; None if the checkpoint lacks it."""
        return self._catalog.tensors.get(self._catalog.stored_fqn(self._view.whole_name(name)))

    def new_dtype(self, name: str, parameter: torch.Tensor, key: str, stored: TensorSpec) -> torch.dtype:
        """Return the dtype of state that is not made yet: the saved one, or under `cast` that which a step would make.

        torch's own optimizers keep all but counts in the dtype of the parameter. Of another class, the checkpoint shows
        it: state in the dtype of its parameter follows the parameter, and state in a dtype of its own keeps it.

        Args:
            name: Name of the parameter.
            parameter: The parameter.
            key: Key of the state.
            stored: The state as it was saved.
        """
        saved, own = torch_dtype(stored.dtype), parameter.dtype
        if self._casts and self._are_of_torch and key in _COUNTS:
            is_double = torch.get_default_dtype() == torch.float64 and not self._are_fused
            return torch.float64 if is_double else torch.float32
        are_unlike = saved.is_complex != own.is_complex or saved.is_floating_point != own.is_floating_point
        if not self._casts or key == "step" or are_unlike:
            return saved
        if self._are_of_torch:
            return own
        may_count = not stored.global_shape and parameter.ndim > 0
        stored_parameter = self.saved_parameter(name)
        follows = stored_parameter is not None and stored_parameter.dtype == stored.dtype and not may_count
        return own if follows else saved

    def differ(self, key: str, present: object, shape: tuple[int, ...] | None) -> bool:
        """Return whether an optimizer keeps a container where a tensor was saved, the reverse, or another shape.

        Other values, and what is empty, stand for state that is not made yet. One element is a count in another form.

        Args:
            key: Key of the state.
            present: What the optimizer keeps.
            shape: Another shape than that of `present`, if a tensor was saved; None if a container was.
        """
        if key in self._growing:
            return False
        if not isinstance(present, torch.Tensor):
            return shape is not None and isinstance(present, dict | list | tuple) and bool(present)
        if shape is None:
            return present.numel() > 0
        fewer, more = sorted((present.numel(), math.prod(shape)))
        return fewer > 0 and more > 1

    @staticmethod
    def misfit(fqn: str, present: object, saved: str) -> Misfit:
        """Return why state does not take the place of what the optimizer keeps."""
        here = tuple(present.shape) if isinstance(present, torch.Tensor) else f"a {type(present).__name__}"
        text = (
            f"{fqn}: {here} here and {saved} in the checkpoint (build the optimizer as it was saved, or pass one that "
            f"has not stepped; the class may name keys of state that grows in {_GROWING_STATE})"
        )
        return Misfit(text, is_certain=True, fqn=fqn, is_shape=True)
