"""Checkpoints of other programs: reading them into the project's format, and writing them. The format is in ../own.

form        what a form provides, the list of all forms, which flags apply to which form
recognise   which form is stored at a path
convert     converts a checkpoint of any form to the project's format, or the reverse
mapping     tables of the origin of every element, for both directions, and the proof that no element is lost
read_back   compares a conversion with its source
huggingface Hugging Face's folders; families/ and bert: their config.json and names; peft: adapters for such models
block_scaled fp8 weights with one scale for each block, read as bf16
meta        Llama in Meta's release format; mistral: Mistral's; llama2c: llama2.c's files, mapped to Meta's names
fairseq     Megatron-11b
gguf        llama.cpp's files
megatron/   Megatron-LM's trees and its distributed checkpoints, with their optimizers
foreign     tensors in files of other tools, read without executing code; pickles: torch files with other objects
pickle_scan measures the cost of a pickle before it is read
keys        names and JSON keys of other tools; companions: tokenizer files and similar; writing: files in their formats
chat_files  a folder's chat template and the tokens that end a turn
open        opens weights in any form; direct: foreign weights, read in place
upcycle     initializes a mixture of experts from a dense checkpoint
options     the options of the verbs that convert
"""
