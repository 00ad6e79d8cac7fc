"""The connection between a worker and its launcher: rendezvous, messages, links that survive interruptions, tunnels."""
