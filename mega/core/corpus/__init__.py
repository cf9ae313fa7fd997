"""From raw text of the web to a corpus: steps that drop, repair and cut documents, and count why.

A step (`documents.CorpusStep`) is a function over documents; `run.process` applies it to files by parts, in any number
of processes, with the same bytes, and resumes after any end. The room knows neither tokens on disk nor torch.

documents, parts, part_files   a document and what a step does with it; an input in parts, what becomes of one
run, folder, ledger            a step over files, the folder that it writes, and what became of the documents
repeats                        keys that were there before, in bounded memory
recipe, options, merge, shuffle   steps from a TOML file, their sections, files joined and mixed
clean, quality, language, personal, select, annotate, scorers, urls   steps that look at one document
exact, near_duplicates (minhash, buckets, grouping)   documents that are there twice, or almost
decontaminate, contamination   questions of benchmarks, cut out
wikipedia, wikitext            a dump of articles as documents
datatrove_step                 a step on a cluster
"""
