"""A step that was good when it was saved may be bad: training says so, and the next load takes another copy or step.

Both copies of a step have equal digests. So the copy in the other place mends only bytes that went wrong after their
check, in memory or on the way to the device. A state that was bad when it was saved needs the step before.
"""

from __future__ import annotations

import logging

from holdfast.base.clock import Clock, utc_now_text
from holdfast.base.ports.store import Store
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import manifest_keys
from holdfast.core.format.sealed_json import stated_digest
from holdfast.errors import MissingError
from holdfast.stored.repository.publish import get_or_none
from holdfast.stored.repository.quarantine import identity_of, quarantine, quarantined
from holdfast.stored.repository.two_roots import places_of

logger = logging.getLogger(__name__)


def distrust(run: Store, clock: Clock, step: int, digest: str, reason: str) -> None:
    """Put a step into quarantine: in the near tier, or in the root if the near tier lacks it or distrusts it already.

    Args:
        run: The root, or both places.
        clock: The time in the record.
        step: The step.
        digest: Digest of its manifest.
        reason: Why, for people.
    Raises:
        MissingError: No place has a copy that is not in quarantine already.
        UnavailableError: Storage failed.
    """
    for place in reversed(places_of(run)):  # The near tier first.
        known = quarantined(place).get(step, {})
        for key in manifest_keys(step, digest):
            data = get_or_none(place, key, MANIFEST_BYTES_MAX)
            # A newer timeline may have saved the step again.
            if data is None or stated_digest(data) != digest or (identity := identity_of(data)) in known:
                continue
            quarantine(place, step, key, identity, f"distrusted: {reason}", utc_now_text(clock))
            logger.warning(
                "step %d in %s is distrusted: %s. The next load takes another copy, or the step before",
                step,
                place.url,
                reason,
            )
            return
    raise MissingError(
        f"{run.url}: step {step} has no copy that is not distrusted already; expected one. Load an older step"
    )
