"""One SLURM for the whole suite; if none can be started, the tests show the reason."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, absent, running


@pytest.fixture(scope="session")
def site() -> Iterator[Slurm]:
    if reason := absent():
        pytest.skip(reason)
    state = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: sockets live in it
    try:
        with running(state) as cluster:
            yield cluster
    finally:
        shutil.rmtree(state, ignore_errors=True)


@pytest.fixture
def slurm(site: Slurm) -> Slurm:
    """The cluster with both nodes up, whatever an earlier test or a busy machine did to them."""
    site.ready()
    return site
