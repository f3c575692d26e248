"""`python -m tests.checkpoint.killed ROOT TIMES SEED`: kill a process that saves, and read what is left.

The process saves without pause and is started again after each kill. It is forked, so that
imports happen once.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from pipeline.checkpoint.restore import find, load, newest
from pipeline.checkpoint.save import Saver
from pipeline.errors import RunError
from pipeline.parallel.world import World
from tests.checkpoint.plain import Plain, small_config

ALONE = World(0, 1, torch.device("cpu"))
SHAPES = [(300, 200), (100_000,), (7,)]


def save_on(root: Path, config, ready: int) -> None:
    """Continue from the newest checkpoint and save without pause; write a byte before each save."""
    engine = Plain(SHAPES)
    found, damaged = find(root, ALONE)
    assert not damaged, damaged
    step = 0
    if found is not None:
        load(engine, found, ALONE)
        step = engine.step()
        assert step == found.step
    saver = Saver(engine, config, root, ALONE)
    while True:
        os.write(ready, b"!")
        step += 1
        engine.stamp(step)
        saver.save(step)


def start(root: Path, config) -> tuple[int, int]:
    """Fork a saving process; return its id and the end of its pipe."""
    listen, ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_on(root, config, ready)
        finally:
            os._exit(1)
    os.close(ready)
    return child, listen


def main(root: Path, times: int, seed: int) -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    config = small_config()
    dice = random.Random(seed)
    engine = Plain(SHAPES)
    engine.stamp(0)  # torch imports its compiler at the first step, which takes a second
    last = 0
    killed_while_saving = 0
    pace_s = 0.05
    for _ in range(times):
        child, listen = start(root, config)
        for save in range(
            dice.choice((1, 2, 3, 3))
        ):  # the third starts when the first is committed
            began = time.monotonic()
            assert os.read(listen, 1) == b"!", "it could not continue from what was left"
            if save:
                pace_s = time.monotonic() - began
        os.close(listen)
        time.sleep(dice.uniform(0, pace_s))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        killed_while_saving += bool(list(root.glob(".step-*")))
        try:
            latest = newest(root)
        except RunError:
            assert last == 0, "the last checkpoint is gone"
            continue
        load(engine, latest, ALONE)
        assert engine.step() == latest.step >= last
        last = latest.step
    print(json.dumps({"during": killed_while_saving, "last": last}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
