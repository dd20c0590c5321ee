"""The one error of configs: everything that is wrong, a line each."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """A config that cannot be used; `problems` has one line for each thing to change."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return ConfigError, (self.problems,)
