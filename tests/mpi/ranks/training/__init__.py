"""Cases of training on several ranks.

Most cases train twice: on all ranks, and in this process alone with the union of all ranks' batches. Both must reach
the same weights.
"""
