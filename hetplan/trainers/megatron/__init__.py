"""Megatron-LM, and what takes its arguments."""
