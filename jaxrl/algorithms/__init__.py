"""One file a method: kernels wired to the fields of a Batch."""
