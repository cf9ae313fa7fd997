"""What measures the house: parity of layouts, logits against other programs, speed and its calibration."""
