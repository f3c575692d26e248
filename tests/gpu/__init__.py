"""Tests for a machine with a GPU: `make gpu-test`. They need torch, numpy, pydantic and pytest;
those of whole engines are skipped where their packages are missing."""
