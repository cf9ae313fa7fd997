"""Token files, read as samples. Of ranks it knows which of how many data-parallel ranks reads.

indexed, inspect          the files themselves, and what is in them
preprocessing             from text to token files; datatrove_step: on a cluster
sources, workers          documents in any wrapping (columns_process: of parquet), and processes that work on blocks
order, phases             in which order a corpus is read, and how a blend changes
build, recipes            from options to datasets: gpt, masked (with mapping), infill, chat, pairs, labelled, tfrecords
dataset, synthetic, show  what a dataset is, and what it gives
chunks, neighbours        chunks of a corpus, and samples with those that were found for theirs
batches                   microbatches of one data-parallel rank
formats                   files of labelled questions
cache, mapped             arrays that are computed once, and files as memory
"""
