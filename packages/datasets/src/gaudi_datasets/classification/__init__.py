"""Image classification: folders and ImageNet to records, sources of examples, and batches for networks."""
