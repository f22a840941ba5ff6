"""Laws of whole layers, and of layers as sums of operators."""
