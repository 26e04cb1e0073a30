"""A loader that hands out steps, with the weight of each micro-batch.

A step is in one of four states, and only the training thread moves it on:

- asked: `steps()` has returned the step; no micro-batch is out;
- open: its first micro-batch is out;
- taken: its last micro-batch is out;
- done: the position has moved, by the first optimizer step, `step_done()`, or the request for the next step.

A save before "done" stores the start of the step. The weights are still those of that start.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from holdfast.backends.torch.data.batches import ENDED, Batches, Iteration
from holdfast.backends.torch.data.mixture import Mixture, length_of
from holdfast.backends.torch.data.sample_keys import KeyedSamples
from holdfast.base.sampling.order import Shuffle
from holdfast.base.sampling.position import DataPosition, Tail
from holdfast.base.sampling.shares import has_repeats
from holdfast.errors import InvalidError, UnavailableError

_OWN = ("batch_size", "sampler", "batch_sampler", "drop_last")
"""Options of `DataLoader` that `Loader` sets itself."""


class Step:
    """One step: iterate it for the micro-batches of this rank, each with its weight."""

    def __init__(self, loader: Loader, begun_at: DataPosition, samples: int, micro_batches: int) -> None:
        self.number = begun_at.steps + 1
        """Number of the step in the run, from 1."""

        self.epoch = begun_at.epoch
        self.samples = samples
        """Samples of the step over all data ranks."""

        # No cycle: one that a garbage collection frees would wait five seconds for each worker.
        self._loader, self._micro_batches = weakref.proxy(loader), micro_batches
        self.handed_out = 0
        """Micro-batches that the training has got."""

        self.is_done = False
        self.stepped_after: int | None = None
        """Micro-batches that were handed out when an optimizer stepped too early."""

    def __len__(self) -> int:
        """Return the micro-batches of the step on each data rank."""
        return self._micro_batches

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        """Yield each micro-batch with its weight; the weighted mean losses average to the mean over the step.

        Raises:
            InvalidError: The step was iterated before, or is not the present one.
            UnavailableError: A worker died.
        """
        handed_out: Iterator[tuple[Any, float]] = self._loader.handed_out(self)
        return handed_out

    @property
    def is_taken(self) -> bool:
        """Return whether the last micro-batch was handed out."""
        return self.handed_out == self._micro_batches


class Loader(Batches):
    """A `DataLoader` that goes on with the very next sample, and gives each micro-batch the weight of its samples.

    DDP and FSDP average gradients over ranks. The mean loss of a micro-batch times its weight averages to the mean over
    all samples of the step, on any number of ranks. Keep the loader in the state.

    Args:
        dataset: Anything with len and []: a list, an array, a `datasets.Dataset`, a `Mixture`.
        global_batch, micro_batch, seed, shuffle, tail, mesh, group, fingerprint: As of `Batches`.
        count: Returns the number of terms in the mean loss of a batch, such as the tokens that count. Without it, the
            samples. With it the micro-batches of a step are read before the first is handed out, and the data ranks
            sum one number a step.
        reseed: Whether each sample also sets the generators of Python, numpy and torch, at about 0.1 ms a sample.
        pad: "repeat": a micro-batch without samples repeats one, with weight 0; "refuse": such a step is an error.
        options: Other options of `DataLoader`.
    Raises:
        InvalidError: A value is outside its range, or the data set has no places.

    Example:
        >>> loader = holdfast.data.Loader(dataset, global_batch=96, micro_batch=8, seed=7, num_workers=4)
        >>> state = {"model": model, "optimizer": optimizer, "data": loader}
        >>> manager.load(state)
        >>> for step in loader.steps(epochs=3):
        ...     for batch, weight in step:
        ...         (loss_of(model, batch) * weight).backward()
        ...     optimizer.step(); optimizer.zero_grad()
        ...     manager.maybe_save(step.number, state)
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int = 1,
        seed: int,
        shuffle: Shuffle = "full",
        tail: Tail = "short",
        mesh: object = None,
        group: object = None,
        fingerprint: str = "",
        count: Callable[[Any], float] | None = None,
        reseed: bool = False,
        pad: str = "repeat",
        **options: Any,
    ) -> None:
        length = length_of(dataset, "dataset")
        super().__init__(
            dataset if isinstance(dataset, Mixture) else length,
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=seed,
            shuffle=shuffle,
            tail=tail,
            mesh=mesh,
            group=group,
            fingerprint=fingerprint,
        )
        if pad not in ("repeat", "refuse"):
            raise InvalidError(f"pad={pad!r}; expected 'repeat' or 'refuse'")
        if options.get("in_order") is False:
            raise InvalidError("in_order=False: batches would come in another order than their weights; expected True")
        if own := [name for name in _OWN if name in options]:
            raise InvalidError(f"{own[0]}=: Loader draws the batches itself; expected global_batch and micro_batch")
        self._dataset, self._count, self._pad = dataset, count, pad
        # A generator of its own: a new iteration, as after a resume, draws a number from the loader's generator.
        options.setdefault("generator", torch.Generator())
        self._make = partial(DataLoader, KeyedSamples(dataset, seed, reseed=reseed), **options)  # type: ignore[arg-type]
        self._loader: DataLoader[Any] = self._make(batch_sampler=_Keys(self))
        self._batches: Iterator[Any] = iter(())
        self._step: Step | None = None

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles: the loader inside would follow this object."""
        raise InvalidError(
            "Loader: copied or pickled; expected one for each process. Make a new one, and load its state"
        )

    def __iter__(self) -> NoReturn:
        """Refuse, since batches alone have no weights."""
        raise InvalidError("Loader: iterated itself; expected its steps. Write for step in loader.steps(): ...")

    def steps(self, epochs: int | None = None) -> Iterator[Step]:
        """Yield the steps from the position on.

        Args:
            epochs: Epochs of the whole run; without it the steps have no end.
        Raises:
            InvalidError: The loop does not finish a step, an optimizer stepped within one, a load or `seek` ended the
                iteration, or the data set has another length.
        """
        iteration: Iteration | None = None
        self._step = None
        try:
            while True:
                if iteration is not None:
                    self._require_current(iteration)
                    self._finish()
                position = self._draws.epochs.settled(self._position)
                if epochs is not None and position.epoch >= epochs:
                    return
                if iteration is None or iteration.is_over or position.epoch != iteration.begun_at.epoch:
                    iteration = self._begin_reading()
                size = self._draws.epochs.size(position)
                parts = self._draws.parts(size)
                if self._pad == "refuse" and has_repeats(size, self._draws.ranks.number, self._draws.micro_batch):
                    ranks = self._draws.ranks.number
                    raise InvalidError(
                        f"step {position.steps + 1} has {size} samples for {ranks} data ranks × {len(parts)} "
                        "micro-batches; pad='refuse' expected a sample for each. Pass tail='drop' or 'carry', another "
                        "global_batch, or pad='repeat'"
                    )
                self._step = Step(self, position, size, len(parts))
                yield self._step
        finally:
            if self._iteration is iteration and (self._step is None or self._step.is_taken):
                self._batches = iter(())  # Frees the workers of a loop that was left early.

    def _begin_reading(self) -> Iteration:
        length = length_of(self._dataset, "dataset")
        if length != self._draws.epochs.n:
            raise InvalidError(
                f"dataset has {length} samples, and had {self._draws.epochs.n} when the loader was made; expected the "
                "same. Make a new Loader, and call adopt() before it loads this position"
            )
        iteration = self._begin()
        self._batches = iter(())  # Frees the workers of the iteration before.
        self._batches = iter(self._loader)
        return iteration

    def keys(self) -> Iterator[tuple[int | list[int], list[int]]]:
        """Yield epochs and samples of each micro-batch, from the position to the end of the epoch."""
        for draw in self._draws.since(self._position):
            yield draw.epochs, draw.samples

    # ------------------------------------------------------------------------------------------ a step

    def handed_out(self, step: Step) -> Iterator[tuple[Any, float]]:
        """Yield the micro-batches of a step with their weights."""
        if step is not self._step or step.handed_out:
            raise InvalidError(
                f"step {step.number} was iterated before, or another step was requested; expected one for loop over "
                "each step, as soon as steps() returns it"
            )
        iteration, parts = self._iteration, self._draws.parts(step.samples)
        if self._count is None:
            weights = [0.0 if part.is_repeat else part.stop - part.start for part in parts]
            total, ahead = float(step.samples), []
        else:
            ahead = [self._next_batch(step, number) for number in range(len(step))]
            counted = [float(self._count(batch)) for batch in ahead]
            weights = [0.0 if part.is_repeat else count for part, count in zip(parts, counted, strict=True)]
            # A bad number reaches the sum, so that all data ranks raise.
            own = math.fsum(weights) if all(weight >= 0 for weight in weights) else math.nan
            total = self._draws.ranks.total(own)
            if not math.isfinite(total):
                raise InvalidError(
                    f"step {step.number} of epoch {step.epoch}: count= returned {weights} here, and a sum of {total} "
                    "over all data ranks; expected finite numbers of terms, 0 or more"
                )
            if not total > 0:
                raise InvalidError(
                    f"step {step.number} of epoch {step.epoch}: count= returned 0 for every batch; expected "
                    "a term of the loss in one of them. Filter such samples, or return 1 for them"
                )
        for number, weight in enumerate(weights):
            self._require_current(iteration)
            batch = ahead[number] if ahead else self._next_batch(step, number)
            step.handed_out += 1
            yield batch, self._draws.ranks.number * weight / total

    def _next_batch(self, step: Step, number: int) -> Any:
        try:
            return next(self._batches)
        except Exception as error:
            where = f"step {step.number} of epoch {step.epoch}, micro-batch {number + 1} of {len(step)}"
            samples = self._samples_of(step, number)
            # A pipe to the worker breaks, or torch finds the worker missing, whichever comes first.
            is_broken = isinstance(error, EOFError | ConnectionError) and self._loader.num_workers > 0
            if is_broken or (isinstance(error, RuntimeError) and "DataLoader worker" in str(error)):
                self._loader = self._make(batch_sampler=_Keys(self))  # Persistent workers do not come back.
                raise UnavailableError(
                    f"{where}: a worker of the data loader died while samples {samples} were read or those after them; "
                    "the position has not moved. Load the newest checkpoint and go on; a worker that is killed again "
                    "may lack memory"
                ) from error
            error.add_note(f"{where}: samples {samples}")
            raise

    def _samples_of(self, step: Step, number: int) -> str:
        part = self._draws.parts(step.samples)[number]
        places = np.arange(part.start, part.stop) + self._position.samples
        found = self._draws.order.samples(self._position.epoch, places)[1].tolist()
        return ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")

    def _require_current(self, iteration: Iteration | None) -> None:
        if iteration is None or iteration.is_ended or self._iteration is not iteration:
            raise InvalidError(ENDED)

    def _finish(self) -> None:
        """Move the position past the step, if nothing has moved it yet."""
        step = self._step
        if step is None:
            return
        if step.stepped_after is not None:
            raise InvalidError(
                f"step {step.number}: an optimizer stepped after micro-batch {step.stepped_after} of {len(step)}; "
                f"expected one optimizer step for each {len(step)} micro-batches. Step after the inner loop, raise "
                "micro_batch or lower global_batch; where optimizers step in backward, call step_done() after each step"
            )
        if not step.is_taken:
            raise InvalidError(
                f"step {step.number}: the training took {step.handed_out} of {len(step)} micro-batches; expected all "
                "of them before the next step. Iterate the step to its end"
            )
        self._move_past(step)

    def _move_past(self, step: Step) -> None:
        if not step.is_done:
            step.is_done = True
            self._position = self._draws.epochs.after(self._position)

    @property
    def is_within_step(self) -> bool:
        """Return whether a micro-batch is out of a step whose optimizer has not stepped."""
        return self._step is not None and self._step.handed_out > 0 and not self._step.is_done

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the position with the first optimizer step after the last micro-batch."""
        step = self._step
        if self._is_told or step is None or step.handed_out == 0 or step.is_done:
            return
        if step.is_taken:
            self._move_past(step)
        elif step.stepped_after is None:
            step.stepped_after = step.handed_out

    def step_done(self) -> None:
        """Move the position past the step. From the first call on, optimizer steps do not move the position.

        Raises:
            InvalidError: The training has not got all micro-batches of the step.
        """
        step, self._is_told = self._step, True
        if step is None or not step.is_taken:
            raise InvalidError("step_done(): micro-batches of the step are left; expected a call after the last one")
        step.stepped_after = None
        self._move_past(step)

    def set_global_batch(self, global_batch: int) -> None:
        """Change the samples of a step, from the next step on; call this on all ranks.

        Raises:
            InvalidError: A step is open, or the size is outside its range.
        """
        step = self._step
        if step is not None and not step.is_done:
            raise InvalidError(
                f"set_global_batch({global_batch}): step {step.number} has begun; expected a call between two steps. "
                "Call it after optimizer.step()"
            )
        self._resize(global_batch)
        if self._iteration is not None:
            self._iteration.is_over = True  # Batches of the old size were read ahead.

    def _end_iteration(self) -> None:
        if self._iteration is not None:
            self._iteration.is_ended = True
        self._iteration = self._step = None


class _Keys(Sampler[Any]):
    """The batch sampler of the loader inside."""

    def __init__(self, loader: Loader) -> None:
        self._loader = weakref.proxy(loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        keys: Iterator[Any] = self._loader.keys()
        return keys
