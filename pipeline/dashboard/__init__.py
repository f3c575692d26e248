"""The page: loss against compute, live or as one file."""
