"""The units of a model: repeated blocks, or the modules that the caller names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import InvalidError, first_three, printable


def inside_ddp(model: nn.Module) -> nn.Module:
    """Return the model that DDP wraps, so that a plan has one name for a unit with and without DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def units_of(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Return the FQNs of the units, in the order of the modules.

    Args:
        model: The model.
        patterns: Globs of FQNs, in which a star stands for one part of a name; None: the repeated blocks.
    Raises:
        InvalidError: There are no repeated blocks, a pattern matches no module, or a unit is inside another.
    """
    if patterns is None:
        found = _repeated(model)
        if not found:
            raise InvalidError(
                "units=None: the model has no ModuleList or Sequential of alike blocks; expected repeated blocks. Pass "
                'globs of module names, such as units=["encoder.*"]'
            )
        return found
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise InvalidError(f"units={patterns!r}: expected a list of globs. Pass [{str(patterns)!r}]")
    names = [name for name, _ in model.named_modules() if name]
    found = []
    for pattern in patterns:
        globs = str(pattern).split(".")
        alike = ((name, name.split(".")) for name in names if name.count(".") == len(globs) - 1)
        matched = [name for name, parts in alike if all(map(fnmatchcase, parts, globs))]
        if not matched:
            raise InvalidError(
                f"units: {printable(str(pattern))[:80]!r} matches no module; expected one, such as {first_three(names)}"
            )
        found += [name for name in matched if name not in found]
    for name in found:
        outer = next((each for each in found if name.startswith(f"{each}.")), None)
        if outer is not None:
            raise InvalidError(f"units: {name} is inside {outer}; expected units apart from each other. Name one")
    return [name for name in names if name in found]


def _repeated(model: nn.Module) -> list[str]:
    """Return the members of the longest lists of alike blocks. No member is inside another."""
    lists: list[list[str]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            alike: dict[object, list[str]] = {}
            for key, member in module.named_children():
                shapes = tuple(each.shape for each in member.parameters())
                if shapes:
                    alike.setdefault((type(member), shapes), []).append(f"{name}.{key}" if name else key)
            lists += [members for members in alike.values() if len(members) > 1]
    # Of two lists, the one with more members; of equal ones the outer one, which comes first.
    chosen: list[str] = []
    for members in sorted(lists, key=len, reverse=True):
        if not any(one.startswith(f"{each}.") or each.startswith(f"{one}.") for one in members for each in chosen):
            chosen += [name for name in members if name not in chosen]
    return [name for name, _ in model.named_modules() if name in chosen]
