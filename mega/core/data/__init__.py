"""Read token files as samples. Of the parallel layout, this package uses only the data-parallel rank and size.

indexed, inspect          token files, and reports about their content
preprocessing             from text to token files; datatrove_step does this on a cluster
sources, workers          documents in any file format (columns_process: parquet), and worker processes for blocks
order, phases             the order in which a corpus is read, and blends that change during a run
build, recipes            from options to datasets: gpt, masked (with mapping, masking), infill, chat, pairs, labelled,
                          tfrecords
dataset, synthetic, show  the dataset protocol, generated data, and display of samples
chunks, neighbours        chunks of a corpus, and samples with retrieved neighbours
batches                   the microbatches of one data-parallel rank
formats                   files of labelled questions
cache, mapped             arrays that are computed once and cached, and memory-mapped files
"""
