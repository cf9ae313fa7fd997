"""Read and write checkpoint formats of other programs. The package `own` handles the project's own format.

form        the interface of a format, the list of all formats, which flags apply to which format
recognise   determines the format of the checkpoint at a path
convert     converts a checkpoint of any format to the project's format, or the reverse
mapping     tables that map elements in both directions, and the check that no element is lost
read_back   compares a conversion with its source
huggingface Hugging Face's folders; families/ and bert: config.json and tensor names; peft: adapters
block_scaled fp8 weights with one scale per block, as in DeepSeek's checkpoints
meta        Llama in Meta's release format; mistral: Mistral's release format; llama2c: llama2.c's files
fairseq     Megatron-11b
gguf        llama.cpp's files
megatron/   Megatron-LM's checkpoints, with optimizer state
foreign     reads tensors from other tools' files without executing code; pickles: torch files with other objects
pickle_scan measures the cost of unpickling before a pickle is read
keys        names and JSON keys of other tools; companions: tokenizer files and similar; writing: JSON and torch files
chat_files  a folder's chat template and the tokens that end a turn
open        opens weights of any format; direct: reads weights of other formats in place
upcycle     initializes a mixture of experts from a dense checkpoint
options     the options of the conversion commands
"""
