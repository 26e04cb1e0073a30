"""Samples of a pack that is written raw: taken from the right pieces, as many as asked, and of whole chunks."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.base.clock import SystemClock
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.coding import Kind, Sampling
from holdfast.base.types.plan import CODED_FOLDER, PackItem, PackPlan, PlannedPack
from holdfast.core.engine.encoding.meter import SaveMeter
from holdfast.core.engine.encoding.probe import ChunkProbe

WINDOW = CHUNK = 1 << 12
WEIGHTS, MOMENTS = Kind("uint8", "parameter"), Kind("uint8", "exp_avg")
HEADER = bytes(512)


def pack_of(sizes: dict[str, int], name: str = "r00000.safetensors") -> PlannedPack:
    items, offset = [], 0
    for fqn, size in sizes.items():
        items.append(PackItem(TensorSpec(fqn, "uint8", (size,)), Box((0,), (size,)), offset, 0))
        offset += size
    return PlannedPack(name, HEADER, PackPlan(name, tuple(items)))


def sampled(
    pack: PlannedPack, kinds: dict[str, Kind], samplings: dict[Kind, Sampling]
) -> tuple[list[tuple[str, bytes]], SaveMeter]:
    """Return the tensors and bytes that are coded while a pack is written in windows."""
    taken = []

    def prepare(item: PackItem, raw: memoryview) -> Callable[[], tuple[str, int]]:
        taken.append((item.tensor.fqn, bytes(raw)))
        return lambda: ("zstd", len(raw) // 2)

    meter = SaveMeter(SystemClock(), kinds)
    probe = ChunkProbe(meter, kinds, samplings, prepare).of(pack)
    file = HEADER + b"".join(bytes([number]) * item.bytes for number, item in enumerate(pack.plan.items))
    for offset in range(0, len(file), WINDOW) if probe is not None else ():
        probe.look(offset, memoryview(file)[offset : offset + WINDOW])
    return taken, meter


def test_samples_lie_in_the_pieces_of_their_kind() -> None:
    pack = pack_of({"plain": 3000, "a": 20_000, "m": 9_000, "b": 20_000, "n": 9_000})
    kinds = {"a": WEIGHTS, "b": WEIGHTS, "m": MOMENTS, "n": MOMENTS}
    rare = Sampling(2, 0, 20_000, 2048, CHUNK)
    taken, meter = sampled(pack, kinds, {WEIGHTS: rare, MOMENTS: Sampling(1, 12_000, 1, 2048, CHUNK)})
    assert [fqn for fqn, _ in taken] == ["a", "b", "n"]
    number_of = {item.tensor.fqn: number for number, item in enumerate(pack.plan.items)}
    for fqn, data in taken:
        assert 2048 <= len(data) <= CHUNK and set(data) == {number_of[fqn]}
    measured = meter.measured()
    assert not measured.coded
    assert measured.probed[WEIGHTS].raw_bytes == sum(len(data) for fqn, data in taken if fqn in "ab")
    assert measured.probed[WEIGHTS].stored_bytes == sum(len(data) // 2 for fqn, data in taken if fqn in "ab")


def test_parts_too_short_to_tell_are_passed_over() -> None:
    pack = pack_of({"a": 512, "b": 512, "c": 4096, "d": 5000})
    kinds = dict.fromkeys("abcd", WEIGHTS)
    taken, _ = sampled(pack, kinds, {WEIGHTS: Sampling(1, 0, 1, 2500, CHUNK)})
    assert [(fqn, len(data)) for fqn, data in taken] == [("c", 2560)]


def test_no_sample_is_taken_of_coded_packs_and_of_kinds_that_are_known() -> None:
    sampling = Sampling(1, 0, 1, 1, CHUNK)
    pack = pack_of({"a": 4096})
    assert not sampled(pack, {"a": WEIGHTS}, {MOMENTS: sampling})[0]
    assert not sampled(pack, {}, {WEIGHTS: sampling})[0]
    coded = pack_of({"a": 4096}, f"{CODED_FOLDER}r00000.safetensors")
    assert not sampled(coded, {"a": WEIGHTS}, {WEIGHTS: sampling})[0]
