"""The text in the root of a run that tells a person which commands keep its steps whole and its size small."""

from __future__ import annotations

import logging

from holdfast.base.ports.store import Store
from holdfast.errors import CheckpointError, ConflictError

logger = logging.getLogger(__name__)

README_FILE = "README"
"""Its key under the root. No reader looks at it."""

_TEXT = b"""\
This folder is a training run saved by Holdfast. Each step-* folder is one checkpoint.

Steps share the files that did not change between them, by hard links. Deleting, moving or copying one step is fine:

    rm -rf step-000000000100        the other steps stay whole
    cp -r step-000000000100 best    the copy is whole

Copying the whole run without its links (cp -r, rsync without -H, an upload) stores the shared files once for each step.
These commands keep the links:

    holdfast cp RUN COPY
    rsync -aH RUN/ COPY
    cp -a RUN COPY

If a copy lost them, copy it with `holdfast cp COPY NEW`. `holdfast ls RUN` shows which steps stand alone.
Do not change a file in place: it may have a name in several steps.
"""


def put_readme(store: Store) -> None:
    """Put the text into the root of a new run. What has this name already stays, and a failure fails no save."""
    try:
        store.put_if_absent(README_FILE, _TEXT, folders_durable=False)
    except ConflictError:
        logger.debug("%s/%s exists and stays", store.url, README_FILE)
    except CheckpointError as error:
        logger.warning("%s/%s could not be stored, and no step needs it: %s", store.url, README_FILE, error)
