"""One file per family: how the family's options become an architecture. A family's names on disk are in
checkpoint/forms."""
