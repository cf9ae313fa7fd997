"""The update: from reduced gradients to new weights. Knows no model."""
