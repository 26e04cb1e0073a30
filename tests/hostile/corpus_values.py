"""Crafted non-tensor state: tags, groups, framework values, references."""

from __future__ import annotations

import base64
from typing import Any

from tests.hostile.cases import HARMLESS, Case
from tests.hostile.crafting import Crafted, Document

HUGE = {"$int": "0x" + "f" * 20_000}


def _note(value: object) -> Any:
    """Put a document where a text was saved."""
    return lambda crafted: crafted.edit_state(lambda items: items.update(note=value))


def _framework(kind: object, value: object) -> object:
    return {"$framework": {"kind": kind, "value": value}}


def _tensor(**fields: object) -> object:
    good = {"dtype": "float32", "shape": {"$tuple": [2]}, "data": {"$bytes": base64.b64encode(bytes(8)).decode()}}
    return _framework("torch.tensor", {**good, **fields})


def _optimizer(change: Any) -> Any:
    return lambda crafted: crafted.edit_state(lambda items: change(items["optimizer"]["$group"]["items"]))


def _every_group(**values: object) -> Any:
    def change(items: Document) -> None:
        for table in items["hyperparameters"].values():
            table.update(values)

    return _optimizer(change)


def _extra_state(value: object) -> Any:
    return lambda crafted: crafted.edit_state(
        lambda items: items["model"]["$group"]["items"].update({"1._extra_state": value})
    )


def _differing_hugely(items: Document) -> None:
    (table,) = items["hyperparameters"].values()
    for number, name in enumerate(items["param_groups"]):
        items["hyperparameters"][str(number)] = {**table, "lr": {"$int": "0x" + "f" * (5000 + number)}}
        items["param_groups"][name] = str(number)


def _array(dtype: str = "<f4", shape: object = (2,), data: bytes = bytes(8)) -> object:
    return {"$ndarray": {"dtype": dtype, "shape": shape, "data": base64.b64encode(data).decode()}}


def _nested(levels: int, wrap: Any) -> object:
    value: object = 1
    for _ in range(levels):
        value = wrap(value)
    return value


def _own(change: Any) -> Any:
    """Change what rank 0 kept as its own, in its part."""
    import json

    def craft(crafted: Crafted) -> None:
        def edit(part: Document) -> None:
            document = json.loads(part["per_rank"])
            part["per_rank"] = json.dumps(change(document), separators=(",", ":")).encode()

        crafted.edit_part(edit)

    return craft


def _numpy_state(change: Any) -> Any:
    def edit(document: Document) -> Document:
        parts = document["rng"]["numpy"]["$tuple"]
        change(parts)
        return document

    return _own(edit)


def _python_state(value: object) -> Any:
    def edit(document: Document) -> Document:
        document["rng"]["python"] = value
        return document

    return _own(edit)


# What `open` refuses: no value encodes to it.
MALFORMED = {
    "an unknown tag": {"$pickle": "gASVAAAA"},
    "two tags": {"$int": "0x10000000000000000", "$str": "7aCA"},
    "$int small": {"$int": "0x5"},
    "$int in decimal": {"$int": "99999999999999999999"},
    "$float finite": {"$float": "1.5"},
    "$str without need": {"$str": "YQ=="},
    "$bytes of no base64": {"$bytes": "a?b="},
    "$bytes of a number": {"$bytes": 10**12},
    "$bytearray of a number": {"$bytearray": 10**12},
    "$complex of one": {"$complex": [1.0]},
    "$tuple of an object": {"$tuple": {}},
    "$set of lists": {"$set": [[1]]},
    "$set of framework values": {"$set": [_framework("torch.dtype", {"a": 1})]},
    "$set of groups": {"$set": [{"$group": {"kind": "dict", "items": {}}}]},
    "$dict of triples": {"$dict": [[1, 2, 3]]},
    "$dict of a list as key": {"$dict": [[[1], 2]]},
    "$dict of one huge key twice": {"$dict": [[HUGE, 1], [HUGE, 2]]},
    "$dict of a huge key with a bad value": {"$dict": [[HUGE, {"$nonsense": 1}]]},
    "$dict of a huge key in a tuple, bad value": {"$dict": [[{"$tuple": [HUGE]}, {"$nonsense": 1}]]},
    "$counter of an object": {"$counter": {}},
    "$ordered_dict of attributes": {"$ordered_dict": {"items": [], "update": 1}},
    "$ndarray of objects": _array("|O8", [1]),
    "$ndarray of a huge shape": _array("<f4", [1 << 62, 1 << 62]),
    "$ndarray whose product wraps": _array("<f4", [1 << 32, 1 << 32], b""),
    "$ndarray of 2**62 of nothing": _array("<f4", [0, 1 << 62, 1 << 62], b""),
    "$ndarray of a huge item": _array("<U999999999", [1]),
    "$ndarray of negative shape": _array("<f4", [-2, -1]),
    "$ndarray of 65 dimensions": _array("<f4", [1] * 65, bytes(4)),
    "$ndarray too short": _array("<f4", [3]),
    "$scalar of objects": {"$scalar": {"dtype": "|O", "data": "AAAAAAAAAAA="}},
    "$datetime of year 10000": {"$datetime": "10000-01-01T00:00:00"},
    "$timedelta of 10**12 days": {"$timedelta": [10**12, 0, 0]},
    "$path of a number": {"$path": 5},
    "$tensor of a number": {"$tensor": 5},
    "$skipped of a list": {"$skipped": ["a"]},
    "$per_rank of null": {"$per_rank": None},
    "$group of an unknown kind": {"$group": {"kind": "__class__", "items": {}}},
    "$group of a list": {"$group": {"kind": "dict", "items": []}},
    "$group of numbered names": {"$group": {"kind": "dict", "items": {"$dict": [[1, 2]]}}},
    "$framework of no kind": {"$framework": {"kind": 5, "value": 1}},
    "240 lists deep": _nested(240, lambda value: [value]),
    "120 tuples deep": _nested(120, lambda value: {"$tuple": [value]}),
}

# What nobody can build: refused when a state is filled, but shown by `inspect`.
UNBUILDABLE = {
    "kind unknown": _framework("torch.storage", "x"),
    "kind os.system": _framework("os.system", "touch /tmp/holdfast-was-here"),
    "kind steers a terminal": _framework("\x1b[31m", "\x1b[0m"),
    "kind of a surrogate": _framework({"$str": base64.b64encode(b"\xed\xa0\x80").decode()}, 1),
    "dtype load": _framework("torch.dtype", "load"),
    "dtype __class__": _framework("torch.dtype", "__class__"),
    "dtype empty": _framework("torch.dtype", ""),
    "dtype of a lazy module": _framework("torch.dtype", "_dynamo"),
    "dtype of a dotted name": _framework("torch.dtype", "float32.__class__"),
    "dtype huge": _framework("torch.dtype", HUGE),
    "size of text": _framework("torch.size", {"$tuple": ["a"]}),
    "size of a huge number": _framework("torch.size", {"$tuple": [HUGE]}),
    "size negative": _framework("torch.size", {"$tuple": [-1]}),
    "size a list": _framework("torch.size", [1, 2]),
    "device nonsense": _framework("torch.device", "toaster:7"),
    "device of a huge number": _framework("torch.device", "cpu:99999999999999999999"),
    "tensor of nothing": _framework("torch.tensor", {}),
    "tensor of a huge integer": _framework("torch.tensor", {"a": HUGE}),
    "tensor of dtype load": _tensor(dtype="load"),
    "tensor of dtype __class__": _tensor(dtype="__class__"),
    "tensor of a quantised dtype": _tensor(dtype="qint8"),
    "tensor whose data is a number": _tensor(data=1 << 40),
    "tensor whose data is huge": _tensor(data=HUGE),
    "tensor whose data is text": _tensor(data="abcdefgh"),
    "tensor whose data is a list": _tensor(data=[1, 2]),
    "tensor of short data": _tensor(shape={"$tuple": [3]}),
    "tensor of long data": _tensor(shape={"$tuple": [1]}),
    "tensor of odd data": _tensor(data={"$bytes": base64.b64encode(bytes(7)).decode()}),
    "tensor of shape -1": _tensor(shape={"$tuple": [-1]}),
    "tensor of a huge shape": _tensor(shape={"$tuple": [1 << 62, 1 << 62]}),
    "tensor of 2**62 of nothing": _tensor(shape={"$tuple": [0, 1 << 62, 4]}, data={"$bytes": ""}),
    "tensor of a shape in text": _tensor(shape="2"),
    "tensor of a shape of floats": _tensor(shape={"$tuple": [2.0]}),
    "a reference to no tensor": [{"$tensor": "nothing"}],
    "a reference that steers a terminal": [{"$tensor": "\x1b[31m"}],
    "left out, and nowhere in the state": [{"$skipped": "note.0"}],
}

# Of the closed set, if not what was saved: it comes back as it is.
OTHER = {
    "a huge integer": HUGE,
    "text that steers a terminal": "\x1b]0;owned\x07\x1b[31m\u202e\x9b",
    "a key that steers a terminal": {"\x1b[31m\n": {"\x9b": 1}},
    "a path that steers a terminal": {"$path": "/\x1b[31m"},
    "a date beyond people": _array("<M8[Y]", [1], b"\xff" * 7 + b"\x7f"),
    "a group in a list": [{"$group": {"kind": "optimizer", "items": {}}}],
}

CASES = [
    *(Case(f"value: {name}", "open", _note(value)) for name, value in MALFORMED.items()),
    *(Case(f"framework value: {name}", "load", _note(value)) for name, value in UNBUILDABLE.items()),
    *(Case(f"another value: {name}", "content", _note(value)) for name, value in OTHER.items()),
    Case("a framework value of a huge number", "load", _note(_framework("x", HUGE))),
    Case(
        "root is an optimizer",
        "open",
        lambda c: c.edit_manifest(lambda d: d["state"]["$group"].update(kind="optimizer")),
    ),
    Case(
        "an item of the state that is a group of nothing",
        "objects",
        _note({"$group": {"kind": "optimizer", "items": {}}}),
    ),
    Case("optimizer without hyperparameters", "objects", _optimizer(lambda items: items.pop("hyperparameters"))),
    Case("optimizer without groups", "objects", _optimizer(lambda items: items.pop("param_groups"))),
    Case(
        "optimizer's hyperparameters are a list", "objects", _optimizer(lambda items: items.update(hyperparameters=[1]))
    ),
    Case("optimizer's groups are a number", "objects", _optimizer(lambda items: items.update(param_groups=5))),
    Case(
        "optimizer's keys are lists",
        "objects",
        _optimizer(lambda items: items.update(param_groups={key: [1] for key in items["param_groups"]})),
    ),
    Case(
        "optimizer's keys lead nowhere",
        "load",
        _optimizer(lambda items: items.update(param_groups=dict.fromkeys(items["param_groups"], "nowhere"))),
    ),
    Case("optimizer's state is a list", "load", _optimizer(lambda items: items.update(state=[1, 2]))),
    Case(
        "optimizer's state of a parameter is text",
        HARMLESS,
        _optimizer(lambda items: items["state"].update({"0.bias": "x"})),
    ),
    Case(
        "optimizer's state refers to nothing",
        "load",
        _optimizer(lambda items: items["state"].update({"0.bias": {"exp_avg": [{"$tensor": "nothing"}]}})),
    ),
    Case("hyperparameters replace the parameters", "load", _every_group(params=[1, 2])),
    Case("a hyperparameter of dtype load", "load", _every_group(lr=_framework("torch.dtype", "load"))),
    Case("a huge hyperparameter", "content", _every_group(lr=HUGE)),
    Case(
        "a stateful that is a list",
        "load",
        lambda c: c.edit_state(
            lambda items: items.update(counter={"$group": {"kind": "stateful", "items": {"state": [1]}}})
        ),
    ),
    Case(
        "a stateful of nothing",
        "load",
        lambda c: c.edit_state(lambda items: items.update(counter={"$group": {"kind": "stateful", "items": {}}})),
    ),
    Case(
        "a stateful that refuses",
        "load",
        lambda c: c.edit_state(
            lambda items: items.update(
                counter={"$group": {"kind": "stateful", "items": {"state": {"count": HUGE, "x": 1}}}}
            )
        ),
    ),
    Case(
        "a module's group is a stateful",
        "load",
        lambda c: c.edit_state(lambda items: items.update(model={"$group": {"kind": "stateful", "items": {}}})),
    ),
    Case("own values are a list", "read", _own(lambda document: [document])),
    Case("own values are of a pickle", "read", _own(lambda document: {"$pickle": "gASV"})),
    Case("own values lack a name", "load", _own(lambda document: {"rng": document["rng"]})),
    Case(
        "own value of dtype load", "load", _own(lambda document: {**document, "own": _framework("torch.dtype", "load")})
    ),
    Case("random state is text", "load", _own(lambda document: {**document, "rng": "x"})),
    Case("random state is empty", "load", _own(lambda document: {**document, "rng": {}})),
    Case("Python's random state is a number", "load", _python_state(5)),
    Case("Python's random state is empty", "load", _python_state({"$tuple": []})),
    Case(
        "Python's random state of huge numbers", "load", _python_state({"$tuple": [3, {"$tuple": [HUGE] * 625}, None]})
    ),
    Case(
        "Python's random state far out", "load", _python_state({"$tuple": [3, {"$tuple": [1] * 624 + [1 << 40]}, None]})
    ),
    Case("numpy's random position far out", "load", _numpy_state(lambda parts: parts.__setitem__(2, 1 << 28))),
    Case("numpy's random position negative", "load", _numpy_state(lambda parts: parts.__setitem__(2, -(1 << 28)))),
    Case("numpy's random position huge", "load", _numpy_state(lambda parts: parts.__setitem__(2, HUGE))),
    Case("numpy's random keys too few", "load", _numpy_state(lambda parts: parts.__setitem__(1, _array("<u4", [2])))),
    Case(
        "numpy's random keys of floats",
        "load",
        _numpy_state(lambda parts: parts.__setitem__(1, _array("<f4", [624], bytes(4 * 624)))),
    ),
    Case(
        "numpy's random generator of another name",
        "load",
        _numpy_state(lambda parts: parts.__setitem__(0, "os.system")),
    ),
    Case("numpy's random state of two", "load", _numpy_state(lambda parts: parts.__delitem__(slice(2, None)))),
    Case("a module's extra state of another kind", "load", _extra_state([1])),
    Case("a module's extra state of dtype load", "load", _extra_state(_framework("torch.dtype", "load"))),
    Case("hyperparameters of one group that differ hugely", "load", _optimizer(_differing_hugely)),
]
