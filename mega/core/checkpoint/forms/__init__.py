"""Checkpoints of other programs: reading them into the project's format, and writing them. ../own is that format.

form        what a form provides, the one list of forms, which flags apply to which form
recognise   which form is stored at a path
convert     converts a checkpoint of any form to the project's format, or the reverse
mapping     tables of where every element comes from, used in both directions, and the proof that no element is lost
read_back   compares a conversion with its source
huggingface Hugging Face's folders; families/ and bert: their config.json and names; peft: adapters for them
block_scaled fp8 weights with one scale for each block, read as bf16
meta        Llama as Meta releases it; mistral as Mistral does; llama2c maps its files to Meta's names
fairseq     Megatron-11b
gguf        llama.cpp's files
megatron/   Megatron-LM's trees and its distributed checkpoints, with their optimizers
foreign     tensors in files of other tools, read without executing code; pickles: torch files with other objects
pickle_scan measures the cost of a pickle before it is read
keys        names and JSON keys of other tools; companions: tokenizer files and similar; writing: files in their formats
chat_files  a folder's chat template and the tokens that end a turn
open        opens weights in any form; direct: foreign weights, read in place
upcycle     initializes a mixture of experts from a dense checkpoint
options     what the verbs of conversion read and write
"""
