"""torchtitan's checkpoints by Holdfast: `config.checkpoint = HoldfastManager.Config(enable=True, interval=100)`.

torchtitan builds the manager, and its training loop calls it. Read `manager.py` first. It never writes a checkpoint of
torchtitan's own format.
"""

from holdfast.integrations.torchtitan.framework import HOST
from holdfast.integrations.torchtitan.manager import HoldfastManager

__all__ = ["HOST", "HoldfastManager"]
