"""Download models, tokenizers and data sets from the Hugging Face Hub by name, and upload models. This package handles
only files and names, and does not import torch.

names       the syntax of a name, OWNER/NAME[@REVISION][:PART], and how to distinguish a name from a path
choice      choose which files of a repository to fetch: safetensors, tokenizer and JSON files, or a data set's rows
download    download files into the local Hub cache; interrupted transfers are resumed
folders     replace names in options with the fetched folders
upload      upload a folder as a repository, with a model card
faults      convert errors from the Hub into one-line messages
options     options of mega download and mega push
"""
