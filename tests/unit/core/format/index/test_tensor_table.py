"""Tables of tensors: columns that come back as they went, and shapes that nobody could address."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.core.format.index.columns import encode_column
from holdfast.core.format.index.tensor_table import TensorsDocument, TensorTable, decode_tensors, require_listable
from holdfast.errors import CorruptError, InvalidError

SHAPES = st.lists(st.integers(0, 9), max_size=5).map(tuple)
TENSORS = st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES))


@given(TENSORS)
def test_a_table_comes_back_as_it_went(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    specs = {fqn: TensorSpec(fqn, dtype, shape) for fqn, (dtype, shape) in sorted(tensors.items())}
    table = TensorTable.of(reversed(list(specs.values())))
    again = decode_tensors(TensorsDocument(chunk_bytes=4096, **table.encoded()), "here")
    for each in (table, again):
        assert dict(each.specs) == specs
        assert list(each.specs) == each.fqns == list(specs)
        assert each.bytes == sum(spec.global_bytes for spec in specs.values())
        assert each.numels.tolist() == [spec.global_bytes // spec.itemsize for spec in specs.values()]
    assert again.encoded() == table.encoded()


LISTABLE = [("uint8", (2**62 - 1,)), ("float32", (2**60 - 1,)), ("uint8", (2**31, 2**31 - 1, 0)), ("float64", ())]
NOT_LISTABLE = [("uint8", (2**62,)), ("float32", (2**60,)), ("float32", (2**60, 0)), ("uint8", (2**63 - 1,) * 64)]


def one_tensor(dtype: str, shape: tuple[int, ...]) -> TensorsDocument:
    return TensorsDocument(4096, ["t"], [dtype], encode_column([0]), encode_column([len(shape)]), encode_column(shape))


@pytest.mark.parametrize(("dtype", "shape"), LISTABLE)
def test_what_can_be_addressed_may_be_listed(dtype: str, shape: tuple[int, ...]) -> None:
    require_listable(TensorSpec("t", dtype, shape))
    table = decode_tensors(one_tensor(dtype, shape), "here")
    assert table.specs["t"].global_shape == shape


@pytest.mark.parametrize(("dtype", "shape"), NOT_LISTABLE)
def test_what_cannot_be_is_refused_and_corrupt(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidError, match=r"t: .*2\*\*62 bytes"):
        require_listable(TensorSpec("t", dtype, shape))
    with pytest.raises(CorruptError, match=r"here: t: .*2\*\*62 bytes"):
        decode_tensors(one_tensor(dtype, shape), "here")
