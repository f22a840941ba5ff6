"""The search over plans whose stages hold several chunks of layers (interleaved 1F1B)."""
