"""The algorithm that `auto` or `dense` stands for in a run: the measurements that it is chosen from, and its correction
in the first steps."""
