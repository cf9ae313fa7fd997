"""One file a family: how its options become an architecture. A family's names on disk are in checkpoint/forms."""
