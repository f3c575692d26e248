"""Triton's kernels, through its interpreter where there is no GPU."""

import subprocess
import sys

import pytest

from tests.conftest import environment


@pytest.mark.slow
def test_kernels_equal_plain_torch():
    command = [sys.executable, "-m", "tests.model.interpreted"]
    env = environment(TRITON_INTERPRET="1")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 12  # six kernels in two dtypes
