"""Convert text to token files. This package does not depend on samples, which are formed when token files are read.

preprocess, progress      tokenize documents in several processes, and show progress
writer                    write token files
numpy_files, merge        create token files from ids in .npy files, and from other token files
plain_lines, split        write lines of text or ids; write training, development and test files
provenance                check whether an output exists, and was made from the same inputs and settings
"""
