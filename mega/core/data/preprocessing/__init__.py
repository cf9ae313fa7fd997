"""From text to token files. The room knows no samples: reading a token file decides its samples.

preprocess, progress      tokenize documents in several processes, and show progress
writer                    write token files
numpy_files, merge        token files from ids in .npy files, and from other token files
plain_lines, split        output of lines: text or ids, and training, development and test files
provenance                whether an output already exists, and whether the same work made it
"""
