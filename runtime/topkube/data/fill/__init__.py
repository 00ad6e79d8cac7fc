"""Fills the cache in the background: from the remote, from other nodes, into memory, and into a view of plain files."""
