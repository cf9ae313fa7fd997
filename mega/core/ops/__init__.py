"""The fast mathematics: one op a file, each with a plain torch reference. Ops know no ranks."""
