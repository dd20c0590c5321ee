"""Functions that fail inside of a library; imported by the pool's processes, so nothing heavy is imported here."""

import json


def failing(data_source, solution_str, ground_truth, extra_info):
    return json.loads("no json")


def failing_on_all(**columns):
    return failing(None, None, None, None)
