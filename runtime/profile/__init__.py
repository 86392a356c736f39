"""`outrider profile`: what steps cost on a model, a layout and a machine, measured through the real step path."""
