"""The JSON of a comparison, which `holdfast diff` and the page share."""

from __future__ import annotations

import math
from collections import Counter

from holdfast.base.types.diff import Diff, NameOnly, TensorDiff, ValueDiff, Verdict
from holdfast.offline.diff.values import value_document


def diff_document(result: Diff) -> dict[str, object]:
    """Return the differences between two checkpoints as JSON, as `holdfast diff --json` prints them.

    Example:
        before, after = (holdfast.open_checkpoint("run-7", step=step) for step in (100, 300))
        print(holdfast.api.diff_document(holdfast.diff(before, after))["tensor_counts"])
    """
    counts = Counter(tensor.verdict for tensor in result.tensors)
    return {
        **_attributes(result, "a", "b", "equal"),
        "tensor_counts": {verdict.value: counts[verdict] for verdict in Verdict},
        "tensors": {tensor.fqn: _tensor(tensor) for tensor in result.tensors},
        "only_a": [_name(name) for name in result.only_a],
        "only_b": [_name(name) for name in result.only_b],
        "ties": [_attributes(tie, "name", "a", "b") for tie in result.ties],
        "values": [_value(value) for value in result.values],
        **_attributes(result, "read_bytes", "settled_bytes"),
    }


def _tensor(tensor: TensorDiff) -> dict[str, object]:
    document = {"verdict": tensor.verdict.value, **_attributes(tensor, "dtype", "shape", "settled_bytes")}
    change = tensor.change
    if change is not None:
        document |= {
            "changed": change.changed,
            "changed_fraction": change.changed / tensor.numel,
            "unmeasured": change.unmeasured,
            "max_absolute": _finite(change.max_absolute),
            "max_relative": _finite(change.max_relative),
            "norm_difference": _finite(change.norm_difference),
        }
        if not tensor.settled_bytes:
            norms = [_finite(change.norm_a), _finite(change.norm_b)]
            document |= {"norm": norms, **_attributes(change, "nan", "inf")}
    return document


def _name(name: NameOnly) -> dict[str, object]:
    return {"name": name.fqn, **_attributes(name, "dtype", "shape", "tied_to")}


def _value(value: ValueDiff) -> dict[str, object]:
    document: dict[str, object] = {"path": value.path}
    if value.in_a:
        document["a"] = value_document(value.a)
    if value.in_b:
        document["b"] = value_document(value.b)
    return document


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _attributes(record: object, *names: str) -> dict[str, object]:
    return {name: getattr(record, name) for name in names}
