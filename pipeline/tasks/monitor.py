"""Tasks that a run is scored on while it trains."""

import math
import time
from collections.abc import Callable

from torch import Tensor

from pipeline.config.schema import RunConfig
from pipeline.data.corpus import Corpus
from pipeline.parallel.engine import uncompiled
from pipeline.parallel.world import World
from pipeline.tasks import likelihood
from pipeline.tasks.questions import Task, mean, read_tasks

FEWEST = 32  # questions of a task: with fewer, a score is meaningless
# A forward pass over questions counts as this many training steps of as many tokens. By FLOPs it is
# a third of one, but with padding, whole logits and no compiler it takes half of a step on a CPU,
# and one and a half for 15m on an H200, where the host starts its kernels one by one.
PASS_STEPS = 2


class Monitor:
    """Scores the model of an engine; the ranks share the questions.

    The questions are the same at every step and on any number of ranks. Their number is
    `eval.questions`, or as many as `eval.share` of the run's compute allows."""

    def __init__(self, config: RunConfig, corpus: Corpus, world: World) -> None:
        self._world = world
        self._eval = config.eval
        self._began_s = self._first_ended_s = time.perf_counter()
        self._took_s: list[float] = []  # duration of each evaluation
        self._complained = False
        self._compiled = config.train.compile
        self._tasks: list[Task] = []
        self._batches: list[list[likelihood.Batch]] = []  # by task
        if not config.eval.tasks:
            return
        tokenizer = corpus.tokenizer
        longest = config.model.longest
        # The activations of a wide model need more memory than the logits of a small vocabulary.
        widest = max(config.model.vocab, 8 * config.model.width)
        most_tokens = likelihood.pass_tokens(widest, world.device)
        for task in read_tasks(config.eval.tasks):
            pairs = likelihood.pairs_of(task, tokenizer)
            chosen = task.sample(config.eval.questions or affordable(config, task, pairs))
            self._tasks.append(chosen)
            chosen_pairs = likelihood.pairs_of(chosen, tokenizer)
            whole = config.objective.whole_prompts
            batches = likelihood.make_batches(
                chosen_pairs, longest, most_tokens, whole_contexts=whole
            )
            self._batches.append([batch.to(world.device) for batch in batches])

    def __call__(self, logits: Callable[..., Tensor]) -> dict[str, float]:
        """Return the accuracy and the bits per byte of each task, as figures of an evaluation."""
        figures: dict[str, float] = {}
        began_s = time.perf_counter()
        for task, batches in zip(self._tasks, self._batches, strict=True):
            found = self._likelihoods(logits, batches)
            score = mean(likelihood.score_parts(task, found).values())
            figures[f"{task.name}/accuracy"] = score.accuracy
            figures[f"{task.name}/bpb"] = score.bits_per_byte
        if self._tasks:
            # The likelihoods are on the host, so the device has finished.
            ended_s = time.perf_counter()
            figures["tasks_s"] = ended_s - began_s
            self._took_s.append(ended_s - began_s)
            if len(self._took_s) == 1:
                self._first_ended_s = ended_s
        return figures

    def complaint(self, *, last: bool) -> str:
        """Return a line, once, if the tasks take more than `eval.share` of the time of the run.

        The first evaluation also compiles kernels, so it counts only if it is the only one."""
        if self._complained or (len(self._took_s) < 2 and not last):
            return ""
        only = len(self._took_s) == 1
        spent_s = sum(self._took_s[0 if only else 1 :])
        share = spent_s / (time.perf_counter() - (self._began_s if only else self._first_ended_s))
        if share <= self._eval.share:
            return ""
        self._complained = True
        fewer = ", or lower eval.questions" if self._eval.questions else ""
        limit = f"more than eval.share={self._eval.share:g}"
        return f"eval.tasks took {share:.1%} of the time, {limit}; raise train.eval_every{fewer}"

    def _likelihoods(
        self, logits: Callable[..., Tensor], batches: list[likelihood.Batch]
    ) -> list[likelihood.Likelihood]:
        """Return the likelihoods of all pairs, on every rank."""
        world = self._world
        # ZeRO-3 and expert parallelism gather and exchange in every pass, so every rank makes the
        # same number of passes. A rank without a batch repeats one.
        passes = math.ceil(len(batches) / world.size)
        chosen = [batches[(at * world.size + world.rank) % len(batches)] for at in range(passes)]
        with uncompiled(self._compiled):
            mine = likelihood.score_batches(logits, chosen)
        everything: dict[tuple[int, int], likelihood.Likelihood] = {}
        for part in world.gather(mine):
            everything |= part
        return likelihood.join(everything)


def affordable(config: RunConfig, task: Task, pairs: list[likelihood.Pair]) -> int:
    """Return how many questions of a task the run can afford with its part of `eval.share`."""
    train = config.train
    evaluations = math.ceil(train.steps / train.eval_every)
    tokens = config.eval.share * train.steps * train.batch_tokens / PASS_STEPS
    each = tokens / evaluations / len(config.eval.tasks)
    longest = config.model.longest
    lengths = [(len(pair.context) + len(pair.answer), len(pair.answer)) for pair in pairs]
    # An answer that the model cannot read at once is read in several windows.
    asked = sum(max(answer, likelihood.padded(both, longest)) for both, answer in lengths)
    return max(FEWEST, math.floor(each / asked * len(task.questions)))
