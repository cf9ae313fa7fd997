"""Read token files as samples. This package depends on the parallel layout only by the index and the number of
data-parallel ranks.

indexed, inspect          token files, and reports about their content
preprocessing             from text to token files; datatrove_step: the same on a cluster
sources, workers          documents in any file format (columns_process: parquet), and worker processes for blocks
order, phases             the order in which a corpus is read, and changes of a blend
build, recipes            from options to datasets: gpt, masked (with mapping, masking), infill, chat, pairs, labelled,
                          tfrecords
dataset, synthetic, show  the dataset protocol, generated data, and display of samples
chunks, neighbours        chunks of a corpus, and samples with the retrieved neighbours of their chunks
batches                   microbatches of one data-parallel rank
formats                   files of labelled questions
cache, mapped             arrays that are computed once and cached, and memory-mapped files
"""
