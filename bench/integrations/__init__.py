"""Saves through each integration beside the framework's own and beside `holdfast.save`; `make integrations` runs it."""
