"""Batches on all ranks: count samples, stay in step when ranks have unequal numbers of batches."""
