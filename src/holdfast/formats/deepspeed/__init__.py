"""DeepSpeed: ZeRO-1, 2 and 3, BF16_Optimizer and universal folders, read where they lie.

`folder` finds the files, `saved` makes sense of what they hold, `partition` and `layout` say where every element of a
parameter is, and `listing` puts that together. Pipelines and experts are refused; nothing here writes.
"""
