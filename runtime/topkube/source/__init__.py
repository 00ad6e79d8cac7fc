"""A user's code on its way into pods: packed on the user's machine, fetched and checked by an init container.

`packing` makes one archive of a folder, `archive` unpacks an archive and trusts nothing in it, `download` and
`repository` get archives and commits, `packages` installs what the code needs, and `fetch` is the init container's
program.
"""
