"""Remote stores: the listing of a dataset, and reads of its objects. Every response is compared with the listing."""
