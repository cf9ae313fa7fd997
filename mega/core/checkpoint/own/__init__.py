"""Read and write the project's own checkpoint format. The package `forms` handles formats of other programs.

pieces      rectangles of logical tensors, and whether they tile a tensor
disk        durable writes and bounded reads
container   one rank's safetensors file
manifest    the list of a published checkpoint's files and tensors
directory   saves, publishes and opens checkpoints under a directory; remote: checkpoints in an object store
store       chooses directory or remote by the path and opens the path that a user gives; steps: the steps of a run
reader      reads one published checkpoint in any layout
retention   decides which checkpoints are kept
trusted     which step a run may trust; verdicts: whether a saved step is good
together    raises an error of any rank on all ranks
model       the model section of a checkpoint; base: the base of adapters
plain_state checks the remaining state without tensors (step, seeds, ...)
layout      which rank of a layout writes which rectangles
source      a checkpoint as a source of tensors for conversions
folders     writes exported folders atomically; ledger: counts the elements that a conversion moves
options     the layout of a checkpoint's files
reshard     converts a mega checkpoint to a different layout
inspect     whether a checkpoint is complete, what it contains, how two differ; tables: prints the results
"""
