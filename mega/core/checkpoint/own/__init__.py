"""The project's own checkpoint format. The formats of other programs are in ../forms.

pieces      rectangles of logical tensors, and whether they tile a tensor
disk        durable writes and bounded reads
container   one rank's safetensors file
manifest    the list of a published checkpoint's files and tensors
directory   saves, publishes and opens checkpoints under a directory; remote: the same in an object store
store       chooses between the two by the path; opens the path that a user gives; steps: the steps under a directory
reader      reads one published checkpoint in any layout
retention   which checkpoints are kept
trusted     which step a run may trust; verdicts: what later steps showed about it; together: errors of all ranks
model       the model of a checkpoint; plain_state: the state that is not tensors; base: the weights under adapters
layout      which rank of a layout writes which rectangles
source      its tensors, as conversions read them
folders     exported folders, which appear complete or not at all; ledger: counts what a conversion moved
options     the layout that files are cut for
reshard     writes an mega checkpoint in another layout
inspect     is it complete, what is in it, how do two differ; tables prints the answers
"""
