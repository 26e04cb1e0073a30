"""The random generators of this process: Python's, numpy's, torch's, and one for each GPU."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from holdfast.errors import InvalidError


def captured() -> dict[str, object]:
    """Return the state of every generator, as plain values and byte tensors."""
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [torch.cuda.get_rng_state(number) for number in range(torch.cuda.device_count())]
    return state


def restore(state: object, path: str) -> None:
    """Set every generator that exists in this process.

    Raises:
        InvalidError: `captured` did not return this state.
    """
    if not isinstance(state, dict):
        raise InvalidError(
            f"{path}: a random state of type {type(state).__name__}; expected one that RngState saved, skip= it"
        )
    try:
        _require_numpy_state(state["numpy"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for number, device_state in enumerate(state.get("cuda", [])[:devices]):
            torch.cuda.set_rng_state(device_state, number)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidError(
            f"{path}: the random state does not fit this Python, numpy or torch: {error}. Leave it out with skip="
        ) from error


def _require_numpy_state(state: object) -> None:
    """Refuse a malformed state: numpy uses its position as an index without a check."""
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("numpy's is no tuple of five")
    name, keys, position, has_gauss, gauss = state
    if not isinstance(keys, np.ndarray) or keys.shape != (_KEYS,) or keys.dtype.kind != "u":
        raise ValueError(f"numpy's keys are not {_KEYS} unsigned numbers")
    if name != "MT19937" or type(position) is not int or not 0 <= position <= _KEYS:
        raise ValueError("numpy's position is outside its keys")
    if type(has_gauss) is not int or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError("numpy's last draw is no number")


_KEYS = 624
"""Words in the state of a Mersenne Twister."""


def seed(run_id: str, step: int | None, rank: int) -> None:
    """Seed every generator from run, step and rank, for a rank without a saved state."""
    digest = hashlib.blake2b(f"{run_id}/{step}/{rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.manual_seed(number)
