"""Fuzzes plans of `holdfast.activations`: the text of a plan whose digest is right."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import msgspec

from holdfast.activations.plan_file import KIND, VERSION, PlanEnvelope, decode_plan, plan_digest
from holdfast.activations.profile.solved_plan import CurvePoint, SolvedPlan
from holdfast.activations.profile.unit_profile import ModelProfile, Packing, UnitColumn, UnitOp, UnitProfile
from holdfast.activations.solve.explain import explained, summary_of
from holdfast.errors import CheckpointError

_HEAD = f'{{"holdfast":"{KIND}","version":{VERSION},"digest":"'.encode()


def file(data: bytes) -> None:
    """The bytes of a plan file, most of which have a wrong digest."""
    try:
        decode_plan(data, "here")
    except CheckpointError as error:
        assert str(error).startswith("here")


def plan(data: bytes) -> None:
    """A plan that is refused, or comes back from its own text and can be explained."""
    sealed = _HEAD + hashlib.sha256(data).hexdigest().encode() + b'","plan":' + data + b"}"
    try:
        decoded = decode_plan(sealed, "here")
    except CheckpointError as error:
        assert str(error).startswith("here")
        return
    assert plan_digest(decode_plan(_sealed(decoded), "here")) == plan_digest(decoded)
    summary = summary_of(decoded)
    assert all(line.isprintable() for line in explained(summary).splitlines())
    json.dumps(asdict(summary), allow_nan=False)


def seeds() -> list[bytes]:
    """Return the texts of two small plans: one that packs, draws and runs again, and one that keeps everything."""
    bits = Packing("bits", 32, 1e-6)
    ops = (
        UnitOp(0, "input", 1024, 0.0, (), None, True, True, False, False),
        UnitOp(1, "aten.bernoulli_.float", 1024, 1e-5, (0,), None, True, True, True, False, (bits,)),
        UnitOp(2, "aten.gelu.default", 1024, 1e-5, (1,), None, False, False, False, False),
        UnitOp(3, "aten.view.default", 0, 1e-6, (), 2, True, False, False, False),
    )
    columns = (
        UnitColumn(((0, "keep"), (1, "keep"), (2, "keep")), (), (), 3072, 0.0, 3072, 1024, False),
        UnitColumn(((1, "bits"),), (2, 3), (1,), 1056, 1e-4, 3072, 3072, False),
    )
    units = ("layers.0", "layers.1")
    plain = UnitProfile("trace", units, ops, 512, 4096)
    fixed = UnitProfile("other", ("norm",), ops[:1], 0, 4096, "a hook")
    order = (("layers.0", 0), ("norm", 1), ("layers.1", 0))
    profile = ModelProfile((plain, fixed), order, (2048, 1024, 1024), 512, 20480, 0.01)
    kept = UnitColumn(((0, "keep"),), (), (), 1024, 0.0, 1024, 1024, False)
    curve = (CurvePoint(9000, 1.5), CurvePoint(20000, 1.0))
    errors = (("", 1e-3), ("layers.0.weight", 2e-3))
    return [
        msgspec.json.encode(SolvedPlan(profile, (columns, (kept,)), choice, 16384, 0.005, 0.0, 16000, 1.01, *rest))
        for choice, rest in (((1, 0, 1), (15000, 1.02, errors, curve)), ((0, 0, 0), ()))
    ]


def file_seeds() -> list[bytes]:
    """Return plan files."""
    return [_sealed(msgspec.json.decode(text, type=SolvedPlan)) for text in seeds()]


def _sealed(decoded: SolvedPlan) -> bytes:
    text = msgspec.json.encode(decoded)
    return msgspec.json.encode(PlanEnvelope(KIND, VERSION, plan_digest(decoded), msgspec.Raw(text)))
