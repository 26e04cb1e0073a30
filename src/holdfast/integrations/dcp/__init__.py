"""PyTorch's distributed checkpoint (DCP) with Holdfast below it: verbs, planners and state dicts stay as they are.

`from holdfast.integrations import dcp` in place of `import torch.distributed.checkpoint as dcp` changes `save`,
`async_save` and `load`. `HoldfastWriter` and `HoldfastReader` go where DCP takes a storage writer and reader.
Read `writer.py` first.
It never plans: what DCP has planned is written, and what its planners ask for is read.
"""

from holdfast.integrations.dcp.framework import HOST
from holdfast.integrations.dcp.reader import HoldfastReader
from holdfast.integrations.dcp.verbs import async_save, load, save
from holdfast.integrations.dcp.writer import HoldfastWriter

__all__ = ["HOST", "HoldfastReader", "HoldfastWriter", "async_save", "load", "save"]
