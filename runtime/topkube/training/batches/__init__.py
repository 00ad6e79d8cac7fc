"""Batches on all ranks: samples are counted, ranks stay in step with unequal numbers of batches, and the next batch is
copied to the GPU during a step."""
