"""The project's own checkpoint format.

pieces      rectangles of logical tensors, and whether they tile a whole
disk        durable writes and bounded reads
container   one rank's safetensors file
manifest    what a published checkpoint consists of
directory   saving, publishing and opening under a directory; remote: the same in an object store
store       which of the two a place is; what a user points at
reader      one published checkpoint, read in any layout
retention   which checkpoints are kept
model       the model that a checkpoint holds
layout      which rank of a layout writes which rectangles
source      its tensors, as conversions read them
folders     exported folders, which appear whole; ledger: what a conversion moved
reshard     own checkpoint to own checkpoint, in another layout
inspect     is it whole, what is in it, how do two differ; tables prints that
"""
