"""Updates during the next forward (DeAR), and the detection of uses of tensors that are not complete yet."""
