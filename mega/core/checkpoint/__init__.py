"""DISK: checkpoints in the project's own format and in foreign ones. Knows no ranks and no model code.

pieces      rectangles of logical tensors, and whether they tile a whole
disk        durable writes and bounded reads
container   one rank's safetensors file
manifest    what a published checkpoint consists of
store       saving, publishing, finding; remote: the same in an object store
reader      one published checkpoint, read in any layout
retention   which checkpoints are kept
layout      which rank of a layout writes which rectangles
reshard     own checkpoint to own checkpoint, cut anew
inspect     is it whole, what is in it, how do two differ; tables prints that

kinds       what lies at a path, and which flags mean something for it
mapping     tables that say where every element comes from, and the proof that none is lost
ledger      what a conversion moved
foreign     tensors in other tools' files, nothing executed; pickle_scan tells what reading their pickles would cost
folders     exported folders, which appear whole, and what killed writers of them left
huggingface Llama and relatives: families, config.json; gpt2 beside them
meta        Llama as Meta releases it; llama2c brings its own files to Meta's names
fairseq     Megatron-11b
convert     all of these, from folder to folder
megatron    Megatron-LM's trees: their tensors; megatron_arguments their model, megatron_state their optimizer
pickles     torch files that hold more than tensors, read inertly
torch_dist  Megatron-core's distributed checkpoints, read only
exchange    own checkpoints and Megatron-LM's trees, one into the other
read_back   is a conversion what it was made from
"""
