"""Megatron-LM's checkpoints, from 2019 to Megatron-core 0.18: its trees of one file a rank, and its torch_dist folders.

eras          names of modules, and the order in which they list their parameters: one row for each era
trees         reading trees: rows of fused matrices, the table that moves every element; trees_write: writing them
arguments     a model as Megatron's arguments in the spellings of all releases, both ways; mixture: those of experts
families      BERT and T5: their arguments in addition to GPT's, the first unit of each stage
state         Adam's state in trees: groups, scalars, schedule; state_write: writing it
core          flat buffers and names of Megatron-core's optimizer, as data
torch_dist    reading distributed checkpoints; torch_dist_state: their optimizer; torch_dist_write: writing them
"""
