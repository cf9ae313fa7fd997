"""Builds a corpus from raw web text, in steps that drop, repair or cut documents and count the reasons.

A step (`documents.CorpusStep`) is a function of documents. `run.process` applies a step to files, part by part, in any
number of processes. The output bytes do not depend on the number of processes, and an interrupted run can be resumed.
This package does not depend on token files or torch.

documents, parts, part_files   a document and a step's result for it; an input cut into parts; the output for each part
run, folder, ledger            apply a step to files, its output folder, and the counts of kept and dropped documents
repeats                        find keys that occurred before, in bounded memory
recipe, options, merge, shuffle   steps listed in a TOML file, the options of all steps, merging, shuffling
clean, quality, language, personal, select, annotate, scorers, urls   steps that process each document separately
exact, near_duplicates (minhash, buckets, grouping)   exact and near duplicates
decontaminate, contamination   remove benchmark questions
wikipedia, wikitext            articles of a Wikipedia dump as documents
datatrove_step                 a step in a datatrove pipeline, on a cluster
"""
