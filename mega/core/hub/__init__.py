"""Models, tokenizers and data sets of the Hugging Face Hub, by name. This package works with files and names only; it
imports neither models nor torch.

names       the form of a name, OWNER/NAME[@REVISION][:PART], and how to tell a name from a path
choice      choose the files of a repository to fetch: safetensors, tokenizers, JSON, or a data set's rows
download    fetch the files of a name into the Hub's own cache; interrupted transfers are resumed
folders     replace names in options with the folders that were fetched
upload      upload a folder as a repository, with a model card
faults      turn errors of the Hub into one line
options     options of mega download and mega push
"""
