"""What this process may take of the host it runs on."""

from __future__ import annotations

import os


def ranks_on_host() -> int:
    """Return how many ranks share the host, as torchrun tells; 1 if nobody does."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(told), 1) if told.isdigit() else 1
