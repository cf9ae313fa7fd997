"""Read and write the project's own checkpoint format. The package `forms` handles formats of other programs.

pieces      rectangles of logical tensors, and whether they tile a tensor
disk        durable writes and bounded reads
container   one rank's safetensors file
manifest    the list of a published checkpoint's files and tensors
directory   saves, publishes and opens checkpoints under a directory; remote: checkpoints in an object store
store       opens a path or URL given by the user; steps: the steps of a run
reader      reads one published checkpoint in any layout
retention   decides which checkpoints are kept
trusted     finds a step that a run may trust; verdicts: whether a saved step is good
together    raises an error on all ranks if it occurs on any rank
model       the model section of a checkpoint; base: the base of adapters
plain_state checks a run's state that is not stored as tensors (step, seeds, ...)
layout      plans which rectangles each rank of a layout writes
source      a checkpoint as a source of tensors for conversions
folders     writes exported folders atomically; ledger: counts the elements that a conversion moves
options     the layout of a checkpoint's files
reshard     converts a mega checkpoint to a different layout
inspect     verifies, lists and compares checkpoints; tables: prints the results
"""
