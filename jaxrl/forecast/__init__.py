"""What a run will cost on a TPU slice, told by the TPU's compiler on a machine that has none."""
