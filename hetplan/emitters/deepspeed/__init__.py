"""Megatron-DeepSpeed: DeepSpeed's pipeline engine, which cuts layers by itself."""
