"""YAML reading and writing by libyaml, which is ten times as fast as PyYAML's Python code.

Every function falls back to the Python code if PyYAML was built without libyaml, or if libyaml refuses a text. The
Python code accepts more (half of a surrogate pair), and its errors show the place in the text.
"""

from typing import Any

import yaml

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


# The tags that `texts` still resolves: null, and the key `<<` that merges mappings.
_NO_TEXTS = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")


class _QuickTexts(Loader):
    """A libyaml loader that leaves numbers, dates and bools as the strings in the file."""


class _SlowTexts(yaml.SafeLoader):
    """The Python loader with the behaviour of `_QuickTexts`, for texts that libyaml refuses."""


for _loader in (_QuickTexts, _SlowTexts):
    _loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag in _NO_TEXTS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def parsed(text: str) -> Any:
    """Parse a YAML text into plain Python values, typed by YAML's rules."""
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, UnicodeEncodeError):
        return yaml.safe_load(text)


def texts(text: str) -> Any:
    """Parse a YAML text with every scalar as the string that is written there, except null."""
    try:
        return yaml.load(text, Loader=_QuickTexts)
    except (yaml.YAMLError, UnicodeEncodeError):
        return yaml.load(text, Loader=_SlowTexts)


def composed(text: str) -> yaml.Node | None:
    """Parse a YAML text into its tree of nodes, which have line numbers. An empty text gives None."""
    try:
        return yaml.compose(text, Loader=Loader)
    except (yaml.YAMLError, UnicodeEncodeError):
        return yaml.compose(text, Loader=yaml.SafeLoader)


def as_text(value: Any, quick: Any = Dumper, slow: Any = yaml.SafeDumper, **options: Any) -> str:
    """Write a value as a YAML text.

    A caller with its own dumper passes a pair: `quick` (libyaml) and `slow` (Python), used if `quick` fails.
    """
    try:
        return str(yaml.dump(value, Dumper=quick, allow_unicode=True, **options))
    except UnicodeEncodeError:
        return str(yaml.dump(value, Dumper=slow, allow_unicode=True, **options))
