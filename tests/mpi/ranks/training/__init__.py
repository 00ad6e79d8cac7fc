"""Cases of training on several ranks.

Most cases train twice: distributed, and in this process alone with the union of all ranks' batches; both must give
one result.
"""
