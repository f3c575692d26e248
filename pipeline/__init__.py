"""Isoflop, the library: raw text to shards, shards to runs, runs to a law."""
