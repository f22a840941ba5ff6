"""FlagScale: Megatron-LM with meshes, runs of stages that have their own tp, dp and microbatch."""
