"""Models, tokenizers and data sets of the Hugging Face Hub, by name. Knows files and names, no model; loads no torch.

names       how a name is written, OWNER/NAME[@REVISION][:PART], and how it differs from a path
choice      which files of a repository are fetched: safetensors, tokenizers, JSON; a data set's rows
download    fetches the files of a name into the Hub's own cache; interrupted transfers are resumed
folders     replaces names in options by the folders that were fetched
upload      uploads a folder as a repository, with a model card
faults      turns errors of the Hub into one line
options     options of mega download and mega push
"""
