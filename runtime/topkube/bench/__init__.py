"""Measurements that anyone can repeat: `topkube bench`."""
