"""The command line: parse, call pipeline, print."""
