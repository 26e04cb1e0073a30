"""The run of one `train()`: its manager, what it goes on from, its saves, its best step and its exports."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import holdfast
from holdfast.api import Checkpoint
from holdfast.errors import CheckpointError, InvalidError, MissingError, UnavailableError
from holdfast.integrations.transformers.contents import (
    has_adapters,
    metrics_at,
    model_to_keep,
    state_to_fill,
    state_to_save,
)
from holdfast.integrations.transformers.exports import ModelFolders, copy_files, folder_of, tag_of
from holdfast.integrations.transformers.framework import is_first_rank, on_first_rank, rank_count
from holdfast.integrations.transformers.resuming import (
    EXPORTS_FOLDER,
    ROOT_FOLDER,
    STATE_FILE,
    OlderStepError,
    ResumeFolder,
    ResumeStep,
    by_number,
    find,
    require_room,
    say_other_ranks,
)
from holdfast.observers import Observer
from holdfast.policies import AnyOf, LatestN, Tagged
from holdfast.settings import Settings

logger = logging.getLogger(__name__)

BEST = "best"
"""Tag of the step with the best metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """What `HoldfastMixin` takes beside the arguments of Trainer."""

    root: str | None
    """Root of the run; None for a folder in `output_dir`."""

    save_hf: bool
    """Whether each kept step gets a folder of `save_pretrained`."""

    start_over: bool
    """Whether to begin anew beside the steps of an earlier training."""

    background: bool
    """Whether a save returns once the state is copied; if not, once the step is committed."""

    settings: Settings
    """How to save and load."""

    observers: Sequence[Observer]
    """Receive events of saves and loads."""


class TrainerRun:
    """The steps of one `train()`. A context manager; every rank makes one."""

    def __init__(self, trainer: Any, output_dir: str, options: TrainerOptions) -> None:
        """Open the root.

        Args:
            trainer: The trainer.
            output_dir: Where Trainer itself would save.
            options: The options of the mixin.
        """
        self._trainer, self._options = trainer, options
        self._output_dir = output_dir
        self.root = options.root or str(Path(output_dir, ROOT_FOLDER))
        self.source: ResumeStep | None = None
        """The step that the training goes on from; None if it begins anew, or from a folder of Trainer."""
        self.best_step: int | None = None
        """The saved step with the best metric so far."""
        self._saved_step: int | None = None
        self._saved: holdfast.SaveHandle | None = None
        self._failure: CheckpointError | None = None
        self._moves_best_tag = False
        self._manager = self._open(start_over=options.start_over)
        self._folders = self._model_folders() if self._makes_folders and is_first_rank() else None
        self._companions = Path(output_dir, EXPORTS_FOLDER, ".companions")
        """What every folder of `save_pretrained` holds beside the weights."""
        self._is_prepared = False

    def __enter__(self) -> Self:
        """Return the run."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the manager. Without an error, raise that of a save or an export that failed."""
        if error is not None and self._folders is not None:
            self._folders.stop()
        self._manager.__exit__(kind, error, trace)
        if error is not None:
            if self._failure is not None:
                error.add_note(f"a save failed before: {self._failure}")
            return
        if self._folders is not None:
            self._folders.prune()
            shutil.rmtree(self._companions, ignore_errors=True)
        failure = self._failure
        if self._makes_folders:
            try:
                # First, since ranks may know different outcomes of a save, and all of them meet here.
                on_first_rank(lambda: None if self._folders is None else self._folders.raise_failure())
            except CheckpointError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def find(self, wanted: object) -> ResumeStep | ResumeFolder | None:
        """Return what `resume_from_checkpoint` names, the same on every rank.

        Raises:
            CheckpointError: There is none, or the root holds steps that this training does not go on from.
        """

        def found() -> ResumeStep | ResumeFolder | None:
            source = find(self.root, self._output_dir, wanted, self._options.settings)
            require_room(self.root, source, self._options.settings, start_over=self._options.start_over)
            return source

        source = on_first_rank(found)
        self.source = source if isinstance(source, ResumeStep) else None
        if self.source is not None and is_first_rank():
            say_other_ranks(self.source, self._trainer.args.to_json_string(), rank_count())
        return source

    def write_state_file(self, folder: Path) -> None:
        """Write the `trainer_state.json` of the step that the training goes on from, for Trainer to read.

        Raises:
            UnavailableError: It cannot be written.
        """
        assert self.source is not None, "a training that begins anew has no state"
        state = json.loads(self.source.record["state"])
        # Trainer would look for a folder of its own there. `restore_best` sets it.
        state["best_model_checkpoint"] = None
        try:
            (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
        except OSError as error:
            raise UnavailableError(
                f"{folder / STATE_FILE}: cannot be written, and Trainer reads its state there: {error}. Make room "
                "among the temporary files, or set TMPDIR"
            ) from error

    def restore_best(self) -> None:
        """Set the best step of the state that was just read, if the run has it."""
        source = self.source
        best = None if source is None else source.record["best_step"]
        if source is None or best is None:
            return
        # The run may have a step of that number also if it is not the one that is gone on from.
        if source.is_own and on_first_rank(lambda: best in self._manager.steps()):
            self.best_step, self._moves_best_tag = best, True
            self._trainer.state.best_model_checkpoint = self._path_of(best)
        elif is_first_rank():
            logger.warning("%s: step %d, the best so far, is not here; it is not loaded at the end", self.root, best)

    def load(self) -> None:
        """Fill model, optimizer, scheduler and scaler. Every rank calls.

        Raises:
            OlderStepError: The newest step was damaged, and an older one was loaded.
            InvalidError: Another model or optimizer was saved; nothing was changed.
        """
        source = self.source
        assert source is not None, "a training that begins anew loads nothing"
        state = state_to_fill(self._trainer, source.record, source.url)
        try:
            if not source.is_own:
                holdfast.load(source.path, state, step=source.name, settings=self._options.settings)
                return
            loaded = self._manager.load(state, None if source.is_newest else source.name)
        except InvalidError as error:
            step = "" if source.name is None else f", step={source.name!r}"
            raise InvalidError(
                f"{error}. train() takes none of these arguments. To begin a training from what fits, fill the model "
                f'before it: holdfast.load({source.path!r}, {{"model": model}}{step}, strict=False). Then train with '
                "start_over=True, or in another output_dir"
            ) from error
        if loaded is not None and loaded != source.step:
            raise OlderStepError(loaded)
        self._saved_step, self._saved = loaded, None

    def go_on_from(self, step: int) -> None:
        """Go on from an older step than was found, since the newer ones are damaged."""
        self.source = on_first_rank(lambda: by_number(self.root, step, self._options.settings))

    def load_random_states(self) -> None:
        """Set the random generators, once Trainer has skipped the batches that were trained."""
        source = self.source
        assert source is not None, "a training that begins anew has no states"
        if "rng" in source.record["parts"]:
            settings = replace(self._options.settings, reports=False)
            holdfast.load(source.path, {"rng": holdfast.RngState()}, step=source.name, settings=settings)

    def begin_again(self) -> None:
        """Begin anew where Trainer does, with a smaller batch: the steps of the first try are superseded."""
        if self._saved_step is not None and self.source is None:
            try:
                self._manager.close(wait=False)
            except CheckpointError as error:
                self._failure = error
            self._manager = self._open(start_over=True)
            self._saved_step = self._saved = self.best_step = None

    def save(self) -> None:
        """Begin to save the current step, and return once training may go on. Every rank calls.

        Raises:
            CheckpointError: The first save shows that the state cannot be saved, or `failed_saves_max` saves failed;
                without that limit also a save that is not in the background.
        """
        trainer = self._trainer
        step, state = trainer.state.global_step, trainer.state
        # Ranks may have computed other metrics, or have seen less of the save before.
        best, has_failed = on_first_rank(lambda: (state.best_global_step, self._has_failed()))
        is_best = best == step
        if is_best:
            self.best_step, state.best_model_checkpoint = step, self._path_of(step)
        if step == self._saved_step and not has_failed:
            # Trainer saves a step once. Its just-in-time checkpoint may come right after.
            if is_best:
                self._tag_best_once_saved(step, self._saved)
            return
        if best is not None and best == self._saved_step != self.best_step:
            # It was evaluated after its save, as at the end of an epoch.
            self.best_step, state.best_model_checkpoint = best, self._path_of(best)
            self._tag_best_once_saved(best, self._saved)
        if self._moves_best_tag and not is_best and self.best_step is not None:
            self._tag_best(self.best_step)
        self._moves_best_tag = False
        tags = {BEST} if is_best else set()
        if self._makes_folders:
            if not self._is_prepared:
                on_first_rank(self._prepare_folders)
                self._is_prepared = True
            tags.add(tag_of(step))
        saved = state_to_save(trainer, self.best_step)
        self._saved = self._manager.save(step, saved, metrics=metrics_at(state), move_tags=tags)
        self._saved_step = step
        if self._folders is not None:
            self._folders.make_when_committed(step, self._saved.committed)
        if not self._options.background:
            self._await(self._saved)

    def _await(self, saved: holdfast.SaveHandle) -> None:
        try:
            saved.wait()
        except CheckpointError as error:
            if self._options.settings.failed_saves_max is None:
                raise
            self._failure = self._failure or error

    def _has_failed(self) -> bool:
        """Return whether the save of the current step has failed; ranks notice that at different times."""
        return self._saved is not None and self._saved.failure is not None

    def settle(self) -> None:
        """Wait for saves and exports. An error is kept for the end of the training, which must finish first."""
        try:
            self._manager.wait()
        except CheckpointError as error:
            self._failure = self._failure or error
        if self._folders is not None:
            self._folders.finish()
        if is_first_rank() and self._saved_step is not None:
            remove_if_empty(Path(self._output_dir, f"checkpoint-{self._saved_step}"))

    def load_best(self) -> None:
        """Fill the model from the best step. Every rank calls.

        Raises:
            CheckpointError: No best step is stored, or it is damaged.
        """
        step = on_first_rank(self._stored_best)
        # By path: the position of the manager stays at the newest step.
        model = {"model": model_to_keep(self._trainer)}
        holdfast.load(self.root, model, step=step, settings=self._options.settings)

    def take_newest_folder(self) -> Path | None:
        """Return the newest folder of `save_pretrained` that was made since the last call; None on other ranks."""
        return None if self._folders is None else self._folders.take_newest()

    @property
    def _makes_folders(self) -> bool:
        arguments = self._trainer.args
        strategy = str(getattr(arguments.hub_strategy, "value", arguments.hub_strategy))
        return self._options.save_hf or (arguments.push_to_hub and strategy == "every_save")

    def _open(self, *, start_over: bool) -> holdfast.CheckpointManager:
        limit = self._trainer.args.save_total_limit
        keep = AnyOf(LatestN(limit), Tagged()) if limit is not None and limit > 0 else None
        settings = self._options.settings
        if not self._options.background:
            settings = replace(settings, arena_bytes_max=0)  # The call writes, so nothing is copied first.
        # Trainer has a just-in-time checkpoint of its own.
        return holdfast.CheckpointManager(
            self.root,
            keep=keep,
            start_over=start_over,
            preemption=False,
            settings=settings,
            observers=self._options.observers,
        )

    def _path_of(self, step: int) -> str:
        """Return what Trainer shows as the path of the best model."""
        if self._makes_folders:
            return str(folder_of(Path(self._output_dir, EXPORTS_FOLDER), step))
        return f"{self.root}/step-{step:012d}"

    def _tag_best(self, step: int) -> None:
        """Move the tag of the best step to a step that is saved already."""
        if is_first_rank():
            try:
                self._manager.tag(step, BEST, move=True)
            except CheckpointError as error:
                logger.warning("step %d is the best, and did not get the tag %r: %s", step, BEST, error)

    def _tag_best_once_saved(self, step: int, saved: holdfast.SaveHandle | None) -> None:
        if saved is None:
            self._tag_best(step)
        else:
            saved.committed.add_done_callback(lambda done: None if done.exception() else self._tag_best(step))

    def _stored_best(self) -> int:
        """Return the best step that is stored: that of the metric, or if its save failed the one that has the tag."""
        steps = self._manager.steps()
        if self.best_step is not None and self.best_step in steps:
            return self.best_step
        with suppress(MissingError):
            tagged = holdfast.open_checkpoint(self.root, step=BEST, settings=self._options.settings)
            # A tag may name a step of another timeline, whose number this one has too.
            if tagged.step is not None and tagged.step in steps and self._has_manifest(tagged.step, tagged):
                logger.warning(
                    "step %s had the best metric, and is not stored; before it step %d had", self.best_step, tagged.step
                )
                return tagged.step
        raise MissingError(
            f"{self.root}: step {self.best_step} had the best metric, and is not stored; expected it for "
            f"load_best_model_at_end. The log says why. Stored steps: {steps}"
        )

    def _has_manifest(self, step: int, checkpoint: Checkpoint) -> bool:
        stored = holdfast.open_checkpoint(self.root, step=step, settings=self._options.settings)
        return stored.manifest.digest == checkpoint.manifest.digest

    def _model_folders(self) -> ModelFolders:
        return ModelFolders(
            self.root,
            Path(self._output_dir, EXPORTS_FOLDER),
            self._complete_folder,
            lambda: self._manager.steps(),
            weights=not has_adapters(self._trainer.model),
            settings=self._options.settings,
        )

    def _prepare_folders(self) -> None:
        """Write what every folder needs beside the weights, at the first save; then make folders left behind."""
        assert self._folders is not None, "only rank 0 prepares"
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        tokenizer = trainer.processing_class
        if tokenizer is None:
            tokenizer = getattr(trainer.data_collator, "tokenizer", None)
        try:
            shutil.rmtree(self._companions, ignore_errors=True)
            self._companions.mkdir(parents=True)
            # On this thread: a tokenizer may not be saved while training uses it.
            if not has_adapters(model) and hasattr(model, "save_pretrained"):
                model.save_pretrained(self._companions, state_dict={})
            if tokenizer is not None:
                tokenizer.save_pretrained(self._companions)
        except OSError as error:
            raise UnavailableError(
                f"{self._companions}: cannot be written, so no model can be exported: {error}. Make room, or train "
                "without save_hf"
            ) from error
        self._folders.make_left_behind(None if self.source is None or not self.source.is_own else self.source.step)

    def _complete_folder(self, folder: Path, step: int) -> None:
        copy_files(self._companions, folder)
        model = self._trainer.model
        if has_adapters(model):
            # Adapters are small, and peft names and cuts them in ways of its own.
            stored = holdfast.read(self.root, step=step, only="model", settings=self._options.settings)
            tensors = stored["model"]
            model.save_pretrained(folder, state_dict=dict(tensors) if isinstance(tensors, dict) else tensors)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder that Trainer's just-in-time checkpoint makes for itself, if nothing is in it."""
    try:
        folder.rmdir()
    except OSError:
        return
