"""What a checkpoint of Lightning holds: its dict becomes a state of Holdfast, and a state becomes its dict again."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from holdfast import PerRank, RngState, Sharded
from holdfast.api import Checkpoint
from holdfast.errors import InvalidError, first_three
from holdfast.integrations.host import MARK, Host, mark_of

logger = logging.getLogger(__name__)

HOST = Host(
    integration="lightning",
    package="lightning",
    extra="lightning",
    tested_from=(2, 6, 6),
    tested_to=(2, 6, 6),
    model_key="state_dict",
)

ATTRIBUTES = "holdfast_state_dict_attributes"
"""Key of what the state dict of a model carries as attributes of the dict: the versions of its modules."""

_LIGHTNINGS_KEY = "pytorch-lightning_version"


def values_state(checkpoint: Mapping[str, object], skip: tuple[str, ...]) -> dict[str, object]:
    """Return the state of a checkpoint that Lightning has turned into values already.

    Args:
        checkpoint: What Lightning gave to its `CheckpointIO`.
        skip: Patterns of names that are left out.
    Raises:
        InvalidError: It holds an object, of which a load would return something else.
    """
    require_free_keys(checkpoint)
    refused = [text for key, value in checkpoint.items() for text in _objects_in(value, str(key))]
    if refused:
        raise InvalidError(f"{len(refused)} objects of the checkpoint are no values: {first_three(refused)}")
    state = {**checkpoint, MARK: HOST.mark()}
    attributes = getattr(checkpoint.get("state_dict"), "__dict__", None)
    if attributes and "state_dict" not in skip:
        state[ATTRIBUTES] = dict(attributes)
    return state


def warn_of_accumulation(checkpoint: Mapping[str, Any], path: object) -> None:
    """Log a warning if Lightning saves between two optimizer steps: its checkpoints hold no gradients.

    No error: Lightning saves while another error ends a training, and that error must not be hidden.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    batches = loops.get("epoch_loop.batch_progress")
    progress = loops.get("epoch_loop.automatic_optimization.optim_progress")
    if batches is None or progress is None or "optimizer_states" not in checkpoint:
        return
    steps, cleared = (progress["optimizer"][key]["current"]["completed"] for key in ("step", "zero_grad"))
    # The first batch of a step clears the gradients. Without accumulation there are as many batches as steps.
    if cleared > steps and batches["current"]["processed"] > steps:
        logger.warning(
            "%s: saved in the middle of gradient accumulation, and the gradients are not saved: a training that "
            "resumes from it steps with those of the remaining batches alone. Resume from an older checkpoint, or "
            "save after optimizer steps: val_check_interval as a multiple of accumulate_grad_batches",
            path,
        )


def lightning_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict that Lightning saved, from the state that was read."""
    checkpoint = dict(state)
    checkpoint.pop(MARK, None)
    attributes = checkpoint.pop(ATTRIBUTES, None)
    model = checkpoint.get("state_dict")
    if attributes is not None and isinstance(model, dict):
        # `load_state_dict` of a module asks for the versions, to read what older ones of it have saved.
        checkpoint["state_dict"] = OrderedDict(model)
        vars(checkpoint["state_dict"]).update(attributes)
    optimizers = checkpoint.get("optimizer_states")
    if isinstance(optimizers, dict):
        # A strategy saved a list of optimizers, by name. One of torch takes their state by the order of parameters.
        checkpoint["optimizer_states"] = [optimizers[str(number)] for number in range(len(optimizers))]
    return checkpoint


def require_readable(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of Holdfast that another integration wrote, or a job of its own.

    One without a mark is taken if Lightning's version stands in it: a `CheckpointIO` of a user's own has saved it.

    Raises:
        InvalidError: It names who wrote it.
    """
    if checkpoint.origin is not None or (mark_of(checkpoint) is None and _LIGHTNINGS_KEY in checkpoint.objects):
        return
    HOST.require_own(checkpoint)


def with_way_out(error: InvalidError, who: str) -> InvalidError:
    """Return an error of a save with what a user of Lightning can do about it.

    Args:
        error: What Holdfast refused.
        who: The class that has the argument `skip`.
    """
    if "cannot be saved" not in str(error):
        return error
    explained = InvalidError(
        f"{error}. skip is an argument of {who}. Hyperparameters are left out by "
        "self.save_hyperparameters(ignore=[…]); a callback or a hook saves plain values and tensors"
    )
    explained.__cause__ = error
    return explained


def require_free_keys(checkpoint: Iterable[str]) -> None:
    """Refuse keys that Holdfast uses.

    Raises:
        InvalidError: Names the key.
    """
    taken = {MARK, ATTRIBUTES} & set(checkpoint)
    if taken:
        raise InvalidError(f"the checkpoint has the key {taken.pop()!r}, which Holdfast uses; expected another name")


def _objects_in(value: object, path: str) -> Iterator[str]:
    """Yield path and advice of each object in a value whose state would be saved in its place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _objects_in(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _objects_in(item, f"{path}.{number}")
    elif isinstance(value, PerRank | RngState | Sharded):
        yield f"{path}: a {type(value).__name__}; one rank saves for all here, so expected one value for all of them"
    elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        name = path.rpartition(".")[2]
        advice = (
            f"leave it out: self.save_hyperparameters(ignore=[{name!r}])"
            if "hyper_parameters" in path
            else "save its state_dict(), and load it in the hook of the load"
        )
        yield f"{path}: a load would return the state of this {type(value).__name__}, and not the object; {advice}"
