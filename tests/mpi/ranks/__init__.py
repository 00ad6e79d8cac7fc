"""Cases that run on every rank of a world; rank.py calls them."""
