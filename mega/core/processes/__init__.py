"""The life of ranks: how they start, meet, answer for each other and end. What they compute is not known here."""
