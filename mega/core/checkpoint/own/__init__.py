"""The project's own checkpoint format.

pieces      rectangles of logical tensors, and whether they tile a whole
disk        durable writes and bounded reads
container   one rank's safetensors file
manifest    what a published checkpoint consists of
store       saving, publishing, finding; remote: the same in an object store
reader      one published checkpoint, read in any layout
retention   which checkpoints are kept
layout      which rank of a layout writes which rectangles
reshard     own checkpoint to own checkpoint, in another layout
inspect     is it whole, what is in it, how do two differ; tables prints that
"""
