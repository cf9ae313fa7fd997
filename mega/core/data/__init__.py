"""Token files, made of text and read as samples. Of ranks it knows two integers: which share is whose.

indexed                   the files themselves; writer, merge, inspect: made, joined, looked into
preprocess, sources       from text to token files; columns_process, plain_lines, numpy_files, split: other inputs;
                          datatrove_step: on a cluster
workers, progress, made   processes that work on blocks, how far they are, and what stands there already
order, phases             in which order a corpus is read, and how a blend changes
build, recipes            from options to datasets: gpt, masked (with mapping), infill, chat, pairs, labelled, tfrecords
dataset, synthetic, show  what a dataset is, and what it gives
batches                   microbatches of one data-parallel rank
formats                   files of labelled questions
cache, mapped             arrays that are computed once, and files as memory
"""
