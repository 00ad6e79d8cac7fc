"""The node agent: owner of a node's cache directory (`python -m topkube_operator.node_cache`, one per node).

`plan.py` decides and is pure; `volume.py` looks at the disk and changes it; `agent.py` tells the API server.
Pods of one namespace share a folder, in which any user of theirs may write; no pod sees another namespace's.
"""
