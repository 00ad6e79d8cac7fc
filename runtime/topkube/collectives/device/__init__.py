"""All-reduce of torch tensors on the device that holds them."""
