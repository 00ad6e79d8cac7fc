"""The contents of the files of a checkpoint: the encoding of state, its files, the manifest, the weights alone."""
