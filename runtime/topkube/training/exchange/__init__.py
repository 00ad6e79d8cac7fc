"""The exchange of gradients during `backward()`: hooks, buckets, error feedback, sparse gradients."""
