"""What decides about the optimizer's next step: if its gradients are finite, and if all ranks have the same weights."""
