"""The project's own checkpoint format; those of other programs are ../forms.

pieces      rectangles of logical tensors, and whether they tile a whole
disk        durable writes and bounded reads
container   one rank's safetensors file
manifest    what a published checkpoint consists of
directory   saving, publishing and opening under a directory; remote: the same in an object store
store       which of the two a place is; what a user points at; steps: those under a directory
reader      one published checkpoint, read in any layout
retention   which checkpoints are kept
trusted     which step a run may trust; verdicts: what became known of it; together: the same on all ranks
model       the model that a checkpoint holds; plain_state: all that is no tensor; base: weights under adapters
layout      which rank of a layout writes which rectangles
source      its tensors, as conversions read them
folders     exported folders, which appear whole; ledger: what a conversion moved
options     the layout that files are cut for
reshard     own checkpoint to own checkpoint, in another layout
inspect     is it whole, what is in it, how do two differ; tables prints that
"""
