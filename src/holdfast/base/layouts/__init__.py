"""The layout language: rules that say how the tensors of a checkpoint make the tensors that are asked for.

Pure: texts, names, shapes and numbers come in, a `View` goes out. No rule is executed, and no tensor is read.
Read `layout.py` first: a layout as callers give it. `rule_file.py` reads the rules, `sizes.py` finds the sizes,
`viewing.py` gives each tensor its rule, and `lower.py` reckons and proves the elements of a rule at one shape.
"""
