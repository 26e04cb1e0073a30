"""The methods of Trainer that save, rotate and load checkpoints, over a run of Holdfast."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.errors import InvalidError
from holdfast.integrations.transformers.framework import HOST, on_first_rank, require_covered
from holdfast.integrations.transformers.resuming import OlderStepError, ResumeFolder, ResumeStep
from holdfast.integrations.transformers.run import TrainerOptions, TrainerRun
from holdfast.observers import Observer
from holdfast.settings import Settings


class HoldfastMixin:
    """Makes a Trainer save to and resume from a run of Holdfast: `class MyTrainer(HoldfastMixin, Trainer)`."""

    def __init__(
        self,
        *arguments: Any,
        save_hf: bool = False,
        root: str | None = None,
        start_over: bool = False,
        background: bool = True,
        settings: Settings = Settings(),  # noqa: B008 - frozen
        observers: Sequence[Observer] = (),
        **keywords: Any,
    ) -> None:
        """Make the trainer.

        Args:
            *arguments: As Trainer.
            save_hf: Whether to leave a folder of `save_pretrained` for each kept step, in `output_dir/_hf`.
            root: Root of the run, also at a URL; None for `output_dir/_holdfast`.
            start_over: Whether a training that does not resume may begin anew although the root holds steps. They stay
                stored, superseded.
            background: Whether a save returns once the state is copied. If not, it returns once the step is committed,
                and copies nothing: a callback's `on_save` then finds the step.
            settings: How to save and load.
            observers: Receive events of saves and loads.
            **keywords: As Trainer.
        Raises:
            InvalidError: Transformers is missing or untested, or the arguments ask for what is not covered.
        """
        HOST.require()
        self._holdfast_options = TrainerOptions(
            root=root,
            save_hf=save_hf,
            start_over=start_over,
            background=background,
            settings=settings,
            observers=observers,
        )
        self._holdfast: TrainerRun | None = None
        super().__init__(*arguments, **keywords)
        require_covered(self)

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Refuse a class in which Trainer comes first: it would save as always."""
        super().__init_subclass__(**keywords)
        ahead = cls.__mro__[: cls.__mro__.index(HoldfastMixin)]
        first = next((base for base in ahead if "_inner_training_loop" in base.__dict__), None)
        if first is not None and not issubclass(first, HoldfastMixin):
            raise InvalidError(
                f"class {cls.__name__}: {first.__name__} comes before HoldfastMixin, so Trainer would save as always; "
                f"expected class {cls.__name__}(HoldfastMixin, {first.__name__})"
            )

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """Train as Trainer does.

        Args:
            resume_from_checkpoint: True for the newest whole step; the number or the tag of a step; or the path of a
                step, or of a folder `checkpoint-N` that Trainer itself wrote.
            trial: As Trainer.
            *arguments: As Trainer.
            **keywords: As Trainer.
        Raises:
            CheckpointError: There is nothing to resume from, or a save failed; then the training is over.
        """
        trainer: Any = super()
        with self._opened_run(trial) as run, tempfile.TemporaryDirectory() as folder:
            match run.find(resume_from_checkpoint):
                case ResumeStep():
                    run.write_state_file(Path(folder))
                    source: str | None = folder
                case ResumeFolder(path):
                    source = path
                case _:
                    source = None
            return trainer.train(source, trial, *arguments, **keywords)

    @contextmanager
    def _opened_run(self, trial: Any) -> Iterator[TrainerRun]:
        """Open the run of one training."""
        trainer: Any = self
        # In a search, rank 0 alone has the trial, and so its folder.
        output_dir = on_first_rank(lambda: trainer._get_output_dir(trial))
        with TrainerRun(self, output_dir, self._holdfast_options) as run:
            self._holdfast = run
            try:
                yield run
            finally:
                self._holdfast = None

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        trainer: Any = super()
        run = self._holdfast_run()
        run.begin_again()
        while True:
            try:
                return trainer._inner_training_loop(
                    batch_size=batch_size,
                    args=args,
                    resume_from_checkpoint=resume_from_checkpoint,
                    trial=trial,
                    ignore_keys_for_eval=ignore_keys_for_eval,
                )
            except OlderStepError as older:
                # Trainer has counted the epochs of the damaged step, so the loop begins again.
                run.go_on_from(older.step)
                assert resume_from_checkpoint is not None, "only a resumed training loads a step"
                run.write_state_file(Path(resume_from_checkpoint))

    def _init_training_state(self, *arguments: Any, **keywords: Any) -> Any:
        trainer: Any = super()
        begun = trainer._init_training_state(*arguments, **keywords)
        self._holdfast_run().restore_best()
        return begun

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        run = self._holdfast_run()
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        self._push_newest_folder()
        run.save()

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, *arguments: Any, **keywords: Any) -> Any:
        if not self._resumes_step:
            trainer: Any = super()
            return trainer._load_from_checkpoint(resume_from_checkpoint, *arguments, **keywords)
        # The model is filled with the optimizer, so that one load finds all damage.
        return None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumes_step:
            self._holdfast_run().load()
        else:
            trainer: Any = super()
            trainer._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self._resumes_step:
            trainer: Any = super()
            trainer._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumes_step:
            self._holdfast_run().load_random_states()
        else:
            trainer: Any = super()
            trainer._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        run = self._holdfast_run()
        if run.best_step is not None:
            run.load_best()
        else:
            trainer: Any = super()
            trainer._load_best_model()

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        trainer: Any = self
        self._holdfast_run().settle()
        self._push_newest_folder()
        limit = trainer.args.save_total_limit
        # Trainer would remove the folders of an earlier training without Holdfast.
        trainer.args.save_total_limit = None
        try:
            above: Any = super()
            return above._finalize_training(trial, num_train_samples, start_time)
        finally:
            trainer.args.save_total_limit = limit

    def _push_newest_folder(self) -> None:
        """Push the newest exported model, as Trainer pushes a folder `checkpoint-N` after each save."""
        trainer: Any = self
        if not trainer.args.push_to_hub or (folder := self._holdfast_run().take_newest_folder()) is None:
            return
        now = trainer.state
        # Trainer writes the step into the message of the commit.
        trainer.state = replace(now, global_step=int(folder.name.rpartition("-")[2]))
        try:
            trainer._push_from_checkpoint(str(folder))
        finally:
            trainer.state = now

    @property
    def _resumes_step(self) -> bool:
        return self._holdfast is not None and self._holdfast.source is not None

    def _holdfast_run(self) -> TrainerRun:
        if self._holdfast is None:
            raise InvalidError(
                f"{type(self).__name__}: saves only while it trains; expected a call within train(). For the model "
                "alone call save_model()"
            )
        return self._holdfast
