"""A reward that says more than a number."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The share of digits in their place, and whether all are."""
    wanted = sorted(extra_info["digits"])
    right = sum(a == b for a, b in zip(solution_str, wanted, strict=False))
    return {"score": right / len(wanted), "acc": float(solution_str == "".join(wanted)), "length": len(solution_str)}
