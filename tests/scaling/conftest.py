import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from launch import forecast, law, sweep
from pipeline.errors import UserError
from tests.scaling.made_runs import make_ladder


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    """Three finished runs at 20 tokens per parameter: what the demo trains."""
    return make_ladder(tmp_path / "demo")


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes to the store of the directory it runs in."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'own.db'}")


@pytest.fixture(scope="session")
def public() -> Path:
    """Points that others published; kept beside the project, not in it."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "scaling"
    found = Path(os.environ.get("PUBLIC_POINTS", beside))
    if not (found / "chinchilla_points.csv").exists():
        pytest.skip(
            f"the public points are not here ({found}); set PUBLIC_POINTS to their directory"
        )
    return found


@pytest.fixture(scope="session")
def launch():
    """Run a command, whose arguments may hold several words; raise a user's error as it is."""
    app = typer.Typer()
    app.add_typer(law.app)
    app.add_typer(forecast.app)
    app.add_typer(sweep.app, name="sweep")

    def call(*arguments: object) -> str:
        words = [word for argument in arguments for word in str(argument).split()]
        result = CliRunner().invoke(app, words)
        if isinstance(result.exception, UserError):
            raise result.exception
        assert result.exit_code == 0, result.output + repr(result.exception)
        return result.stdout

    return call
