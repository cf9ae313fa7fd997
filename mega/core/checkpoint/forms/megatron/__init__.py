"""Megatron-LM's checkpoints, from 2019 to Megatron-core 0.18: its trees of one file a rank, and its torch_dist folders.

eras          names of modules, and the order in which they list their parameters: one row an era
trees         trees read: rows of fused matrices, the table that moves every element; trees_write: out
arguments     what a checkpoint says of its model, in the spellings of all releases, both ways; mixture those of experts
families      BERT and T5: their arguments besides GPT's, where their stages begin
state         Adam's state in trees: groups, scalars, schedule; state_write: out
core          flat buffers and names of Megatron-core's optimizer, as data
torch_dist    distributed checkpoints read; torch_dist_state their optimizer; torch_dist_write: out
"""
