"""Read and write Megatron-LM checkpoints, from 2019 to Megatron-core 0.18: trees with one file per rank, and torch_dist
folders.

eras          module names and parameter order of each era
trees         reads trees: rows of fused matrices, and the table for conversion; trees_write: writes trees
expert_ranks  experts that trees distribute over ranks: tensor names and folder names
arguments     converts Megatron's arguments, in the spellings of all releases; mixture: arguments for experts
families      BERT, T5 and Retro: arguments and pipeline stages that differ from GPT's
state         reads Adam's state from trees: groups, scalars, schedule; state_write: writes this state
core          flat buffers and names of Megatron-core's optimizer state
torch_dist    reads torch_dist folders; torch_dist_state: the optimizer state; torch_dist_write: writes the folders
"""
