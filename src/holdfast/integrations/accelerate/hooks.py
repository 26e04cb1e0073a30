"""Hooks of `register_save_state_pre_hook` and `register_load_state_pre_hook`: a model that one takes is not ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import accelerate

from holdfast.errors import InvalidError
from holdfast.integrations.accelerate.ranks import agreed
from holdfast.integrations.accelerate.state import MODEL, numbered


def saved_by_hooks(accelerator: accelerate.Accelerator, folder: str) -> list[str]:
    """Run the hooks of a save; return the names of the models that they took out of `weights`. A collective.

    Whole weights are gathered only if there is a hook. What the main process takes counts: PEFT's and diffusers' hooks
    take weights there only.

    Raises:
        InvalidError: A hook changed weights and left them in place.
    """
    hooks = list(accelerator._save_model_state_pre_hook.values())
    if not hooks:
        return []

    def run() -> list[str]:
        models = list(accelerator._models)
        weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
        given = [(each, dict(each)) for each in weights]
        for hook in hooks:
            hook(models, weights, folder)
        return _taken(given, weights) if accelerator.is_main_process else []

    return agreed(run)


def loaded_by_hooks(accelerator: accelerate.Accelerator, folder: str) -> list[str]:
    """Run the hooks of a load; return the names of the models that they took out of `models` here. A collective."""
    hooks = list(accelerator._load_model_state_pre_hook.values())
    if not hooks:
        return []
    taken: list[str] = []

    def run() -> None:
        models = list(accelerator._models)
        for hook in hooks:
            hook(models, folder)
        for number, model in enumerate(accelerator._models):
            if not any(each is model for each in models):
                taken.append(numbered(MODEL, number))

    agreed(run)
    return taken


Weights = Mapping[str, object]


def _taken(given: Sequence[tuple[Weights, Weights]], weights: Sequence[object]) -> list[str]:
    """Return the names of the models whose weights are gone.

    Args:
        given: The weights of each model that the hooks got, and a copy of the dict from before.
        weights: What they left.
    Raises:
        InvalidError: They left something else.
    """
    taken = []
    for number, (state, before) in enumerate(given):
        if not any(each is state for each in weights) or (before and not state):
            taken.append(numbered(MODEL, number))
            continue
        changed = [key for key in {*state, *before} if key not in state or state[key] is not before.get(key)]
        if changed:
            raise _misuse(f"changed {sorted(map(str, changed))[0]!r} of {numbered(MODEL, number)}")
    if any(not any(each is state for state, _ in given) for each in weights):
        raise _misuse("put other weights in their place")
    return taken


def _misuse(what: str) -> InvalidError:
    return InvalidError(
        f"a hook of register_save_state_pre_hook {what}; expected that it leaves the weights of a model as they are, "
        "or takes them out and saves the model itself. Save the changed weights in the hook, then call weights.pop()"
    )
