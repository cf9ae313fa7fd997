"""The project's own checkpoint format. The formats of other programs are in ../forms.

pieces      rectangles of logical tensors, and whether they tile a tensor
disk        durable writes and bounded reads
container   one rank's safetensors file
manifest    the list of a published checkpoint's files and tensors
directory   saves, publishes and opens checkpoints under a directory; remote: checkpoints in an object store
store       chooses directory or remote by the path and opens the path that a user gives; steps: the steps of a run
reader      reads one published checkpoint in any layout
retention   which checkpoints are kept
trusted     which step a run may trust; verdicts: what later steps showed about a step; together: errors of all ranks
model       the model of a checkpoint; plain_state: the state that is not tensors; base: the weights under adapters
layout      which rank of a layout writes which rectangles
source      a checkpoint's tensors, as conversions read them
folders     exported folders, which appear complete or not at all; ledger: counts the elements that a conversion moves
options     the layout of a checkpoint's files
reshard     writes a mega checkpoint in another layout
inspect     whether a checkpoint is complete, what it contains, how two differ; tables prints the answers
"""
