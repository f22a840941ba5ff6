"""Measuring layers and links; the store of samples. The only room that times torch."""
