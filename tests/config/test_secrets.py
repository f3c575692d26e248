"""Values of environment tables reach the job and nothing else."""

import pytest

from pipeline.config.dump import flat, to_toml
from pipeline.config.layers import load, reload
from pipeline.config.schema import MASK
from pipeline.errors import ConfigError
from pipeline.planner.check import resolve
from pipeline.slurm.submit import Nodes, train
from pipeline.train.request import Devices, Request, plan_run

SECRET = "hf_a-credential"


@pytest.fixture
def site(tmp_path):
    path = tmp_path / "site.toml"
    env = f'[cluster.slurm.env]\nHF_TOKEN = "{SECRET}"\nNCCL_DEBUG = "WARN"\n'
    path.write_text(f'[cluster]\nname = "ours"\n{env}')
    return path


def test_the_job_gets_the_values(site, tmp_path, monkeypatch):
    config = resolve(load(size="tiny", cluster=str(site)), ranks=1, gpu=False)

    def variables(slurm):
        return train(tmp_path, "run", slurm, Nodes.parse("1", 1, 0), track=True).variables()

    assert variables(config.cluster.slurm)["HF_TOKEN"] == SECRET
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    recorded = reload(path).cluster.slurm
    with pytest.raises(ConfigError, match=r"cluster\.slurm\.env\.HF_TOKEN"):
        variables(recorded)
    for name in recorded.env:  # a resumed run is submitted again from the same shell
        monkeypatch.setenv(name, "exported")
    assert variables(recorded)["HF_TOKEN"] == "exported"
    again = reload(path, cluster=str(site)).cluster.slurm
    assert variables(again)["HF_TOKEN"] == SECRET


def test_values_are_neither_recorded_nor_shown(site, corpus, tmp_path):
    out = tmp_path / "run"
    request = Request("tiny", "dense", corpus, out, 1, cluster=str(site))
    planned = plan_run(request, Devices(0, 2**36, "CPU")).commit()
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files and not any(SECRET.encode() in path.read_bytes() for path in files)
    assert flat(planned.config)["cluster.slurm.env.HF_TOKEN"] == MASK
    assert SECRET not in repr(planned)
    site = planned.config.cluster.slurm
    shown = train(out, "run", site, Nodes.parse("1", 1, 0), track=True).shown()  # by --dry-run
    assert f"HF_TOKEN={MASK}" in shown and SECRET not in shown


def test_a_bad_value_is_not_printed():
    with pytest.raises(ConfigError, match=r"cluster\.slurm\.env\.HF_TOKEN") as error:
        load(size="tiny", sets=[f'cluster.slurm.env.HF_TOKEN="{SECRET}\\n"'])
    assert SECRET not in str(error.value)
