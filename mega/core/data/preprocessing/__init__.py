"""From text to token files. It knows no samples: what training makes of the files is decided when they are read.

preprocess, progress      documents tokenised by several processes, and how far they are
writer                    token files as they are written
numpy_files, merge        token files from ids in .npy files, and from other token files
plain_lines, split        lines instead: as text or ids, and into training, development and test files
made                      whether an output stands there already, and of which work
"""
