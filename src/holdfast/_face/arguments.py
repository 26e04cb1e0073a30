"""Checks the arguments of public functions and converts them to internal values."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import cast

from holdfast import policies
from holdfast.base.ports.framework import Selection
from holdfast.core.format.names import require_step
from holdfast.errors import InvalidError
from holdfast.settings import Differential, Preemption

Globs = Sequence[str] | str | None
"""One or several FQN patterns, as in `fnmatch`."""

TagNames = Iterable[str] | str
"""One or several tags."""


def require_state(state: object, call: str) -> None:
    """Refuse a state that is not a dict.

    Raises:
        InvalidError: The state is of another type.
    """
    if not isinstance(state, Mapping):
        hint = "; the arguments are swapped" if isinstance(state, str | int | PathLike) else ""
        raise InvalidError(f"{call}: state is {type(state).__name__}; expected a dict of what to save or load{hint}")


def require_save_arguments(step: object, state: object, call: str) -> None:
    """Refuse a step that is no step, and a state that is not a dict.

    Raises:
        InvalidError: One of them is of another type, or the step is out of range.
    """
    if isinstance(step, Mapping):
        raise InvalidError(f"{call}: step is a dict, so the arguments are swapped; pass the step first")
    require_state(state, call)
    require_step(step)


def selection_of(
    only: Globs,
    skip: Globs,
    grads: bool,
    partial: Iterable[str] | None = None,
    *,
    hyperparameters: bool = True,
    cast: bool = False,
) -> Selection:
    """Return the names that a call saves or loads, whether gradients are among them, and how a load fills them.

    Raises:
        InvalidError: A pattern is not text, or `only` has none.
    """
    chosen = None if only is None else patterns_of("only", only)
    if chosen == ():
        raise InvalidError(f"only={only!r}: selects nothing; expected at least one pattern. None selects everything")
    return Selection(
        only=chosen,
        skip=() if skip is None else patterns_of("skip", skip),
        grads=bool(grads),
        # Sorted: a set has another order on each rank.
        partial=() if partial is None else tuple(sorted({*patterns_of("partial", partial)})),
        hyperparameters=bool(hyperparameters),
        cast=bool(cast),
    )


def patterns_of(name: str, globs: Iterable[str] | str) -> tuple[str, ...]:
    """Return the patterns in an argument.

    Raises:
        InvalidError: The argument is not iterable, or a pattern is not text.
    """
    if not isinstance(globs, Iterable):
        raise InvalidError(f"{name}: {type(globs).__name__}; expected FQN patterns such as 'optimizer.*'")
    patterns = (globs,) if isinstance(globs, str) else tuple(globs)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidError(f"{name}: pattern {pattern!r}; expected FQN patterns such as 'optimizer.*'")
    return patterns


def policies_of(save: object, every: object, keep: object, keep_last: object) -> policies.Policies:
    """Return the save and keep policies, from policies or their short forms.

    Raises:
        InvalidError: A policy and its short form are both given, or a policy is of the wrong kind.
    """
    if save is not None and every is not None:
        raise InvalidError(f"save={save!r} and every={every!r}: expected one of them; both say when to save")
    if keep is not None and keep_last is not None:
        raise InvalidError(f"keep={keep!r} and keep_last={keep_last!r}: expected one of them; both say what to keep")
    if every is not None:
        save = policies.AnyOf(policies.EveryNSteps(_require_count("every", every)), policies.OnRequest())
    if keep_last is not None:
        keep = policies.AnyOf(policies.LatestN(_require_count("keep_last", keep_last)), policies.Tagged())
    _require_rules("save", save, policies.SAVE_RULES, "when to save, such as EveryNSteps(100)", "keep")
    _require_rules("keep", keep, policies.KEEP_RULES, "what to keep, such as LatestN(3)", "save")
    return policies.Policies(cast(policies.SavePolicy | None, save), cast(policies.KeepPolicy | None, keep))


def preemption_of(preemption: object) -> Preemption | None:
    """Return the signals on which a loop ends, or None.

    Raises:
        InvalidError: The argument is of another type, or this is not the main thread.
    """
    if preemption is True:
        return Preemption()
    if preemption is False:
        return None
    if not isinstance(preemption, Preemption):
        raise InvalidError(f"preemption={str(preemption)[:80]!r}: expected True, False or holdfast.Preemption(…)")
    if threading.current_thread() is not threading.main_thread():
        raise InvalidError(
            f"preemption={preemption}: this is thread {threading.current_thread().name}, and Python handles signals on "
            "the main thread only. Make the manager and run the loop there, or pass preemption=False"
        )
    return preemption


def differential_of(differential: object) -> Differential | None:
    """Return how the redo log is kept, or None.

    Raises:
        InvalidError: The argument is of another type.
    """
    if differential is True:
        return Differential()
    if differential is False:
        return None
    if not isinstance(differential, Differential):
        raise InvalidError(f"differential={str(differential)[:80]!r}: expected True, False or holdfast.Differential(…)")
    return differential


def require_bool(name: str, value: object) -> None:
    """Refuse an argument that is neither True nor False.

    Raises:
        InvalidError: It is of another type.
    """
    if not isinstance(value, bool):
        raise InvalidError(f"{name}={str(value)[:80]!r} ({type(value).__name__}); expected True or False")


def _require_count(name: str, value: object) -> int:
    if not policies.is_whole(value) or value < 1:
        raise InvalidError(f"{name}={value!r}; expected a positive whole number, or leave it out")
    return int(value)


def _require_rules(name: str, policy: object, kinds: tuple[type, ...], expected: str, other: str) -> None:
    for rule in policies.rules_of(policy):
        if policy is None or isinstance(rule, kinds):
            continue
        is_other = isinstance(rule, policies.SAVE_RULES + policies.KEEP_RULES)
        hint = f". Give it as {other}=" if is_other else " (holdfast.policies)"
        raise InvalidError(f"{name}={str(rule)[:80]}: expected a policy that says {expected}{hint}")
