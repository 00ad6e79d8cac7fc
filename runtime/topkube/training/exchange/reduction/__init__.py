"""The reduction of a bucket over all ranks: its algorithm, its residual, and the way of gradients into it and back."""
