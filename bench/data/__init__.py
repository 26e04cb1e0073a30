"""The bench of `holdfast.data`: speed of the loader, size and speed of the position, and resumes beside its rivals."""
