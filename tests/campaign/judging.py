"""What processes left that were killed: acknowledged steps are whole, and a collection leaves what manifests name."""

from __future__ import annotations

import re
from collections.abc import Iterable

import holdfast
from holdfast._face import offline_api, wiring
from holdfast.core.format.names import is_attempt_folder, manifest_key, step_folder
from holdfast.settings import Settings
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.publish import packs_named_by
from holdfast.stored.repository.timelines import committed_steps
from tests.servers.server import Server

_OF_RUN = re.compile(
    r"holdfast\.json|README|latest|epochs/\d{12}(\.json|\.accepted\.json|\.beat)|(tags|timelines|superseded)/.+"
)
"""What belongs to a run, not to a step."""
_STEP_FILE = re.compile(r"(?P<step>step-\d{12})/(?P<attempt>[^/]+)/(?P<name>.+)")


def require_whole(url: str, steps: Iterable[int], settings: Settings) -> int:
    """Require that each step is there and every byte of it has its digest; return how many steps there are."""
    steps = list(steps)
    for step in steps:
        damages = list(holdfast.open_checkpoint(url, step=step, settings=settings).verify())
        assert damages == [], f"step {step} of {url}: {damages}"
    return len(steps)


def require_collected(server: Server, url: str, settings: Settings) -> int:
    """Collect, and require that no object of a step is left that no manifest names, and no upload.

    Returns:
        How many objects the collection removed.
    """
    report = offline_api.collect(url, settings=settings, grace_seconds=0)
    store = wiring.store_at(url, settings)
    manifests = {step: read_manifest(store, step_folder(step)) for step in committed_steps(store)}
    packs = packs_named_by(manifests.values())
    attempts = {step_folder(step).rstrip("/"): manifest.attempt for step, manifest in manifests.items()}
    left = []
    for key in server.keys(url):
        found = _STEP_FILE.fullmatch(key)
        if found is None or found["attempt"] == "reports":
            # Manifest and reports of a step, or an object of the run.
            is_of_step = key in map(manifest_key, manifests) or (found is not None and found["step"] in attempts)
            is_named = is_of_step or _OF_RUN.fullmatch(key) is not None
        elif key.endswith(".safetensors"):
            is_named = key in packs
        else:
            is_named = is_attempt_folder(found["attempt"]) and attempts.get(found["step"]) == found["attempt"]
        if not is_named:
            left.append(key)
    assert left == [], f"{url}: no manifest names {left}"
    assert server.unfinished_uploads() == []
    return report.files
