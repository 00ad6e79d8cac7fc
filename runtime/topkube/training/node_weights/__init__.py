"""Error feedback in the weights: every node has weights of its own, and nodes exchange the changes of their weights."""
