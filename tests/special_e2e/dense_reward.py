"""A reward with many values, so that no group is without signal."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The share of places that hold the right digit."""
    wanted = "".join(sorted(extra_info["digits"]))
    return sum(a == b for a, b in zip(solution_str, wanted, strict=False)) / len(wanted) - 0.05 * len(solution_str)
