"""Publishes a manifest and reports the outcome; makes room for one; deletes files of attempts that were not published.

Saving, imports and drains call this room. Read `manifest.py` first.
No module here decides whether a checkpoint is complete: the caller has proven that.
"""
