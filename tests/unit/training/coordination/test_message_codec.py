"""Messages between ranks carry subclasses of plain types, errors, and text that is no Unicode."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import CheckpointError, CorruptError
from holdfast.training.coordination.message_codec import decode_message, encode_message


class _Step(int):
    pass


class _Color(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class _Message:
    step: int | None = None
    names: tuple[str, ...] = ()
    loss: float = 0.0
    error: CheckpointError | None = None
    color: _Color = _Color.RED


def test_subclasses_of_plain_types_are_sent_as_plain_values() -> None:
    message = _Message(_Step(6), (np.str_("w2"), "\ud800"), np.float64(0.5))
    received = decode_message(encode_message(message), _Message)
    assert received == _Message(6, ("w2", "\ud800"), 0.5)
    assert (type(received.step), type(received.names[0]), type(received.loss)) == (int, str, float)


def test_an_error_keeps_its_type_and_its_text() -> None:
    received = decode_message(encode_message(_Message(error=CorruptError("step 5: damaged"))), _Message)
    assert type(received.error) is CorruptError
    assert str(received.error) == "step 5: damaged"


@pytest.mark.parametrize("value", (Path("a"), object(), np.int64(3)), ids=lambda value: type(value).__name__)
def test_a_value_that_no_rank_can_decode_is_refused_where_it_is_sent(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be sent to another rank"):
        encode_message(_Message(step=value))  # type: ignore[arg-type]
