"""Weights between trainers: Hugging Face, hetplan's reference trainer, Megatron-LM."""
