"""Models, tokenizers and data sets of the Hugging Face Hub, by name. Knows files and names, no model; loads no torch.

names       what a name is, OWNER/NAME[@REVISION][:PART], and where a path is none
choice      which files of a repository are fetched: safetensors, tokenizers, JSON; a data set's rows
download    a name's files as a folder of the Hub's own cache; cut transfers are resumed
folders     names among options, replaced by the folders of what was fetched
upload      a folder as a repository, with a model card
faults      what the Hub answers, in one line
options     of mega download and mega push
"""
