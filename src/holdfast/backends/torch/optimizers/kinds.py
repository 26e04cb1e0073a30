"""Classes of optimizers: which state keys each uses, and whether saved state fits another class."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch.optim import Optimizer

from holdfast.backends.torch.optimizers.state import OptimizerView
from holdfast.base.ports.framework import Misfit
from holdfast.base.types.manifest import OptimizerRecord
from holdfast.errors import first_three

_Keys = tuple[frozenset[str], frozenset[str]]
"""Keys that a class always has once it has stepped, and keys that it has under some hyperparameters."""


def _keys(always: str, sometimes: str = "") -> _Keys:
    return frozenset(always.split()), frozenset(sometimes.split())


_ADAM = _keys("step exp_avg exp_avg_sq", "max_exp_avg_sq")
_KEYS: dict[str, dict[str, _Keys]] = {
    "torch": {
        "ASGD": _keys("step eta mu ax"),
        "Adadelta": _keys("step square_avg acc_delta"),
        "Adafactor": _keys("step", "row_var col_var variance"),
        "Adagrad": _keys("step sum"),
        "Adam": _ADAM,
        "AdamW": _ADAM,
        "Adamax": _keys("step exp_avg exp_inf"),
        "LBFGS": _keys("", "func_evals n_iter d t old_dirs old_stps ro H_diag prev_flat_grad prev_loss al"),
        "Muon": _keys("", "momentum_buffer"),
        "NAdam": _keys("step mu_product exp_avg exp_avg_sq"),
        "RAdam": _keys("step exp_avg exp_avg_sq"),
        "RMSprop": _keys("step square_avg", "momentum_buffer grad_avg"),
        "Rprop": _keys("step prev step_size"),
        "SGD": _keys("", "momentum_buffer"),
        "SparseAdam": _keys("step exp_avg exp_avg_sq"),
    },
    "torchao": {"_AdamBase": _ADAM},
    # These two keep the step count among the hyperparameters in some versions.
    "apex": {"FusedAdam": _keys("exp_avg exp_avg_sq", "step")},
    "deepspeed": {"FusedAdam": _keys("exp_avg exp_avg_sq", "step"), "DeepSpeedCPUAdam": _ADAM},
    "bitsandbytes": {
        "Optimizer1State": _keys("step state1", "qmap1 max1 new_max1 absmax1 gnorm_vec unorm_vec"),
        "Optimizer2State": _keys(
            "step state1 state2", "qmap1 qmap2 max1 max2 new_max1 new_max2 absmax1 absmax2 gnorm_vec unorm_vec"
        ),
    },
}
"""Keys by the package and name of a class. A class derived from one of these counts as it."""

SWITCHES = frozenset({"amsgrad", "centered", "decoupled_weight_decay", "maximize", "momentum", "nesterov"})
"""Hyperparameters that switch a part of the algorithm on or off, by truth value.

A load that changes one of them would change the training without a word. Of the others, schedules change the numbers,
and `fused` and its like choose an implementation.
"""


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a checkpoint states, or shows, of an optimizer."""

    record: OptimizerRecord | None
    """Class and keys; None if the checkpoint does not state them."""

    keys: frozenset[str]
    """Keys of its state."""


def class_name_of(view: OptimizerView) -> str:
    """Return the class of the optimizers that step the parameters, with module; several are joined by `+`."""
    return "+".join(sorted({_qualified(type(member)) for member in view.members.steppers()}))


def misfit_of(view: OptimizerView, saved: SavedState) -> Misfit | None:
    """Return why saved state does not fit an optimizer, or None if it does, or if nothing is known of its class.

    Args:
        view: The optimizer to fill.
        saved: The saved state.
    """
    own = class_name_of(view)
    if saved.record is not None and {*own.split("+")} <= {*saved.record.class_name.split("+")}:
        return None
    kinds = [type(member) for member in view.members.steppers()]
    tables = [_keys_of(kind) for kind in kinds]
    present = {key for parameter in view.names for key in view.members.state_of(parameter, view.path)}
    known = [table for table in tables if table is not None]
    if len(known) < len(tables) and not present:
        if saved.record is None:
            return None
        text = f"{_saved_text(view, saved)}; {own} may use other state, which Holdfast does not know"
        return Misfit(text, is_certain=False)
    allowed = present.union(*(always | sometimes for always, sometimes in known))
    always = known[0][0] if len(tables) == len(known) == 1 else frozenset[str]()
    if _fits(saved, allowed, always):
        return None
    uses = first_three(sorted(allowed)) or "nothing"
    return Misfit(
        f"{_saved_text(view, saved)}; {own} keeps {uses}. Load it into the class that was saved, or leave the "
        "optimizer out with skip=",
        is_certain=saved.record is not None,
    )


def _fits(saved: SavedState, allowed: AbstractSet[str], always: frozenset[str]) -> bool:
    """Return whether an optimizer goes on from saved state: it knows all keys, and lacks none."""
    if saved.keys:
        return saved.keys <= allowed and always <= saved.keys
    # Nothing was saved: the class had not stepped, or keeps nothing under its hyperparameters.
    names = [] if saved.record is None else saved.record.class_name.split("+")
    tables = [_KEYS.get(name.partition(".")[0], {}).get(name.rpartition(".")[2]) for name in names]
    return not tables or any(table is None or table[0] == always for table in tables)


def _saved_text(view: OptimizerView, saved: SavedState) -> str:
    of = "another system or an older Holdfast" if saved.record is None else saved.record.class_name
    return f"{view.path}: was saved by {of}, with state {first_three(sorted(saved.keys)) or 'of no parameter'}"


def _keys_of(kind: type[Optimizer]) -> _Keys | None:
    for base in kind.__mro__:
        known = _KEYS.get(base.__module__.partition(".")[0], {}).get(base.__name__)
        if known is not None:
            return known
    return None


def _qualified(kind: type[Optimizer]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
