"""What the files of a checkpoint contain: the encoding of state, its files, the manifest, the weights alone."""
