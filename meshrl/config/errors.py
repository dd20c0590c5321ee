"""The one error of configs: everything that is wrong, a line each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class ConfigError(ValueError):
    """A config that cannot be used; `problems` has one line for each thing to change."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return ConfigError, (self.problems,)


class Note(str):
    """A line about a key that does nothing here and costs the user nothing: printed, and no reason to refuse."""

    __slots__ = ()


@contextmanager
def told_without_traceback(key: str = "") -> Iterator[None]:
    """What is refused inside (data, a package, a folder) is the user's to change: it becomes a `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError, ImportError) as error:
        words = str(error) or type(error).__name__
        raise ConfigError([f"{key}: {words}" if key else words]) from error
