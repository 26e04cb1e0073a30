"""Which step a training goes on from: the newest whole one, a named one, or a folder that Trainer itself wrote."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast
from holdfast.api import Checkpoint
from holdfast.errors import ConflictError, InvalidError, MissingError
from holdfast.integrations.transformers.contents import RECORD
from holdfast.integrations.transformers.framework import HOST
from holdfast.settings import Settings

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
"""Trainer writes this file last into a folder `checkpoint-N`, and reads it first."""

ROOT_FOLDER = "_holdfast"
"""Folder of the run below `output_dir`. Trainer pushes no folder whose name begins with `_`, and takes none for its own
that is not called `checkpoint-N`."""

EXPORTS_FOLDER = "_hf"
"""Folder below `output_dir` with a folder of `save_pretrained` for each kept step."""

_PLAIN = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeStep:
    """A step that Holdfast saved and a training goes on from."""

    path: str
    """The root of the run; without a name the checkpoint itself."""

    name: int | str | None
    """Its name in the run; None if `path` is the checkpoint."""

    step: int
    """Trainer's global step."""

    url: str
    """Where it is stored."""

    is_newest: bool
    """Whether it is the newest of the training's own run. If it turns out damaged, an older one takes its place."""

    is_own: bool
    """Whether it is a step of the training's own run."""

    record: Mapping[str, Any]
    """Trainer's record in the step."""

    ranks: int
    """Ranks that saved it."""


@dataclass(frozen=True, slots=True)
class ResumeFolder:
    """A folder `checkpoint-N` that Trainer itself wrote."""

    path: str
    """The folder."""


class OlderStepError(Exception):
    """A load found the newest step damaged, and filled the training from an older one."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} was loaded")
        self.step = step
        """The step that was loaded."""


def find(root: str, output_dir: str, wanted: object, settings: Settings) -> ResumeStep | ResumeFolder | None:
    """Return what `resume_from_checkpoint` names.

    Args:
        root: The root of the training's run.
        output_dir: Where Trainer itself would have saved.
        wanted: None for nothing; True for the newest whole step; a number, a tag or another name of a step of the run;
            or the path of a step or of a folder of Trainer.
        settings: How to read.
    Raises:
        MissingError: There is no such step.
        InvalidError: It names no checkpoint of a Trainer, or Trainer did not finish it.
        ConflictError: Trainer itself saved a newer step beside those of Holdfast.
    """
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        return _newest(root, output_dir, settings)
    if isinstance(wanted, int):
        return _named(root, wanted, settings)
    text = os.fspath(wanted) if isinstance(wanted, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidError(
            f"resume_from_checkpoint={wanted!r}; expected True, the number or the tag of a step, or the path of one"
        )
    if "://" in text or os.sep in text or os.path.exists(text):
        return _at_path(root, output_dir, text, settings)
    try:
        return _named(root, text, settings)
    except MissingError:
        _require_not_of_trainer(root, root, text, settings)
        raise


def by_number(root: str, step: int, settings: Settings) -> ResumeStep:
    """Return a step of a run that a load took in place of a newer one."""
    return _own(root, step, holdfast.open_checkpoint(root, step=step, settings=settings), is_newest=True)


def say_other_ranks(source: ResumeStep, arguments: str, ranks: int) -> None:
    """Log what becomes of random states and of the place in the data, if other ranks or batches go on. On rank 0.

    Args:
        source: The step that a training goes on from.
        arguments: The training arguments, as JSON.
        ranks: How many ranks go on.
    """
    if ranks > source.ranks and "rng" in source.record["parts"]:
        logger.warning(
            "%s: ranks: %d saved it, and %d go on: the random generators of the further ones are seeded anew",
            source.url,
            source.ranks,
            ranks,
        )
    before, now = _samples_a_step(source.record["arguments"], source.ranks), _samples_a_step(arguments, ranks)
    if before != now and before is not None:
        logger.warning(
            "%s: a step was of %d samples, and is of %s now. Trainer finds its place in the data by a count of steps: "
            "samples of this epoch are trained again or left out. To go on at the same place, keep the product of "
            "ranks, per_device_train_batch_size and gradient_accumulation_steps",
            source.url,
            before,
            now,
        )


def _samples_a_step(arguments: str, ranks: int) -> int | None:
    known = json.loads(arguments)
    each, times = known.get("per_device_train_batch_size"), known.get("gradient_accumulation_steps")
    return ranks * each * times if isinstance(each, int) and isinstance(times, int) else None


def require_room(root: str, source: ResumeStep | ResumeFolder | None, settings: Settings, *, start_over: bool) -> None:
    """Refuse a training whose steps would mix with those of another one in its root.

    Args:
        root: The root of the training's run.
        source: What the training goes on from.
        settings: How to read.
        start_over: Whether it may begin anew beside steps of an earlier training.
    Raises:
        InvalidError: The root holds steps of an earlier training, which this one does not go on from.
        ConflictError: Something else saves there.
    """
    newest = _newest_in(root, settings)
    HOST.require_own_root(newest)
    if newest is not None and not start_over and not (isinstance(source, ResumeStep) and source.is_own):
        raise InvalidError(
            f"{root}: holds step {newest.step} of an earlier training, and this one begins elsewhere; expected an "
            "empty output_dir. Pass resume_from_checkpoint=True to go on, another output_dir, or start_over=True to "
            "begin anew beside the old steps"
        )


def _newest(root: str, output_dir: str, settings: Settings) -> ResumeStep | ResumeFolder:
    newest, plain = _newest_in(root, settings), _newest_folder(output_dir)
    if newest is None and plain is None:
        raise MissingError(
            f"{output_dir}: no step is saved in {root}, and no whole folder checkpoint-N is here; expected at least "
            "one. Begin without resume_from_checkpoint"
        )
    if newest is None:
        assert plain is not None, "one of the two was found"
        return ResumeFolder(str(plain))
    step = newest.step or 0
    if plain is not None and _number(plain) > step:
        raise ConflictError(
            f"{plain}: Trainer saved this without Holdfast, after step {step} of {root}; expected one training in one "
            f"output_dir. Pass resume_from_checkpoint={step} or the path of that folder, or move the folder away"
        )
    return _own(root, step, newest, is_newest=True)


def _newest_in(root: str, settings: Settings) -> Checkpoint | None:
    """Return the newest valid step of a root; None if nothing was saved there."""
    with suppress(MissingError):
        return holdfast.open_checkpoint(root, step="latest", settings=settings)
    return None


def _named(root: str, name: int | str, settings: Settings) -> ResumeStep:
    return _own(root, name, holdfast.open_checkpoint(root, step=name, settings=settings), is_newest=False)


def _own(root: str, name: int | str, checkpoint: Checkpoint, *, is_newest: bool) -> ResumeStep:
    return ResumeStep(
        path=root,
        name=name,
        step=checkpoint.step or 0,
        url=checkpoint.url,
        is_newest=is_newest,
        is_own=True,
        record=_record_of(checkpoint),
        ranks=checkpoint.manifest.world_size,
    )


def _at_path(root: str, output_dir: str, path: str, settings: Settings) -> ResumeStep | ResumeFolder:
    folder = Path(path)
    if (folder / STATE_FILE).is_file():
        return ResumeFolder(path)
    if "://" not in path and not folder.exists():
        is_own = _is_same(folder.parent, output_dir)
        _require_not_of_trainer(root, root if is_own else str(folder.parent / ROOT_FOLDER), path, settings)
    number = _PLAIN.fullmatch(folder.name)
    if number and folder.parent.name == EXPORTS_FOLDER:
        raise InvalidError(
            f"{path}: is an exported model, without optimizer and state; expected the step that it was made of. Pass "
            f"resume_from_checkpoint={int(number[1])} in its training, or begin a new one from_pretrained({path!r})"
        )
    if number and folder.is_dir():
        raise InvalidError(
            f"{path}: has no {STATE_FILE}, so Trainer did not finish this folder; expected a whole one. Remove it, and "
            "resume from an older one"
        )
    checkpoint = holdfast.open_checkpoint(path, settings=settings)
    if checkpoint.step is not None and folder.is_dir() and _is_same(folder.parent, root):
        return _own(root, checkpoint.step, checkpoint, is_newest=False)
    record = _record_of(checkpoint)
    step = int(json.loads(record["state"])["global_step"])
    return ResumeStep(
        path=path,
        name=None,
        step=step,
        url=checkpoint.url,
        is_newest=False,
        is_own=False,
        record=record,
        ranks=checkpoint.manifest.world_size,
    )


def _require_not_of_trainer(root: str, beside: str, path: str, settings: Settings) -> None:
    """Refuse the path that Trainer itself would have saved a step at: nothing is there.

    Args:
        root: The root of the training's run.
        beside: The root of the run whose training has that path.
        path: The path.
        settings: How to read.
    """
    number = _PLAIN.fullmatch(Path(path).name)
    if not number:
        return
    lead, step = f"{path}: is not there; expected a folder that Trainer itself wrote", int(number[1])
    try:
        found = holdfast.open_checkpoint(beside, step=step, settings=settings)
    except MissingError as error:
        raise MissingError(f"{lead}. Holdfast does not have the step either: {error}") from error
    way = f"{step} or True" if beside == root else repr(found.url)
    raise MissingError(f"{lead}. Holdfast saved this step in {beside}: pass resume_from_checkpoint={way}")


def _record_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    HOST.require_own(checkpoint)
    record = checkpoint.objects.get(RECORD)
    assert isinstance(record, dict), "its mark says that this integration wrote it"
    return record


def _newest_folder(output_dir: str) -> Path | None:
    """Return the newest folder of Trainer that it has finished; None if there is none."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if _PLAIN.fullmatch(path.name)]
    return next((path for path in sorted(found, key=_number, reverse=True) if _is_finished(path)), None)


def _is_finished(folder: Path) -> bool:
    with suppress(OSError, ValueError):
        return isinstance(json.loads((folder / STATE_FILE).read_text(encoding="utf-8")), dict)
    return False


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _is_same(folder: Path, root: str) -> bool:
    return "://" not in root and os.path.realpath(folder) == os.path.realpath(root)
