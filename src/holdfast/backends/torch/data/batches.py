"""The position of training in the order of samples, as a batch sampler.

An iteration is in one of three states:

- running: a `for` draws micro-batches; each step of the optimizer that stepped first moves the position by one step;
- over: the last micro-batch of the epoch was drawn; steps still move the position;
- ended: a load or `seek` set the position, or another `for` began. A draw is an error then.

Steps after the end, and steps that exceed those drawn, are an error at the next draw or save, not within the optimizer:
it may belong to another training. A loader draws ahead of the training, so what was drawn says nothing of the position.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from operator import index
from typing import NoReturn

import torch
from torch.utils.data import Sampler

from holdfast.backends.torch.data.data_ranks import data_ranks_of
from holdfast.backends.torch.data.draws import Draws
from holdfast.backends.torch.data.mixture import Mixture
from holdfast.backends.torch.data.step_hook import listen
from holdfast.base.sampling.order import Order, Shuffle
from holdfast.base.sampling.position import DataPosition, Epochs, Tail
from holdfast.errors import InvalidError

logger = logging.getLogger(__name__)

_VERSION = 1


@dataclass(slots=True)
class Iteration:
    """One `for` over the batches."""

    begun_at: DataPosition
    drawn: int = 0
    """Steps whose last micro-batch was drawn."""

    ahead: int = 0
    """Steps that the loader had drawn when the optimizer stepped first."""

    taken: int = 0
    """Steps since the iteration began."""

    is_over: bool = False
    is_ended: bool = False
    steps_after_end: int = 0
    """Steps with batches that a loader had read ahead when the iteration ended."""

    optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    """The optimizer that stepped first; others do not move the position."""

    draws: weakref.ref[Iterator[list[int]]] | None = None
    """Dies with the loop that iterates."""

    @property
    def is_held(self) -> bool:
        """Return whether a loop still iterates."""
        return self.draws is not None and self.draws() is not None

    @property
    def is_live(self) -> bool:
        """Return whether training may still take a step with batches of this iteration.

        The last step of an epoch may come after the loop. A loop that was left early takes no further step.
        """
        return self.taken < self.drawn if self.is_over else self.is_held


class Batches(Sampler[list[int]]):
    """Batch sampler for a `DataLoader` that goes on with the very next sample, on any number of ranks and workers.

    Yields the indices of this rank's micro-batches, from the position to the end of the epoch. The position moves with
    each step of the optimizer that steps first, never with what a loader fetched ahead. Every data rank gets equally
    many micro-batches, none of them empty. Keep this object in the state, not the loader.

    Args:
        n: Samples of the data set, or a `Mixture`.
        global_batch: Samples of a step over all data ranks; `set_global_batch` changes the number.
        micro_batch: Most samples of a micro-batch.
        seed: Key of the order, equal on all ranks.
        shuffle: "full", "blocks" (4,096 neighbours stay together) or False.
        tail: The last step of an epoch: "short", "drop", or "carry" (filled from the next epoch).
        mesh: Mesh whose dimensions all hold data, such as `mesh["dp"]`.
        group: Process group of the data ranks, in place of a mesh. Without either, all ranks are data ranks.
        fingerprint: Text that names the content of the data set; a load refuses another.
    Raises:
        InvalidError: A value is outside its range, or the global batch is below the number of data ranks.

    Example:
        >>> batches = holdfast.data.Batches(len(dataset), global_batch=96, micro_batch=8, seed=7)
        >>> loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, num_workers=4)
        >>> state = {"model": model, "optimizer": optimizer, "data": batches}
    """

    def __init__(
        self,
        n: int | Mixture,
        *,
        global_batch: int,
        micro_batch: int = 1,
        seed: int,
        shuffle: Shuffle = "full",
        tail: Tail = "short",
        mesh: object = None,
        group: object = None,
        fingerprint: str = "",
    ) -> None:
        checked = Order(len(n) if isinstance(n, Mixture) else n, seed, shuffle)
        order = n.order(seed, shuffle) if isinstance(n, Mixture) else checked
        self._seed, self._shuffle, self._fingerprint = seed, shuffle, fingerprint
        if not isinstance(fingerprint, str):
            raise InvalidError(f"fingerprint is {type(fingerprint).__name__}; expected text")
        self._draws = Draws(order, Epochs(checked.n, global_batch, tail), data_ranks_of(mesh, group), micro_batch)
        self._position = DataPosition()
        self._iteration: Iteration | None = None
        self._is_told = False
        """Whether `step_done` moves the position, in place of optimizers."""
        self._adopts = False

    # ------------------------------------------------------------------------------------------ the position

    @property
    def epoch(self) -> int:
        """Return the epoch of the position, from 0."""
        return self._position.epoch

    @property
    def samples(self) -> int:
        """Return the samples of the epoch whose steps the optimizer has taken."""
        return self._position.samples

    @property
    def step(self) -> int:
        """Return the steps taken since the start of the run."""
        return self._position.steps

    @property
    def steps_in_epoch(self) -> int:
        """Return the steps of the present epoch, for schedules and progress bars."""
        return self._draws.epochs.steps_in_epoch(self._draws.epochs.settled(self._position).epoch)

    @property
    def has_named_ranks(self) -> bool:
        """Return whether the caller named the data ranks, or there is one rank only."""
        return self._draws.ranks.are_named or self._draws.ranks.number == 1

    @property
    def is_told(self) -> bool:
        """Return whether `step_done` was called, so that optimizers do not move the position."""
        return self._is_told

    def step_done(self) -> None:
        """Move the position by one step. From the first call on, optimizer steps do not move the position.

        Call this after `scaler.update()` of a `GradScaler`, which may skip a step, and where optimizers step in
        backward.

        Raises:
            InvalidError: More steps are done than were drawn.
        """
        iteration = self._iteration
        if iteration is None or iteration.is_ended:
            raise InvalidError("step_done(): no iteration runs; expected a call after each step within the for loop")
        # The step before the first call has moved the position already, unless a GradScaler skipped it.
        if self._is_told or not iteration.taken:
            self._move(iteration)
        self._is_told = True
        self._require_drawn(iteration)

    def set_global_batch(self, global_batch: int) -> None:
        """Change the samples of a step, from the next step on; call this on all ranks.

        Raises:
            InvalidError: A loop holds batches of the present size, or the size is outside its range.
        """
        if self._iteration is not None and self._iteration.is_held and not self._iteration.is_ended:
            raise InvalidError(
                f"set_global_batch({global_batch}): the loader has drawn batches of {self._draws.epochs.global_batch} "
                "ahead; expected a call outside the for loop. Leave the loop, change the size, and begin a new for"
            )
        self._end_iteration()
        self._resize(global_batch)

    def _resize(self, global_batch: int) -> None:
        self._draws = replace(self._draws, epochs=replace(self._draws.epochs, global_batch=global_batch))

    def seek(self, *, epoch: int = 0, samples: int = 0, steps: int | None = None) -> None:
        """Go on at a place, as of a checkpoint that had no position: Megatron's `consumed_samples`, for example.

        Args:
            epoch: Number of the epoch, from 0.
            samples: Samples trained in the epoch; n and more are in later epochs.
            steps: Steps trained since the start; as many as the global batch makes of the samples without it.
        """
        if min(epoch, samples, steps or 0) < 0:
            raise InvalidError(f"seek(epoch={epoch}, samples={samples}, steps={steps}); expected no negative number")
        epoch, samples = index(epoch), index(samples)
        later, samples = divmod(samples, self._draws.epochs.n)
        epoch += later
        if steps is None:
            steps = epoch * self._draws.epochs.steps_in_epoch(0) + samples // self._draws.epochs.global_batch
        self._end_iteration()
        self._position = DataPosition(epoch, samples, steps)

    def adopt(self) -> None:
        """Let the next load take another seed, order, length, fingerprint or sources than were saved."""
        self._adopts = True

    # ------------------------------------------------------------------------------------------ the state

    def state_dict(self) -> dict[str, object]:
        """Return the position, some hundred bytes, equal on all ranks.

        Raises:
            InvalidError: More steps were taken than drawn.
        """
        self._draws.ranks.require_current()
        self._require_drawn(self._iteration)
        served = self._draws.order.served(self._position.epoch, self._position.samples)
        return {"version": _VERSION, **asdict(self._position), **self._identity(), "sources": served}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on at a saved position. A `for` that runs ends: its next batch is an error.

        Raises:
            InvalidError: Another seed, order, length, fingerprint or source was saved; or the state is of another kind.
        """
        numbers = [state.get(key) for key in ("epoch", "samples", "steps")]
        if state.get("version") != _VERSION or not all(type(each) is int and each >= 0 for each in numbers):
            raise InvalidError(
                f"position of data: found {dict(state)!r:.200}; expected version {_VERSION} with epoch, samples and "
                "steps. Load what holdfast.data saved, or call seek(epoch=, samples=)"
            )
        position = DataPosition(*numbers)  # type: ignore[arg-type]
        if not self._adopts:
            self._require_same(state, position)
        self._adopts = False
        self._end_iteration()
        if position.samples >= self._draws.epochs.n:  # Of a longer data set, which was adopted.
            position = DataPosition(position.epoch + 1, 0, position.steps)
        self._position = position
        logger.info(
            "data goes on in epoch %d at sample %d of %d, after step %d",
            position.epoch,
            position.samples,
            self._draws.epochs.n,
            position.steps,
        )

    def _identity(self) -> dict[str, object]:
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "n": self._draws.epochs.n,
            "fingerprint": self._fingerprint,
            "lengths": self._draws.order.lengths,
        }

    def _require_same(self, state: Mapping[str, object], position: DataPosition) -> None:
        own = self._identity() | {"sources": self._draws.order.served(position.epoch, position.samples)}
        for name, value in own.items():
            if state.get(name) != value:
                raise InvalidError(
                    f"position of data: {name} was {state.get(name)!r} when it was saved, and is {value!r} now; "
                    "expected the same, or the samples before and after this step are of different orders. Pass the "
                    "saved value, or call adopt() before the load to go on in the new order"
                )

    # ------------------------------------------------------------------------------------------ drawing

    def __len__(self) -> int:
        """Return the micro-batches of this rank to the end of the epoch: from the `for` that runs, or the position."""
        iteration = self._iteration
        runs = iteration is not None and iteration.is_live and not iteration.is_ended
        begin = iteration.begun_at if iteration is not None and runs else self._draws.epochs.settled(self._position)
        return self._draws.micro_batches_left(begin)

    def __iter__(self) -> Iterator[list[int]]:
        """Begin an iteration, from the position to the end of the epoch.

        Raises:
            InvalidError: The iteration before took fewer steps than the loop had batches for, or steps after a load.
        """
        previous = self._iteration
        if previous is not None and previous.steps_after_end:
            self._iteration = None
            raise InvalidError(ENDED)
        # Batches that the loader had ahead may be left over where a loop ended early.
        if previous is not None and previous.is_over and not previous.is_ended:
            left = previous.drawn - previous.taken
            if left > previous.ahead or left == previous.drawn > 0:
                self._refuse(previous, "; if the loop was left early, call seek(epoch=, samples=) first")
        _warn_of_unequal_shares(self._draws)
        iteration = self._begin()
        draws = self._indices(iteration)
        iteration.draws = weakref.ref(draws)
        return draws

    def _begin(self) -> Iteration:
        self._draws.ranks.require_current()
        self._end_iteration()
        self._position = self._draws.epochs.settled(self._position)
        self._iteration = Iteration(self._position)
        listen(self)
        return self._iteration

    def _end_iteration(self) -> None:
        if self._iteration is not None:
            self._iteration.is_ended = self._iteration.is_live
            self._iteration = self._iteration if self._iteration.is_ended else None

    def _indices(self, iteration: Iteration) -> Iterator[list[int]]:
        for draw in self._draws.since(iteration.begun_at):
            if iteration.is_ended:
                raise InvalidError(ENDED)
            self._require_drawn(iteration)
            iteration.drawn += draw.ends_step
            yield draw.samples
        iteration.is_over = True

    # ------------------------------------------------------------------------------------------ optimizer steps

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the position with the optimizer that stepped first in this iteration."""
        iteration = self._iteration
        if iteration is None or self._is_told or not iteration.is_live:
            return
        if iteration.optimizer is None:
            iteration.optimizer = weakref.ref(optimizer)
        if iteration.optimizer() is optimizer:
            self._move(iteration)

    def _move(self, iteration: Iteration) -> None:
        iteration.taken += 1
        iteration.ahead = iteration.ahead or iteration.drawn
        if iteration.is_ended:
            iteration.steps_after_end += 1
        elif iteration.taken <= iteration.drawn:
            self._position = self._draws.epochs.after(self._position)

    def _require_drawn(self, iteration: Iteration | None) -> None:
        if iteration is None:
            return
        if iteration.steps_after_end:
            raise InvalidError(ENDED)
        is_gone = iteration.optimizer is not None and iteration.optimizer() is None
        if is_gone and iteration.is_live and not self._is_told:
            raise InvalidError(
                "the optimizer whose steps move the position of data is gone, and another may have stepped; expected "
                "one optimizer in an iteration. Call step_done() after each step"
            )
        if iteration.taken > iteration.drawn and not iteration.is_ended:
            self._refuse(iteration)

    def _refuse(self, iteration: Iteration, remedy: str = "") -> NoReturn:
        raise InvalidError(
            f"epoch {iteration.begun_at.epoch}: {iteration.drawn} steps were drawn since the for began, and "
            f"{iteration.taken} were taken; expected one optimizer step for each {self._accumulation()}. "
            f"{self._causes()}{remedy}"
        )

    def _accumulation(self) -> str:
        count = self._draws.micro_batch_count
        return f"{count} micro-batches" if count > 1 else "micro-batch"

    def _causes(self) -> str:
        return (
            f"Accumulate over {self._accumulation()}, or change micro_batch or global_batch; prepare this loader with "
            "no framework that splits its batches a second time; with a GradScaler, or where optimizers step in "
            "backward, call step_done() after each step"
        )


@lru_cache
def _warn_of_unequal_shares(draws: Draws) -> None:
    """Log once that micro-batches of a step differ in size."""
    size, ranks = draws.epochs.global_batch, draws.ranks
    if size % (ranks.number * draws.micro_batch_count) and ranks.rank == 0:
        logger.warning(
            "global_batch=%d on %d data ranks makes micro-batches of unlike size, so a mean over ranks is not the "
            "mean over samples; holdfast.data.Loader gives each micro-batch its weight",
            size,
            ranks.number,
        )


ENDED = (
    "this iteration ended: a load or seek() set the position of data, or another for began; expected no further batch "
    "of it. Begin a new for, which goes on at the position"
)
