"""The redo log of a torch state: gradients recorded as optimizers consume them, and steps carried out again.

`backends/torch/framework.py` calls it. Read `gradient_capture.py` first, then `step_redo.py`.
It never touches storage.
"""
