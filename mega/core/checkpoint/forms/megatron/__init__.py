"""Megatron-LM's checkpoints, from 2019 to Megatron-core 0.18: trees with one file per rank, and torch_dist folders.

eras          names of modules, and the order in which they list their parameters: one row for each era
trees         reads trees: rows of fused matrices, the table that moves every element; trees_write: writes trees
arguments     a model and Megatron's arguments in the spellings of all releases; mixture: the arguments of experts
families      BERT and T5: their arguments in addition to GPT's, the first unit of each stage
state         Adam's state in trees: groups, scalars, schedule; state_write: writes this state
core          flat buffers and names of Megatron-core's optimizer state
torch_dist    reads distributed checkpoints; torch_dist_state: their optimizer; torch_dist_write: writes them
"""
