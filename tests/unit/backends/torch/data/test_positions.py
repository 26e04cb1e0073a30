"""Positions saved at every point of a step, with real loaders, optimizers and managers: the resume is exact."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data import Batches, Loader, Mixture

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # More workers than cores.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it.
]

N, GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 22, 8, 3, 2
STEPS = 6
"""Steps of both epochs, the last of each one short."""


class Numbers:
    """Samples that say which they are."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Training:
    """A training with accumulation, stopped at any point."""

    def __init__(self, kind: str, *, workers: int = 0, scaler: bool = False) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(1, 1)
        self.optimizers = [torch.optim.AdamW([each], lr=0.1) for each in self.model.parameters()]
        self.kind = kind
        options = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "seed": 3}
        self.data = Loader(Numbers(), num_workers=workers, **options) if kind == "loader" else Batches(N, **options)
        self.loader = (
            {"plain": DataLoader, "stateful": StatefulDataLoader}.get(kind, DataLoader)(
                Numbers(), batch_sampler=self.data, num_workers=workers
            )
            if kind != "loader"
            else None
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaler else None
        self.skipped: set[int] = set()
        self.state = {"model": self.model, "first": self.optimizers[0], "second": self.optimizers[1], "data": self.data}
        if self.scaler is not None:
            self.state["scaler"] = self.scaler
        self.trained: dict[int, list[tuple[float, float]]] = {}
        """Samples with their weights by step."""

    def micro_batches(self) -> Iterator[tuple[int, bool, torch.Tensor, float]]:
        """Yield the step of each micro-batch, whether the step ends, the batch and its weight."""
        if isinstance(self.data, Loader):
            for step in self.data.steps(EPOCHS):
                for number, (batch, weight) in enumerate(step):
                    yield step.number, number == len(step) - 1, batch, weight
            return
        assert self.loader is not None
        while self.data._draws.epochs.settled(self.data._position).epoch < EPOCHS:
            begun, left = self.data.step, N - self.data.samples % N
            sizes = [min(GLOBAL_BATCH, left - start) for start in range(0, left, GLOBAL_BATCH)]
            ends = np.cumsum([-(-size // MICRO_BATCH) for size in sizes])
            for number, batch in enumerate(self.loader, 1):
                step = int(np.searchsorted(ends, number))
                yield begun + step + 1, number in ends, batch, 1.0

    def run(self, at_point: Callable[[str, int], None] = lambda point, step: None, *, step_done: bool = False) -> None:
        """Train to the end; call `at_point` between any two acts of the training."""
        for step, ends, batch, weight in self.micro_batches():
            at_point("begins", step)
            self.trained.setdefault(step, []).extend((float(each), weight) for each in batch)
            loss = (self.model(batch[:, None]).square().mean() + batch.mean()) * weight
            if step in self.skipped:
                loss = loss * float("inf")
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            at_point("backward", step)
            if not ends:
                continue
            for optimizer in self.optimizers:
                optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
            if self.scaler is not None:
                self.scaler.update()
            if step_done:
                self.data.step_done()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            at_point("stepped", step)


KINDS = ("loader", "plain", "stateful")


class Stop(Exception):
    """The process is killed."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_at_every_point_of_a_step_resumes_with_the_very_samples(kind: str, tmp_path: Path) -> None:
    whole = Training(kind)
    points: list[tuple[str, int]] = []
    whole.run(lambda point, step: points.append((point, step)))
    assert len(whole.trained) == STEPS
    assert len(points) > 3 * STEPS
    for number, (stop_at, stop_step) in enumerate(points):
        first = Training(kind)
        calls = itertools.count()

        def kill(
            point: str, step: int, first: Training = first, calls: Iterator[int] = calls, number: int = number
        ) -> None:
            if next(calls) == number:
                holdfast.save(tmp_path / str(number), first.state, process_group=False)
                raise Stop

        with pytest.raises(Stop):
            first.run(kill)
        first.data.seek()  # Its process is dead, so later steps are not its own.
        again = Training(kind)
        holdfast.load(tmp_path / str(number), again.state, process_group=False)
        again.run()
        done = stop_step if stop_at == "stepped" else stop_step - 1
        assert list(again.trained) == list(range(done + 1, STEPS + 1)), (stop_at, stop_step)
        assert all(again.trained[step] == whole.trained[step] for step in again.trained)
        assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


@pytest.mark.parametrize("kind", ("loader", "plain", "stateful"))
@pytest.mark.parametrize("workers", (1, 3))
def test_workers_ahead_do_not_move_the_position(kind: str, workers: int, tmp_path: Path) -> None:
    whole = Training(kind)
    whole.run()
    first = Training(kind, workers=workers)

    def kill(point: str, step: int) -> None:
        if (point, step) == ("stepped", 2):
            assert first.data.state_dict()["samples"] == 2 * GLOBAL_BATCH
            holdfast.save(tmp_path / "run", first.state, process_group=False)
            raise Stop

    with suppress(Stop):  # pytest.raises would keep the workers until a garbage collection.
        first.run(kill)
    assert list(first.trained) == [1, 2]
    again = Training(kind, workers=workers)
    holdfast.load(tmp_path / "run", again.state, process_group=False)
    again.run()
    assert again.trained == {step: whole.trained[step] for step in range(3, STEPS + 1)}


@pytest.mark.parametrize("kind", ("loader", "plain"))
def test_a_skipped_step_of_a_scaler_moves_the_position(kind: str, tmp_path: Path) -> None:
    """With `step_done()`, or under `Loader` with the request for the next step."""
    for tells in (True, False) if kind == "loader" else (True,):
        training, places = Training(kind, scaler=True), []
        training.skipped = {1, 3}

        def act(point: str, step: int, training: Training = training, places: list[int] = places) -> None:
            if point == "stepped":
                places.append(training.data.samples)

        training.run(act, step_done=tells)
        assert places == ([8, 16, 0, 8, 16, 0] if tells else [0, 16, 16, 8, 16, 0])
        assert sorted(sample for step in (1, 2, 3) for sample, _ in training.trained[step]) == list(range(N))
        assert training.data.step == STEPS


def test_a_scaler_beside_batches_is_refused_until_steps_are_told(tmp_path: Path) -> None:
    training = Training("plain", scaler=True)
    with pytest.raises(holdfast.InvalidError, match=r"scaler is a GradScaler.*step_done\(\) after scaler.update"):
        holdfast.save(tmp_path / "run", training.state, process_group=False)
    training.run(step_done=True)
    holdfast.save(tmp_path / "run", training.state, process_group=False)
    told_late = Training("loader", scaler=True)
    holdfast.save(tmp_path / "other", told_late.state, process_group=False)


@pytest.mark.parametrize("point", ("begins", "backward", "stepped"))
def test_a_run_that_is_told_to_stop_resumes_with_the_very_sample(point: str, tmp_path: Path) -> None:
    whole = Training("loader")
    whole.run()

    def run(training: Training, stop: tuple[str, int] | None) -> None:
        with holdfast.CheckpointManager(tmp_path / "run", every=100, process_group=False, preemption=True) as manager:
            manager.load(training.state)

            def act(now: str, step: int) -> None:
                if (now, step) == stop:
                    signal.raise_signal(signal.SIGTERM)
                if now == "stepped":
                    manager.maybe_save(step, training.state)

            training.run(act)

    first, again = Training("loader"), Training("loader")
    with pytest.raises(holdfast.Preempted):
        run(first, (point, 2))
    run(again, None)
    assert again.trained == {step: whole.trained[step] for step in range(3, STEPS + 1)}
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


def test_a_redo_log_carries_the_position(tmp_path: Path) -> None:
    whole = Training("loader")
    whole.run()

    def run(training: Training, stop: int) -> int | None:
        with holdfast.CheckpointManager(tmp_path / "run", every=4, process_group=False, differential=True) as manager:
            begun = manager.load(training.state)

            def act(point: str, step: int) -> None:
                if point == "stepped":
                    manager.maybe_save(step, training.state)
                    if step == stop:
                        raise Stop

            training.run(act)
        return begun

    with pytest.raises(Stop):
        run(Training("loader"), 5)
    again = Training("loader")
    assert run(again, 0) == 5
    assert again.trained == {6: whole.trained[6]}
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


# ---------------------------------------------------------------------------------------------- what a loader gives


class Augmented(Numbers):
    """Samples that draw from all generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        own = holdfast.data.rng().normal()
        return torch.tensor([index, own, random.random(), np.random.rand(), float(torch.rand(()))])


@pytest.mark.parametrize("workers", (0, 2))
def test_augmentation_is_the_same_on_any_workers(workers: int) -> None:
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    loader = Loader(Augmented(), global_batch=8, micro_batch=4, seed=3, reseed=True, num_workers=workers)
    found = torch.cat([batch for step in loader.steps(2) for batch, _ in step])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert len(torch.unique(found[:, 1])) == 2 * N, "each sample of each epoch draws numbers of its own"
    other = Loader(Augmented(), global_batch=5, seed=3, reseed=True)
    drawn = {(epoch, float(row[0])): row for epoch, row in zip([0] * N + [1] * N, found, strict=True)}
    for step in other.steps(2):
        for batch, _ in step:
            assert torch.equal(batch[0], drawn[step.epoch, float(batch[0, 0])])


def test_a_resume_draws_nothing_from_torchs_generator() -> None:
    loader = Loader(Numbers(), global_batch=8, seed=3)
    before = torch.get_rng_state()
    next(iter(next(loader.steps())))
    assert torch.equal(before, torch.get_rng_state())


def test_weights_count_what_the_caller_counts() -> None:
    loader = Loader(Numbers(), global_batch=8, micro_batch=3, seed=3, count=lambda batch: float(batch.sum()))
    step = next(loader.steps())
    batches = list(step)
    total = sum(float(batch.sum()) for batch, _ in batches)
    assert [weight for _, weight in batches] == pytest.approx([float(batch.sum()) / total for batch, _ in batches])


def test_a_mixture_keeps_its_counts_in_the_state() -> None:
    mixture = Mixture({"a": (Numbers(40), 0.75), "b": (Numbers(5), 0.25)}, phases={24: {"b": 1}}, epoch_samples=32)
    loader = Loader(mixture, global_batch=8, seed=3)
    steps = loader.steps(1)
    for expected in ({"a": 6, "b": 2}, {"a": 12, "b": 4}, {"a": 18, "b": 6}, {"a": 18, "b": 14}):
        list(next(steps))
        loader.step_done()
        assert loader.state_dict()["sources"] == expected
    assert len(mixture) == 32


def test_a_dataset_of_hugging_face_is_taken_as_it_is() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": list(range(N))})
    for workers in (0, 2):
        loader = Loader(dataset, global_batch=8, micro_batch=3, seed=3, num_workers=workers)
        found = [int(each) for step in loader.steps(1) for batch, _ in step for each in batch["x"]]
        assert sorted(found) == list(range(N))


def test_the_batch_changes_between_steps() -> None:
    loader = Loader(Numbers(), global_batch=4, seed=3, micro_batch=4)
    found, sizes = [], []
    for step in loader.steps(1):
        found += [float(each) for batch, _ in step for each in batch]
        sizes.append(step.samples)
        loader.step_done()
        if step.number == 2:
            loader.set_global_batch(6)
    assert sizes == [4, 4, 6, 6, 2]
    assert sorted(found) == list(range(N))


def test_a_position_is_sought_and_adopted() -> None:
    batches = Batches(100, global_batch=10, seed=1)
    batches.seek(samples=250)
    assert (batches.epoch, batches.samples, batches.step, batches.steps_in_epoch) == (2, 50, 25, 10)
    other = Batches(100, global_batch=10, seed=2, fingerprint="b")
    with pytest.raises(holdfast.InvalidError, match=r"seed was 1 when it was saved, and is 2 now"):
        other.load_state_dict(batches.state_dict())
    other.adopt()
    other.load_state_dict(batches.state_dict())
    assert (other.epoch, other.samples, other.state_dict()["seed"]) == (2, 50, 2)
    with pytest.raises(holdfast.InvalidError, match="seed was 1"):
        other.load_state_dict(batches.state_dict())


def test_the_log_line_of_a_load_says_where_training_goes_on(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("INFO")
    training = Training("loader")
    training.data.seek(epoch=1, samples=8)
    holdfast.save(tmp_path / "run", training.state, process_group=False)
    holdfast.load(tmp_path / "run", Training("loader").state, process_group=False)
    assert "data goes on in epoch 1 at sample 8 of 22, after step 4" in caplog.text
