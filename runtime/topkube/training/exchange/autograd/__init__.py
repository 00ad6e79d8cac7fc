"""What TopKube attaches to torch's autograd: hooks on gradients, the current backward pass, the factor on the loss."""
