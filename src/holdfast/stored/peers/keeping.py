"""Writes of small objects to the keepers of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from holdfast.base.ports.store import Store
from holdfast.core.plan.keepers import NoManifest, PutOutcome, put_outcome, quorum
from holdfast.errors import CheckpointError, ConflictError, UnavailableError
from holdfast.stored.repository.publish import holds

_Ask = Callable[[Store], bytes | None]
_Answers = dict[str, bytes | CheckpointError | None]


def put_on_keepers(
    where: str,
    key: str,
    data: bytes,
    keepers: Mapping[str, Store],
    put: Callable[[Store], None],
    answers_of: Callable[[Mapping[str, Store], _Ask], _Answers],
) -> None:
    """Store an object on the keepers: first on one that answers, which decides, then on the later ones at once.

    Args:
        where: Names the object, for messages.
        key: The object.
        data: The bytes.
        keepers: The keepers by name, in the order in which they are asked.
        put: Stores the object on a keeper.
        answers_of: Asks nodes at once; returns the answer of each, or the error of one that does not answer.
    Raises:
        ConflictError: The first keeper that answers has another object; nothing was stored.
        UnavailableError: Too few keepers answered, or a later keeper has another object: it may be stored or not.
    """

    def ask(store: Store) -> bytes | None:
        with suppress(ConflictError):
            put(store)
            return data
        return data if holds(store, key, data) else None

    left, asked = dict(keepers), _Answers()
    while left and all(isinstance(each, CheckpointError) for each in asked.values()):
        name = next(iter(left))
        asked |= answers_of({name: left.pop(name)}, ask)
    if None not in asked.values():
        asked |= answers_of(left, ask)
    answers = [NoManifest.SILENT if isinstance(each, CheckpointError) else each for each in asked.values()]
    if None in answers:  # What later keepers stored does not make up for another object.
        del answers[answers.index(None) + 1 :]
    outcome = put_outcome(data, answers, len(keepers))
    if outcome is PutOutcome.CONFLICT:
        raise ConflictError(f"{where}: a keeper has another object there; nothing was stored")
    if outcome is not PutOutcome.STORED:
        raise UnavailableError(
            f"{where}: {answers.count(data)} of keepers {[*keepers]} have stored the object; expected "
            f"{quorum(len(keepers))}. The object may count or not. Start the other agents, and put it again"
        )
