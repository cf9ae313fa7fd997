"""From nothing to a trained model and its text: the first thing that a newcomer runs."""
