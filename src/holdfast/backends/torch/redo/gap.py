"""The error of a gap in the records."""

from __future__ import annotations


class GapError(Exception):
    """Why a record would not tell all that training did. It stays inside this room: training goes on."""
