"""The node agent: owner of a node's cache directory (`python -m topkube_operator.node_cache`, one per node).

`decisions.py` decides and is pure. `volume.py` reads and changes the disk. `agent.py` connects both with the API
server. Pods of one namespace share a folder, in which any user of these pods may write. No pod sees another namespace's
folder.
"""
