"""The pure core: facts in, orders out. No clock, no chance, no input or output."""
