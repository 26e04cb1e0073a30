"""One file as torch.save writes it: a model's state dict, or the whole state as nested dicts."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.foreign.file_layout import FileLayout
from holdfast.foreign.nested_state import model_state, nested_state
from holdfast.foreign.torch.archive_writer import put_archive
from holdfast.types.export import ExportContent, ExportFile, ExportOptions


class TorchWriter:
    """Lays a checkpoint out in one file that `torch.load` reads."""

    @property
    def name(self) -> str:
        """What it is called."""
        return "torch"

    def files(self, content: ExportContent, options: ExportOptions) -> Sequence[ExportFile]:
        """Return the file; tied names share their memory in it."""
        if options.model_only:
            _, state = model_state(content, options)
        else:
            state = nested_state(content, options, flat_optimizers=False)
        layout = FileLayout()
        put_archive(layout, state)
        return (layout.file(""),)
