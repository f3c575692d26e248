"""`make picture`: the ladder of docs/SCALING.md, from its recorded points, with the law fitted to them."""

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from pipeline.scaling.points import read_csv
from pipeline.scaling.predict import at_sizes
from pipeline.scaling.study import study
from pipeline.units import count

POINTS = Path(__file__).with_name("synthetic.csv")
TRUTH = 2.9497  # nats per token of the held-out split, as `launch data prepare` prints


def picture(folder: Path) -> None:
    done = study(read_csv(POINTS), "gamma")
    points, E = done.fit.points, done.parameters()["E"]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    tokens = np.geomspace(points.D.min(), 16 * points.D.max(), 200)
    for i, N in enumerate(np.unique(points.N)):
        mine = points.N == N
        axes.plot(points.D[mine], points.loss[mine], "o", color=f"C{i}", label=f"N = {count(N)}")
        law = [float(done.fit.predict(at_sizes(done, float(N), float(D)))[0]) for D in tokens]
        axes.plot(tokens, law, color=f"C{i}")
    axes.axhline(TRUTH, color="black", label=f"true entropy {TRUTH}")
    axes.axhline(E["value"], color="C3", linestyle="--", label=f"fitted E = {E['value']:.3f}")
    axes.axhspan(E["low"], E["high"], color="C3", alpha=0.12, label="its 95% interval")
    axes.set(
        xscale="log", xlabel="tokens", ylabel="held-out loss (nats per token)", ylim=(2.9, 3.2)
    )
    axes.legend()
    figure.savefig(folder / "synthetic.png", dpi=110)


if __name__ == "__main__":
    picture(Path(sys.argv[1]))
