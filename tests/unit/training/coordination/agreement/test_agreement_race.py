"""A refusal that lands while another rank is arriving: found by real ranks that then counted apart for good."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from holdfast.backends.torch.key_value_store import TorchKeyValueStore
from holdfast.base.clock import SystemClock
from holdfast.errors import InvalidError
from holdfast.settings import Settings
from holdfast.training.coordination.agreement.records import SaveVerdict
from holdfast.training.coordination.agreement.save_agreement import SaveAgreement
from holdfast.training.coordination.job import Job, error_text
from holdfast.training.coordination.message_codec import encode_message
from tests.doubles.faults import FaultPoint, Faults, FaultyKeyValueStore

PLACE = b"12345678"


class RankOneOfTwo:
    def __init__(self, faults: Faults) -> None:
        self.rank, self.world_size, self.timeout_seconds = 1, 2, None
        self.real = TorchKeyValueStore(HashStore())
        self.key_value_store = FaultyKeyValueStore(self.real, faults)

    def broadcast(self, payload: bytes | None) -> bytes:
        raise AssertionError("saving runs no collective")

    def all_gather(self, payload: bytes) -> list[bytes]:
        assert payload.startswith(bytes(8)), "construction gathers the nonce of rank 0; saving runs no collective"
        return [b"nonce678", payload]

    def bitwise_or(self, payload: bytes) -> bytes:
        raise AssertionError("saving runs no collective")

    def exchange(self, gives: object, takes: object) -> None:
        raise AssertionError("saving runs no collective")


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("after", [False, True])
def test_rank_0s_refusal_may_land_at_any_moment_of_an_arrival(at: int, after: bool) -> None:
    def refuse(operation: FaultPoint) -> None:
        verdict = SaveVerdict((7, PLACE.hex()), refused=error_text(InvalidError("no")))
        comm.real.set(job.key("opening", 0, "verdict"), encode_message(verdict), 5.0)

    faults = Faults(refuse, at=at, names=("present", "get_many"), after=after)
    comm = RankOneOfTwo(faults)
    job = Job(comm, SystemClock(), Settings(commit_timeout_seconds=0.5))
    opening = SaveAgreement(job, 7, PLACE).take_number()
    opening.refuse(InvalidError("also no"))
    assert job.sequence == 1, "the next save of this rank is number 1, as it is rank 0's"
    job.close()
