"""Accuracy, search and closed-loop benchmarks, and the demo, which is the smallest closed loop."""
