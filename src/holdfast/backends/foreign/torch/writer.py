"""Writes one `torch.save` file: the state dict of the model, or the whole state as nested dicts."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.backends.foreign.file_layout import FileLayout
from holdfast.backends.foreign.nested_state import model_state, nested_state
from holdfast.backends.foreign.torch.archive_writer import put_archive
from holdfast.base.types.export import ExportContent, ExportFile, ExportOptions


class TorchWriter:
    """Lays out a checkpoint as one file for `torch.load`."""

    name = "torch"
    """Name of the format on the command line."""

    def files(self, content: ExportContent, options: ExportOptions) -> Sequence[ExportFile]:
        """Return the file. Tied names share one storage."""
        if options.model_only:
            _, state = model_state(content, options)
        else:
            state = nested_state(content, options, flat_optimizers=False)
        layout = FileLayout()
        put_archive(layout, state)
        return (layout.file("", completes=True),)
