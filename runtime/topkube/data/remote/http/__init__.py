"""Reads over HTTP: with plain sockets, with an HTTP library, and of the index pages of web servers."""
