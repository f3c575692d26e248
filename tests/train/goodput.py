"""`python -m tests.train.goodput OUT DATA`: the goodput of a CPU run of two ranks of which one is
killed every so often, and the seconds from each kill to the next step."""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.train.test_supervisor import preloaders, ranks, steps

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out", type=Path)
parser.add_argument("data")
parser.add_argument("--every", type=float, default=60, help="seconds of training between kills")
parser.add_argument("--steps", type=int, default=3300)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--kills", type=int, default=1000, help="at most; then the run is stopped")
parser.add_argument("--load", type=int, default=0, help="processes that only compute")
parser.add_argument("--cold", action="store_true", help="kill the preloader before each rank")
options = parser.parse_args()
sets = (
    "model.seq=64 train.batch_tokens=1024 train.eval_every=100000 optim.lr=0.001 "
    f"train.save_every={options.save_every}"
).split()
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load)]
process = subprocess.Popen([
    *(sys.executable, "-m", "launch", "pretrain", "--size", "tiny", "--recipe", "adamw", "--nproc", "2"),
    *("--no-track", "--quiet", "--steps", str(options.steps), "--data", options.data, "--out", str(options.out)),
    *(part for each in sets for part in ("--set", each)),
])  # fmt: skip
log = options.out / "log.jsonl"


def kill(number: int) -> float | None:
    """Kill a rank; return the seconds until the first step after the restart."""
    if options.cold:
        for preloader in preloaders(options.out):
            preloader.kill()
    began_s = time.time()
    ranks(options.out)[str(number % 2)].kill()
    while process.poll() is None:
        time.sleep(0.1)
        restarted = False
        for record in map(json.loads, log.read_text().splitlines()):
            restarted |= record["time"] > began_s and record.get("event") == "restart"
            if restarted and record["kind"] == "step":
                return float(record["time"] - began_s)
    return None


took_s: list[float] = []
last_s = time.monotonic()
while process.poll() is None and len(took_s) < options.kills:
    time.sleep(0.5)
    if not steps(options.out):
        last_s = time.monotonic()
    elif time.monotonic() - last_s >= options.every and len(ranks(options.out)) == 2:
        seconds = kill(len(took_s))
        if seconds is not None:
            took_s.append(seconds)
            print(f"kill {len(took_s)}: {seconds:.1f} s at load {psutil.getloadavg()[0]:.0f}")
        last_s = time.monotonic()
if process.poll() is None:
    process.terminate()
    process.wait()
for each in busy:
    each.kill()
events = [json.loads(line) for line in log.read_text().splitlines() if '"kind":"event"' in line]
end = {k: round(v, 3) for k, v in events[-1].items() if k == "goodput" or k.endswith("_s")}
print(f"exit {process.returncode}, {len(took_s)} kills, {end}")
if took_s:
    p50, p95 = (sorted(took_s)[math.ceil(q * len(took_s)) - 1] for q in (0.5, 0.95))
    print(f"recovery: median {p50:.1f} s, p95 {p95:.1f} s, worst {max(took_s):.1f} s")
