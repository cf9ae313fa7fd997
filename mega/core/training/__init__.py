"""The loop: state, one step, and the routines that fall due between steps."""
