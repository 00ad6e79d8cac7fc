"""The choice behind `auto` and `dense` in a run, what it is made from, and how the first steps correct it."""
