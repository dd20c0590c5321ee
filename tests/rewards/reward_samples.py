"""Four answers of different lengths, one of them empty, and functions that give each what is asked for."""

ANSWERS = ["12", "3", "4567", ""]
TRUTHS = ["12", "9", ["4567"], None]


def each(values):
    """A function that gives the i-th sample the i-th value (raising those that are exceptions)."""

    def function(data_source, solution_str, ground_truth, extra_info):
        value = values[extra_info["n"]]
        if isinstance(value, Exception | SystemExit):
            raise value
        return value

    return function
