"""`topkube plan`: predict the bytes, the steps and the scaling of each all-reduce on a cluster, for a model."""
