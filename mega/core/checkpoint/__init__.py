"""DISK: checkpoints in the project's own format and in foreign ones. Knows no ranks and no model code.

pieces      rectangles of logical tensors, and whether they tile a whole
disk        durable writes and bounded reads
container   one rank's safetensors file
manifest    what a published checkpoint consists of
store       saving, publishing, finding, opening
reader      one published checkpoint, read in any layout
retention   which checkpoints are kept
layout      which rank of a tp x pp grid writes which rectangles
reshard     own checkpoint to own checkpoint, cut anew
inspect     is it whole, what is in it, how do two differ; tables prints that

mapping     tables that say where every element comes from, and the proof that none is lost
foreign     tensors in other tools' files, nothing executed
huggingface Llama and relatives: families, config.json
meta        Llama as Meta releases it
convert     all of these, from folder to folder
megatron    Megatron-LM's trees; pickles reads torch files that hold more than tensors, inertly
torch_dist  Megatron-core's distributed checkpoints, read only
exchange    own checkpoints and Megatron-LM's trees, one into the other
"""
