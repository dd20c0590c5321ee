"""A reward that takes its time: the batch waits for it."""

import time

SECONDS = 0.6


def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    """The number of different digits of each answer, all of them after a while."""
    time.sleep(SECONDS)
    return [len(set(answer)) / 10 for answer in solution_strs]
