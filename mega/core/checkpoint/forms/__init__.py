"""Checkpoints of other programs, into our format and back; our format itself is ../own.

form        what a form is, the one list of forms, which flags mean something for which
recognise   what lies at a path
convert     whatever it is, into ours and out of it
mapping     tables that say where every element comes from, read both ways, and the proof that none is lost
read_back   is a conversion what it was made from
huggingface Hugging Face's folders; families/ and bert their config.json and names; peft adapters next to them
block_scaled fp8 weights with scales of blocks, read as bf16
meta        Llama as Meta releases it; mistral as Mistral does; llama2c brings its own files to Meta's names
fairseq     Megatron-11b
gguf        llama.cpp's files
megatron/   Megatron-LM's trees and its distributed checkpoints, with their optimizers
foreign     tensors in other tools' files, nothing executed; pickles torch files that hold more than tensors
pickle_scan what reading their pickles would cost
keys        names of other tools and keys of their files; companions: tokenizers and such; writing: their files
conversing  a folder's chat template and ends of turns
open        weights, wherever they are; direct: foreign ones, read in place
upcycle     a dense checkpoint as the beginning of a mixture of experts
options     what the verbs of conversion read and write
"""
