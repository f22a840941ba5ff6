"""Megatron-LM and the trainers that take its arguments: MindSpeed and Megatron-Bridge."""
