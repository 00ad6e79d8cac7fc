"""All-reduce of TopKube and its peers: between network namespaces over shaped links, and inside a node."""
