"""The types of the fields of a TrainingJob's `spec` that have fields of their own: a module for each field."""
