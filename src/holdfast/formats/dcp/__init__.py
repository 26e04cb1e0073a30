"""Checkpoints of `torch.distributed.checkpoint`: what `.metadata` says, and where the elements lie inside `.distcp`.

Megatron-core's `torch_dist` is the same with a `common.pt` beside it.
"""
