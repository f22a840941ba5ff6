"""torchtitan 0.3.0: one mesh of devices, FSDP2, module names of every pipeline stage."""
