"""`python -m tests.train.goodput OUT DATA EVERY_S STEPS`: the goodput of a CPU run of two ranks of which one is killed
every so often, and what each restart cost."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

out, data, every_s, steps = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
sets = (
    "model.seq=64",
    "train.batch_tokens=1024",
    "train.save_every=20",
    "train.eval_every=100000",
    "optim.lr=0.001",
)
process = subprocess.Popen([
    *(sys.executable, "-m", "launch", "pretrain", "--size", "tiny", "--nproc", "2", "--no-track", "--quiet"),
    *("--steps", steps, "--data", data, "--out", str(out), *(part for each in sets for part in ("--set", each))),
])  # fmt: skip
log, kills, last = out / "log.jsonl", 0, time.monotonic()
while process.poll() is None:
    time.sleep(0.5)
    if not log.exists():
        last = time.monotonic()
    elif time.monotonic() - last >= every_s:
        workers = sorted(
            psutil.Process(process.pid).children(), key=lambda worker: worker.create_time()
        )
        ranks = workers[:2]  # the younger ones are a group that stands ready
        if ranks:
            ranks[kills % len(ranks)].kill()
            kills, last = kills + 1, time.monotonic()
events = [
    record for record in map(json.loads, log.read_text().splitlines()) if record["kind"] == "event"
]
for event in events:
    if event["event"] in ("start", "restart"):
        print(
            {key: round(event[key], 2) for key in ("step", "start_s", "replay_s")}, event["reason"]
        )
end = {
    key: round(value, 3)
    for key, value in events[-1].items()
    if key == "goodput" or key.endswith("_s")
}
print(f"exit {process.returncode}, {kills} kills, {end}")
