"""All-reduce side by side: ours and its peers, between network namespaces over shaped links, and inside one node."""
