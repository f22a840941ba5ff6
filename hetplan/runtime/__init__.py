"""The reference trainer on torch.distributed."""
