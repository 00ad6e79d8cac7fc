"""What all parts of a TrainingJob share: the base class of parts, strict reading of YAML, mistakes, quantities."""
