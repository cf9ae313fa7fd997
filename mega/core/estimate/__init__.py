"""Arithmetic on config, inventory and plans: what a run needs and how long it takes. No torch, no measuring."""
