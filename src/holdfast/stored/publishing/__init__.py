"""Publishes a manifest and reports the outcome; deletes the files of attempts that were not published.

Saving and imports call this room, and later an agent without a training job. Read `manifest.py` first.
No module here decides whether a checkpoint is complete: the caller has proven that.
"""
