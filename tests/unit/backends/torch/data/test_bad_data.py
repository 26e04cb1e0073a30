"""Bad input of positions, loaders and mixtures: each a typed error with the numbers and the next act."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.backends.torch.data.data_ranks import DataRanks
from holdfast.data import Batches, Loader, Mixture

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it.


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


def batches_of(ranks: int, **options: Any) -> Batches:
    batches = Batches(100, seed=1, **options)
    batches._draws = replace(batches._draws, ranks=DataRanks(0, ranks))
    return batches


NUMBERS = list(range(20))

CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: batches_of(8, global_batch=7), r"global_batch=7 is below the 8 data ranks"),
    (lambda: Batches(9, global_batch=4, micro_batch=5, seed=1), r"micro_batch=5 and global_batch=4; expected 1 to 4"),
    (lambda: Batches(9, global_batch=4, micro_batch=0, seed=1), r"micro_batch=0"),
    (lambda: Batches(0, global_batch=4, seed=1), r"n=0; expected a number of samples from 1"),
    (lambda: Batches(9, global_batch=10, seed=1, tail="drop"), r"an epoch of 9 samples would have no step"),
    (lambda: Batches(9, global_batch=1, seed=1, fingerprint=3), r"fingerprint is int"),  # type: ignore[arg-type]
    (lambda: Batches(9, global_batch=1, seed=1, mesh=1, group=1), r"mesh and group are both given"),
    (lambda: Batches(9, global_batch=1, seed=1, mesh="dp"), r"mesh is str; expected a DeviceMesh"),
    (lambda: Batches(9, global_batch=1, seed=1, group="dp"), r"group is str; expected a ProcessGroup"),
    (lambda: Batches(9, global_batch=1, seed=1).seek(samples=-1), r"expected no negative number"),
    (lambda: Batches(9, global_batch=1, seed=1).step_done(), r"no iteration runs"),
    (lambda: Batches(9, global_batch=1, seed=1).load_state_dict({"epoch": -1}), r"position of data: found"),
    (lambda: Batches(9, global_batch=1, seed=1).load_state_dict({}), r"Load what holdfast.data saved, or call seek"),
    (lambda: Loader(Endless(), global_batch=1, seed=1), r"IterableDataset, which has no places.*PerRank\(Stateful"),
    (lambda: Loader(Unsized(), global_batch=1, seed=1), r"Unsized, whose length is unknown"),
    (lambda: Loader([], global_batch=1, seed=1), r"dataset has 0 samples"),
    (lambda: Loader(NUMBERS, global_batch=1, seed=1, batch_size=3), r"batch_size=: Loader draws the batches itself"),
    (lambda: Loader(NUMBERS, global_batch=1, seed=1, in_order=False), r"in_order=False: batches would come"),
    (lambda: copy.deepcopy(Loader(NUMBERS, global_batch=1, seed=1)), r"Loader: copied or pickled"),
    (lambda: Loader(NUMBERS, global_batch=1, seed=1, pad="drop"), r"pad='drop'; expected 'repeat' or 'refuse'"),
    (lambda: iter(Loader(NUMBERS, global_batch=1, seed=1)), r"for step in loader.steps\(\)"),
    (lambda: Loader(NUMBERS, global_batch=1, seed=1).step_done(), r"micro-batches of the step are left"),
    (lambda: Mixture({}), r"sources is empty"),
    (lambda: Mixture({"a": (NUMBERS, -1.0)}), r"none negative"),
    (lambda: Mixture({"a": (NUMBERS, float("nan"))}), r"finite"),
    (lambda: Mixture({"a": (NUMBERS, 0.0)}), r"not all 0"),
    (lambda: Mixture({"a": ([], 1.0)}), r"source 'a' has 0 samples"),
    (lambda: Mixture({"a": (NUMBERS, 1.0)}, phases={5: {"b": 1.0}}), r"sample 5 names 'b'; expected names .*: a"),
    (lambda: Mixture({"a": (NUMBERS, 1.0)}, phases={-5: {"a": 1.0}}), r"phases: -5"),
    (lambda: Mixture({"a": (NUMBERS, 1.0)}, epoch_samples=0), r"epoch_samples=0"),
    (holdfast.data.rng, r"no sample is read now"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(holdfast.InvalidError, match=message):
        call()


def test_a_launcher_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(holdfast.InvalidError, match=r"WORLD_SIZE=4.*Call init_process_group first"):
        Batches(9, global_batch=4, seed=1)


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)


def test_more_optimizer_steps_than_steps_drawn(optimizer: torch.optim.Optimizer) -> None:
    batches = Batches(40, global_batch=8, micro_batch=2, seed=1)
    with pytest.raises(
        holdfast.InvalidError, match=r"1 steps were drawn .*, and 2 were taken; .* each 4 micro-batches"
    ):
        for number, _ in enumerate(DataLoader(range(40), batch_sampler=batches)):  # type: ignore[arg-type]
            if number >= 3:
                optimizer.step()
    batches = Batches(8, global_batch=8, micro_batch=2, seed=1)
    for _ in DataLoader(range(8), batch_sampler=batches):  # type: ignore[arg-type]
        pass
    optimizer.step()
    assert (batches.epoch, batches.samples) == (1, 0)
    batches.step_done()  # The call belongs to the step that the optimizer has just taken.
    with pytest.raises(holdfast.InvalidError, match=r"1 steps were drawn .*, and 2 were taken"):
        batches.step_done()
    with pytest.raises(holdfast.InvalidError, match="1 steps were drawn"):
        batches.state_dict()


def test_too_few_optimizer_steps_are_found_at_the_end_of_the_epoch(optimizer: torch.optim.Optimizer) -> None:
    batches = Batches(40, global_batch=8, micro_batch=2, seed=1)
    loader = DataLoader(range(40), batch_sampler=batches)  # type: ignore[arg-type]
    for number, _ in enumerate(loader, 1):
        if number % 8 == 0:
            optimizer.step()
    with pytest.raises(holdfast.InvalidError, match=r"5 steps were drawn .*, and 2 were taken.*second time"):
        iter(loader)
    batches.seek(samples=16)
    assert len(list(loader)) == 12


def test_an_optimizer_step_within_a_step_of_the_loader(optimizer: torch.optim.Optimizer) -> None:
    steps = Loader(NUMBERS, global_batch=8, micro_batch=2, seed=1).steps()
    for _ in next(steps):
        optimizer.step()
    with pytest.raises(holdfast.InvalidError, match=r"step 1: an optimizer stepped after micro-batch 1 of 4"):
        next(steps)


def test_a_step_that_is_not_finished() -> None:
    steps = Loader(NUMBERS, global_batch=8, micro_batch=2, seed=1).steps()
    step = next(steps)
    next(iter(step))
    with pytest.raises(holdfast.InvalidError, match=r"took 1 of 4 micro-batches"):
        next(steps)
    with pytest.raises(holdfast.InvalidError, match=r"iterated before"):
        list(step)


def test_a_load_ends_an_iteration(optimizer: torch.optim.Optimizer) -> None:
    loader = Loader(NUMBERS, global_batch=8, micro_batch=2, seed=1)
    saved, steps = loader.state_dict(), loader.steps()
    step = iter(next(steps))
    next(step)
    loader.load_state_dict(saved)
    for late in (step, steps):
        with pytest.raises(holdfast.InvalidError, match=r"this iteration ended.*Begin a new for"):
            next(late)
    batches = Batches(20, global_batch=2, seed=1)
    drawn = iter(DataLoader(NUMBERS, batch_sampler=batches))  # type: ignore[arg-type]
    next(drawn)
    batches.load_state_dict(batches.state_dict())
    optimizer.step()
    with pytest.raises(holdfast.InvalidError, match=r"this iteration ended"):
        batches.state_dict()
    with pytest.raises(holdfast.InvalidError, match=r"this iteration ended"):
        next(drawn)


def test_another_length_than_at_the_start() -> None:
    numbers = list(range(9))
    loader = Loader(numbers, global_batch=3, seed=1)
    numbers.append(9)
    with pytest.raises(holdfast.InvalidError, match=r"dataset has 10 samples, and had 9"):
        next(loader.steps())
    other = Loader(numbers, global_batch=3, seed=1)
    with pytest.raises(holdfast.InvalidError, match=r"n was 9 when it was saved, and is 10 now"):
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shuffle": "blocks"}, "shuffle was 'full' when it was saved, and is 'blocks' now"),
        ({"fingerprint": "b"}, "fingerprint was '' when it was saved, and is 'b' now"),
    ],
)
def test_another_order_than_was_saved(changed: dict[str, Any], message: str) -> None:
    other = Batches(9, global_batch=1, seed=1, **changed)
    with pytest.raises(holdfast.InvalidError, match=message):
        other.load_state_dict(Batches(9, global_batch=1, seed=1).state_dict())


def test_sources_of_other_lengths_than_were_saved() -> None:
    saved, other = (
        Batches(Mixture({"a": (NUMBERS[:length], 1.0)}, epoch_samples=30), global_batch=8, seed=1)
        for length in (20, 19)
    )
    with pytest.raises(holdfast.InvalidError, match=r"lengths was \{'a': 20\} when it was saved, and is \{'a': 19\}"):
        other.load_state_dict(saved.state_dict())


def test_other_sources_than_were_saved() -> None:
    def position(name: str, weight: float) -> Batches:
        batches = Batches(Mixture({"a": (NUMBERS, 1.0), name: (NUMBERS, weight)}), global_batch=8, seed=1)
        batches.seek(samples=16)
        return batches

    saved = position("b", 1.0).state_dict()
    with pytest.raises(holdfast.InvalidError, match=r"lengths was \{'a': 20, 'b': 20\} when it was saved"):
        position("c", 1.0).load_state_dict(saved)
    with pytest.raises(holdfast.InvalidError, match=r"sources was \{'a': 8, 'b': 8\} when it was saved"):
        position("b", 3.0).load_state_dict(saved)


def test_the_batch_does_not_change_within_a_step() -> None:
    loader = Loader(NUMBERS, global_batch=8, micro_batch=2, seed=1)
    next(iter(next(loader.steps())))
    with pytest.raises(holdfast.InvalidError, match=r"set_global_batch\(4\): step 1 has begun"):
        loader.set_global_batch(4)
    batches = Batches(20, global_batch=2, seed=1)
    drawn = iter(batches)
    next(drawn)
    with pytest.raises(holdfast.InvalidError, match=r"has drawn batches of 2 ahead"):
        batches.set_global_batch(4)
    del drawn
    batches.set_global_batch(4)
    assert len(next(iter(batches))) == 1
    assert len(batches) == 20


def test_empty_micro_batches_may_be_refused() -> None:
    loader = Loader(NUMBERS, global_batch=8, micro_batch=2, seed=1, pad="refuse")
    loader._draws = replace(loader._draws, ranks=DataRanks(0, 5))
    with pytest.raises(holdfast.InvalidError, match=r"step 3 has 4 samples for 5 data ranks × 1 micro-batches"):
        for step in loader.steps():
            list(step)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_counts_that_cannot_be_weights(value: float) -> None:
    loader = Loader(NUMBERS, global_batch=8, seed=1, count=lambda batch: value)
    with pytest.raises(holdfast.InvalidError, match=r"step 1 of epoch 0: count= returned"):
        list(next(loader.steps()))


def test_counts_that_are_all_zero() -> None:
    loader = Loader(NUMBERS, global_batch=8, seed=1, count=lambda batch: 0)
    with pytest.raises(holdfast.InvalidError, match=r"count= returned 0 for every batch"):
        list(next(loader.steps()))


class Broken:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("no such picture")
        return index


DEADLY = """
import os, signal
import holdfast

class Deadly:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

loader = holdfast.data.Loader(Deadly(), global_batch=4, micro_batch=2, seed=1, shuffle=False, num_workers=1)
try:
    for step in loader.steps():
        # Torch raises an error of its own, wherever the training is when the worker dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        list(step)
        loader.step_done()
except holdfast.UnavailableError as error:
    print(error)
print(loader.samples, flush=True)
os._exit(0)
"""


def test_a_worker_that_dies_is_named_with_its_samples() -> None:
    run = subprocess.run([sys.executable, "-c", DEADLY], capture_output=True, text=True, timeout=120)
    assert re.search(r"step [12] of epoch 0, micro-batch [12] of 2: a worker .*has not moved", run.stdout), run
    assert run.stdout.splitlines()[-1] in ("0", "4")


def test_an_error_of_the_data_set_has_a_note() -> None:
    loader = Loader(Broken(), global_batch=4, micro_batch=2, seed=1, shuffle=False)
    with pytest.raises(KeyError) as caught:
        for step in loader.steps():
            list(step)
    assert caught.value.__notes__ == ["step 2 of epoch 0, micro-batch 1 of 2: samples 4, 5"]


def test_states_that_hold_no_exact_position(tmp_path: Path) -> None:
    batches = Batches(20, global_batch=2, seed=1)
    loader: Any = StatefulDataLoader(NUMBERS, batch_sampler=batches)  # type: ignore[arg-type]
    for held in (loader, holdfast.PerRank(loader)):
        with pytest.raises(holdfast.InvalidError, match=r"data: StatefulDataLoader counts its own batches"):
            holdfast.save(tmp_path / "run", {"data": held}, process_group=False)
    model = torch.nn.Linear(1, 1)
    steps = Loader(NUMBERS, global_batch=8, micro_batch=2, seed=1)
    state = {"model": model, "data": steps}
    next(iter(next(steps.steps())))
    with pytest.raises(holdfast.InvalidError, match=r"data: grads=True within a step"):
        holdfast.save(tmp_path / "run", state, process_group=False, grads=True)
    holdfast.save(tmp_path / "run", state, process_group=False)


def test_ranks_that_appear_later_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With spawned processes no variable says that there will be several ranks."""
    batches, loader = Batches(20, global_batch=2, seed=1), Loader(NUMBERS, global_batch=2, seed=1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    for call in (lambda: iter(batches), batches.state_dict, lambda: next(loader.steps()), loader.state_dict):
        with pytest.raises(holdfast.InvalidError, match=r"made before init_process_group, and 4 ranks train now"):
            call()


def test_a_loop_that_is_left_early_may_begin_again(optimizer: torch.optim.Optimizer) -> None:
    """Workers had drawn the whole epoch when the loop was left."""
    batches = Batches(8, global_batch=2, micro_batch=2, seed=1, shuffle=False)
    loader = DataLoader(list(range(8)), batch_sampler=batches, num_workers=1, prefetch_factor=8)  # type: ignore[arg-type]
    seen = []
    for batch in loader:
        seen += batch.tolist()
        optimizer.step()
        if len(seen) == 4:
            break
    for batch in loader:
        seen += batch.tolist()
        optimizer.step()
    assert seen == list(range(8))
    assert (batches.epoch, batches.samples) == (1, 0)


def test_the_length_is_that_of_the_loop(optimizer: torch.optim.Optimizer) -> None:
    """Loops step at the last micro-batch by `number == len(loader)`."""
    batches = Batches(20, global_batch=8, micro_batch=3, seed=1)
    loader = DataLoader(list(range(20)), batch_sampler=batches)  # type: ignore[arg-type]
    for epoch in range(2):
        assert len(loader) == 8
        for number, _ in enumerate(loader, 1):
            assert len(loader) == 8
            if number % 3 == 0 or number == len(loader):
                optimizer.step()
        assert batches.epoch == epoch + 1
    assert batches.step == 6


def test_the_optimizer_that_counts_is_gone() -> None:
    batches = Batches(40, global_batch=8, seed=1)
    drawn = iter(batches)
    next(drawn)
    first = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    first.step()
    del first
    gc.collect()
    with pytest.raises(holdfast.InvalidError, match=r"optimizer whose steps move .* is gone"):
        batches.state_dict()


def test_a_shorter_data_set_is_adopted_at_its_next_epoch() -> None:
    longer, shorter = (Batches(n, global_batch=8, seed=1, tail="carry") for n in (100, 10))
    longer.seek(samples=80)
    shorter.adopt()
    shorter.load_state_dict(longer.state_dict())
    assert (shorter.epoch, shorter.samples) == (1, 0)


def test_a_position_of_another_tail_doubles_no_sample() -> None:
    carried = Batches(10, global_batch=8, seed=1, tail="carry")
    carried.seek(samples=8)
    drawn = list(iter(carried))
    assert len(drawn) == 8
    carried.step_done()
    short = Batches(10, global_batch=8, seed=1)
    short.load_state_dict(carried.state_dict())
    assert (short.epoch, short.samples) == (1, 6)
