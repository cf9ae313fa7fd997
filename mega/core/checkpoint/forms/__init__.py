"""Checkpoints in the forms of other programs, into our format and back.

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
