"""One module per model family, which creates the architecture from options. The names of a family's tensors on disk
are in checkpoint/forms."""
