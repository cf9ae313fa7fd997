"""Download models, tokenizers and data sets from the Hugging Face Hub by name, and upload models. This package handles
only files and names, and does not import torch.

names       the syntax of a name, OWNER/NAME[@REVISION][:PART], and how to distinguish a name from a path
choice      choose a repository's files to fetch: safetensors, tokenizers, JSON, or a data set's rows
download    download files into the local Hub cache; interrupted transfers are resumed
folders     replace names in options with the fetched folders
upload      upload a folder as a repository, with a model card
faults      convert errors of the Hub into one-line messages
options     options of mega download and mega push
"""
