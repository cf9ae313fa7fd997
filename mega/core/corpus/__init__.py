"""From raw text of the web to a corpus: steps that drop, repair and cut documents, and count why.

A step (`documents.CorpusStep`) is a function over documents; `run.process` applies it to files by parts, in any number
of processes, with the same bytes, and resumes after any end. The room knows neither tokens on disk nor torch.
"""
