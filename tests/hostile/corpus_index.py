"""Crafted indexes and parts."""

from __future__ import annotations

from typing import Any

from tests.hostile.cases import HARMLESS, Case
from tests.hostile.crafting import Document, column, numbers_of


def _key(name: str, value: object) -> Any:
    return lambda crafted: crafted.edit_index(lambda document: document.update({name: value}))


def _number(name: str, at: int, value: int) -> Any:
    """Change one number of a column."""

    def change(document: Document) -> None:
        numbers = numbers_of(document[name])
        numbers[at] = value
        document[name] = column(numbers)

    return lambda crafted: crafted.edit_index(change)


def _raw(data: bytes) -> Any:
    return lambda crafted: crafted.write_file("index-00000.msgpack", data)


def _part(change: Any) -> Any:
    return lambda crafted: crafted.edit_part(change)


def _tensor(document: Document, fqn: str) -> int:
    return int(document["fqns"].index(fqn))


def _axes(document: Document, fqn: str) -> slice:
    """Where the shape of a tensor lies in the column of shapes; every tensor has one piece, so its corners too."""
    ndims, number = numbers_of(document["ndims"]), _tensor(document, fqn)
    first = sum(ndims[:number])
    return slice(first, first + ndims[number])


def _set(document: Document, name: str, axes: slice, values: list[int]) -> None:
    numbers = numbers_of(document[name])
    numbers[axes] = values
    document[name] = column(numbers)


def _shape(fqn: str, shape: list[int], *, piece: list[int] | None = None) -> Any:
    """Claim another shape of the same number of dimensions, and perhaps another piece of it."""

    def change(document: Document) -> None:
        axes = _axes(document, fqn)
        _set(document, "shapes", axes, shape)
        if piece is not None:
            _set(document, "piece_stops", axes, piece)

    return lambda crafted: crafted.edit_index(change)


def _big_cut(*, start: list[int] | None = None, stop: list[int] | None = None, digests: int) -> Any:
    """Let the piece of `big` cover less than all; its chunks are 8 of 4096 bytes."""

    def change(document: Document) -> None:
        axes = _axes(document, "big")
        if start is not None:
            _set(document, "piece_starts", axes, start)
        if stop is not None:
            _set(document, "piece_stops", axes, stop)
        first = _digests_before(document, "big")
        kept = document["digests"][first : first + 16 * digests]
        document["digests"] = document["digests"][:first] + kept + document["digests"][first + 128 :]

    return lambda crafted: crafted.edit_index(change)


def _digests_before(document: Document, fqn: str) -> int:
    from tests.hostile.crafting import _pieces

    return sum(len(digests) for _, digests in _pieces(document)[: _tensor(document, fqn)])


def _pieces_of_big(boxes: list[tuple[list[int], list[int]]], offset_of_each: list[int]) -> Any:
    """Let `big` consist of these boxes of whole rows, at these bytes after its true beginning."""

    def change(document: Document) -> None:
        number, axes, at = _tensor(document, "big"), _axes(document, "big"), _digests_before(document, "big")
        numbers, packs, offsets = (
            numbers_of(document[name]) for name in ("piece_tensors", "piece_packs", "piece_offsets")
        )
        starts, stops = numbers_of(document["piece_starts"]), numbers_of(document["piece_stops"])
        begin = offsets[number]
        digests = b""
        for (start, stop), offset in zip(boxes, offset_of_each, strict=True):
            first, count = offset // 4096, (stop[0] - start[0]) * 512 // 4096
            digests += document["digests"][at + 16 * first : at + 16 * (first + count)]
        document["digests"] = document["digests"][:at] + digests + document["digests"][at + 128 :]
        numbers[number : number + 1] = [number] * len(boxes)
        packs[number : number + 1] = [packs[number]] * len(boxes)
        offsets[number : number + 1] = [begin + offset for offset in offset_of_each]
        starts[axes] = [at for start, _ in boxes for at in start]
        stops[axes] = [at for _, stop in boxes for at in stop]
        document |= {
            "piece_tensors": column(numbers), "piece_packs": column(packs), "piece_offsets": column(offsets),
            "piece_starts": column(starts), "piece_stops": column(stops),
        }  # fmt: skip

    return lambda crafted: crafted.edit_index(change)


def _flat_big(start: int, stop: int, digests: int = 8) -> Any:
    """Let the piece of `big` be a flat range."""

    def change(document: Document) -> None:
        axes, number = _axes(document, "big"), _tensor(document, "big")
        first = _digests_before(document, "big")
        for name, value in (("piece_starts", start), ("piece_stops", stop)):
            _set(document, name, axes, [value])
        kinds = [int(each == number) for each in numbers_of(document["piece_tensors"])]
        document["piece_kinds"] = column(kinds, 1)
        document["digests"] = document["digests"][: first + 16 * digests] + document["digests"][first + 128 :]

    return lambda crafted: crafted.edit_index(change)


def _no_pieces(fqn: str, shape: list[int] | None = None) -> Any:
    """Leave a tensor without a piece, and perhaps claim that it is gigantic."""

    def change(document: Document) -> None:
        number, axes = _tensor(document, fqn), _axes(document, fqn)
        from tests.hostile.crafting import _pieces

        first, count = _digests_before(document, fqn), len(_pieces(document)[number][1])
        for name in ("piece_tensors", "piece_packs", "piece_offsets"):
            numbers = numbers_of(document[name])
            del numbers[number]
            document[name] = column(numbers)
        for name in ("piece_starts", "piece_stops"):
            numbers = numbers_of(document[name])
            del numbers[axes]
            document[name] = column(numbers)
        document["digests"] = document["digests"][:first] + document["digests"][first + count :]
        if shape is not None:
            _set(document, "shapes", axes, shape)

    return lambda crafted: crafted.edit_index(change)


def _million_tensors(document: Document) -> None:
    document["fqns"] = [f"t{number:07d}" for number in range(300_000)]


def _many_empty_tensors(document: Document) -> None:
    count = 50_000
    document["fqns"] += [f"z{number:06d}" for number in range(count)]
    for name, value in (("dtype_numbers", 0), ("ndims", 1), ("shapes", 0)):
        document[name] = column(numbers_of(document[name]) + [value] * count)


def _one_chunk_for_all(document: Document) -> None:
    """Claim 64 GiB in pieces that all lie at the same 4 KiB of the pack."""
    axes, at = _axes(document, "big"), _digests_before(document, "big")
    rows = 20_000
    number = _tensor(document, "big")
    _set(document, "shapes", axes, [rows * 8, 128])
    numbers, packs, offsets = (numbers_of(document[name]) for name in ("piece_tensors", "piece_packs", "piece_offsets"))
    starts, stops = numbers_of(document["piece_starts"]), numbers_of(document["piece_stops"])
    begin = offsets[number]
    numbers[number : number + 1] = [number] * rows
    packs[number : number + 1] = [packs[number]] * rows
    offsets[number : number + 1] = [begin] * rows
    starts[axes] = [at for row in range(rows) for at in (8 * row, 0)]
    stops[axes] = [at for row in range(rows) for at in (8 * row + 8, 128)]
    digests = document["digests"][at : at + 16] * rows
    document["digests"] = document["digests"][:at] + digests + document["digests"][at + 128 :]
    document |= {
        "piece_tensors": column(numbers), "piece_packs": column(packs), "piece_offsets": column(offsets),
        "piece_starts": column(starts), "piece_stops": column(stops),
    }  # fmt: skip


COLUMNS = (
    "dtype_numbers", "ndims", "shapes", "piece_tensors", "piece_packs", "piece_offsets", "piece_starts", "piece_stops",
)  # fmt: skip

RAW = {
    "empty": b"",
    "nil": b"\xc0",
    "an array": b"\x90",
    "an extension type": b"\xc7\xff\x05" + bytes(255),
    "a map of 2**32 entries": b"\xdf\xff\xff\xff\xff",
    "2**32 names": b"\x81\xa4fqns\xdd\xff\xff\xff\xff",
    "a name of 2**32 bytes": b"\x81\xa4fqns\x91\xdb\xff\xff\xff\xff",
    "2**32 bytes of digests": b"\x81\xa7digests\xc6\xff\xff\xff\xff",
    "100,000 arrays deep in a field": b"\x81\xa5later" + b"\x91" * 100_000 + b"\xc0",
    "100,000 maps deep": b"\x81\xa1a" * 100_000 + b"\xc0",
    "a name that is not UTF-8": b"\x81\xa4fqns\x91\xa2\xff\xfe",
    "a name that is a surrogate": b"\x81\xa4fqns\x91\xa3\xed\xa0\x80",
    "a reserved byte": b"\xc1",
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch /tmp/holdfast-was-here'\ntR.",
}

CASES = [
    *(Case(f"index file: {name}", "tensors", _raw(data)) for name, data in RAW.items()),
    *(
        Case(
            f"{name} of width 3",
            "tensors",
            lambda c, name=name: c.edit_index(
                lambda d: d.update({name: [3, bytes(3 * len(numbers_of(d[name])))]}), totals=False
            ),
        )
        for name in COLUMNS
    ),
    *(
        Case(
            f"{name} one number short",
            "tensors",
            lambda c, name=name: c.edit_index(lambda d: d.update({name: column(numbers_of(d[name])[:-1])})),
        )
        for name in COLUMNS
    ),
    *(
        Case(
            f"{name} one number long",
            "tensors",
            lambda c, name=name: c.edit_index(lambda d: d.update({name: column([*numbers_of(d[name]), 0])})),
        )
        for name in COLUMNS
    ),
    *(Case(f"{name} with 2**64 - 1", "tensors", _number(name, 0, (1 << 64) - 1)) for name in COLUMNS),
    *(
        Case(f"{name} with 2**63 - 1", "tensors", _number(name, -1, (1 << 63) - 1))
        for name in COLUMNS
        if name != "piece_starts"
    ),
    Case("a column of width 0", "tensors", _key("shapes", [0, b""])),
    Case("a column of width -1", "tensors", _key("shapes", [-1, b"a"])),
    Case("a column of half a number", "tensors", _key("piece_offsets", [8, bytes(7)])),
    Case("a column that is text", "tensors", _key("shapes", "abc")),
    *(
        Case(f"chunk_bytes={value}", "tensors", _key("chunk_bytes", value))
        for value in (0, 1, 2, 4095, 4097, 8 << 20, 1 << 40, 1 << 62, (1 << 64) - 1, -4096, 4096.0, True, "4096", None)
    ),
    Case("a field absent", "tensors", lambda c: c.edit_index(lambda d: d.pop("ndims"), totals=False)),
    Case("a field of a later version", HARMLESS, _key("later", {"a": [1, 2]})),
    Case(
        "a dtype unknown",
        "tensors",
        lambda c: c.edit_index(lambda d: d.update(dtypes=["__class__", *d["dtypes"][1:]]), totals=False),
    ),
    Case(
        "dtypes that are numbers", "tensors", lambda c: c.edit_index(lambda d: d.update(dtypes=[1, 2, 3]), totals=False)
    ),
    Case(
        "a dtype of another size",
        "tensors",
        lambda c: c.edit_index(
            lambda d: d.update(dtypes=["int8" if each == "int32" else each for each in d["dtypes"]]), totals=False
        ),
    ),
    Case("one name twice", "tensors", lambda c: c.edit_index(lambda d: d["fqns"].__setitem__(0, d["fqns"][1]))),
    Case("names not ascending", "tensors", lambda c: c.edit_index(lambda d: d["fqns"].reverse())),
    Case("a name that is empty", "tensors", lambda c: c.edit_index(lambda d: d["fqns"].__setitem__(0, ""))),
    Case(
        "a name that is a path",
        "verify",
        lambda c: c.edit_index(lambda d: d["fqns"].__setitem__(0, "../../../etc/passwd")),
    ),
    Case(
        "a name that steers a terminal",
        "verify",
        lambda c: c.edit_index(lambda d: d["fqns"].__setitem__(0, "\x1b]0;owned\x07\x1b[31m\n\u202e")),
    ),
    Case(
        "a name of a million characters",
        "verify",
        lambda c: c.edit_index(lambda d: d["fqns"].__setitem__(0, "a" * 10**6)),
    ),
    Case("300,000 names and nothing else", "tensors", lambda c: c.edit_index(_million_tensors)),
    Case("50,000 empty tensors more", HARMLESS, lambda c: c.edit_index(_many_empty_tensors)),
    Case("65 dimensions", "tensors", _number("ndims", 0, 65)),
    Case("a pack that is a path", "tensors", _key("packs", [["own", "../../r00000.safetensors"]])),
    Case("a pack listed twice", "tensors", _key("packs", [["own", "r00000.safetensors"]] * 2)),
    Case("a pack of a kind reserved", "tensors", _key("packs", [["base", "r00000.safetensors"]])),
    Case("a pack that is not listed", "tensors", _key("packs", [["own", "r00009.safetensors"]])),
    Case("no packs listed", "tensors", _key("packs", [])),
    Case("a gigantic shape, one small piece", "tensors", _shape("big", [1 << 40, 128])),
    Case("a shape of 2**62 elements", "tensors", _shape("big", [1 << 31, 1 << 31])),
    Case("a shape that wraps to nothing", "tensors", _shape("big", [1 << 32, 1 << 32])),
    Case("a shape that wraps as bytes", "tensors", _shape("big", [1 << 31, 1 << 30])),
    Case("an empty shape that numpy cannot hold", "tensors", _no_pieces("big", [0, 1 << 62])),
    Case("a gigantic shape, one gigantic piece", "tensors", _shape("big", [1 << 40, 128], piece=[1 << 40, 128])),
    Case("a shape one row longer", "tensors", _shape("big", [65, 128])),
    Case("a piece beyond its tensor", "tensors", _shape("big", [63, 128])),
    Case("a gigantic tensor without pieces", "tensors", _no_pieces("big", [1 << 30, 1 << 25])),
    Case("a tensor without pieces", "tensors", _no_pieces("big")),
    Case("a hole at the end", "tensors", _big_cut(stop=[56, 128], digests=7)),
    Case("a hole at the start", "tensors", _big_cut(start=[8, 0], digests=7)),
    Case("a hole of columns", "tensors", _big_cut(stop=[64, 64], digests=4)),
    Case("a piece that is empty", "tensors", _big_cut(start=[64, 0], digests=0)),
    Case("a piece that runs backwards", "tensors", _big_cut(start=[64, 0], stop=[0, 128], digests=8)),
    Case(
        "two pieces that overlap", "tensors", _pieces_of_big([([0, 0], [40, 128]), ([32, 0], [64, 128])], [0, 32 * 512])
    ),
    Case(
        "two pieces that are the same, half a tensor",
        "tensors",
        _pieces_of_big([([0, 0], [32, 128]), ([0, 0], [32, 128])], [0, 32 * 512]),
    ),
    Case("a piece twice", "tensors", _pieces_of_big([([0, 0], [64, 128]), ([0, 0], [64, 128])], [0, 0])),
    Case("two pieces that meet", "verify", _pieces_of_big([([0, 0], [32, 128]), ([32, 0], [64, 128])], [0, 32 * 512])),
    Case(
        "two pieces of the same bytes", "tensors", _pieces_of_big([([0, 0], [32, 128]), ([32, 0], [64, 128])], [0, 0])
    ),
    Case("20,000 pieces of the same bytes", "tensors", lambda c: c.edit_index(_one_chunk_for_all)),
    Case("a flat range instead of a box", "verify", _flat_big(0, 8192)),
    Case("a flat range that leaves a hole", "tensors", _flat_big(0, 7168, 7)),
    Case("a flat range beyond its tensor", "tensors", _flat_big(1024, 9216)),
    Case("a flat range backwards", "tensors", _flat_big(8192, 0)),
    Case(
        "a piece of an unknown kind",
        "tensors",
        lambda c: c.edit_index(lambda d: d.update(piece_kinds=column([2] * len(d["fqns"]), 1))),
    ),
    Case(
        "kinds one short",
        "tensors",
        lambda c: c.edit_index(lambda d: d.update(piece_kinds=column([0] * (len(d["fqns"]) - 1), 1))),
    ),
    Case(
        "kinds of nothing but boxes",
        HARMLESS,
        lambda c: c.edit_index(lambda d: d.update(piece_kinds=column([0] * len(d["fqns"]), 1))),
    ),
    Case(
        "pieces not in the order of tensors",
        "tensors",
        lambda c: c.edit_index(
            lambda d: d.update(piece_tensors=column(list(reversed(numbers_of(d["piece_tensors"])))))
        ),
    ),
    Case("an offset in the header", "read", _number("piece_offsets", 0, 0)),
    Case(
        "an offset of another piece",
        "tensors",
        lambda c: c.edit_index(
            lambda d: d.update(piece_offsets=column([numbers_of(d["piece_offsets"])[0]] * len(d["fqns"])))
        ),
    ),
    Case("an offset past the end", "tensors", _number("piece_offsets", 0, 1 << 40)),
    Case("digests one short", "tensors", lambda c: c.edit_index(lambda d: d.update(digests=d["digests"][:-16]))),
    Case("digests one byte short", "tensors", lambda c: c.edit_index(lambda d: d.update(digests=d["digests"][:-1]))),
    Case("digests one long", "tensors", lambda c: c.edit_index(lambda d: d.update(digests=d["digests"] + bytes(16)))),
    Case(
        "digests of other bytes", "read", lambda c: c.edit_index(lambda d: d.update(digests=bytes(len(d["digests"]))))
    ),
    Case("part of another rank", "read", _part(lambda document: document.update(rank=3))),
    Case("part of a negative rank", "read", _part(lambda document: document.update(rank=-1))),
    Case("part of a huge rank", "read", _part(lambda document: document.update(rank=(1 << 64) - 1))),
    Case("part of another attempt", "read", _part(lambda document: document.update(attempt="0" * 16))),
    Case("part with a pack that is a path", "read", _part(lambda d: d.update(packs=[["../../x", 5, "0"]]))),
    Case(
        "part with a pack of negative size", "read", _part(lambda d: d.update(packs=[["r00000.safetensors", -5, "0"]]))
    ),
    Case("part whose index lies", "read", _part(lambda d: d["index"].update(chunk_bytes=0))),
    Case("part whose tree is no text", "read", _part(lambda document: document.update(tree=5))),
    Case(
        "part whose own values are JSON of NaN",
        "read",
        _part(lambda document: document.update(per_rank=b'{"own":NaN}')),
    ),
    Case("part whose own values are deep", "read", _part(lambda document: document.update(per_rank=b"[" * 10**6))),
    Case(
        "part of a 2**32 layouts",
        "read",
        lambda c: c.write_file("parts/r00000.msgpack", b"\x81\xa7layouts\xdd\xff\xff\xff\xff"),
    ),
    Case(
        "part that is an index",
        "read",
        lambda c: c.write_file("parts/r00000.msgpack", (c.attempt / "index-00000.msgpack").read_bytes()),
    ),
    Case(
        "index that is a part",
        "tensors",
        lambda c: c.write_file("index-00000.msgpack", (c.attempt / "parts/r00000.msgpack").read_bytes()),
    ),
]
