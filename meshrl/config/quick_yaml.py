"""YAML by libyaml, where PyYAML was built with it: ten times as quick as by PyYAML's own Python.

What libyaml refuses goes to the latter, which takes more (half of a surrogate pair) and whose errors show the place.
"""

from typing import Any

import yaml

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


# What is no text whatever a key holds: null, and the sign that merges mappings.
_NO_TEXTS = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")


class _QuickTexts(Loader):
    """Takes numbers, dates and truth values as the texts they are written as."""


class _SlowTexts(yaml.SafeLoader):
    """The same."""


for _loader in (_QuickTexts, _SlowTexts):
    _loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag in _NO_TEXTS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def parsed(text: str) -> Any:
    """What a text holds."""
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, UnicodeEncodeError):
        return yaml.safe_load(text)


def texts(text: str) -> Any:
    """What a text holds, with every scalar but null as it is written."""
    try:
        return yaml.load(text, Loader=_QuickTexts)
    except (yaml.YAMLError, UnicodeEncodeError):
        return yaml.load(text, Loader=_SlowTexts)


def composed(text: str) -> yaml.Node | None:
    """The nodes of a text, which know their lines."""
    try:
        return yaml.compose(text, Loader=Loader)
    except (yaml.YAMLError, UnicodeEncodeError):
        return yaml.compose(text, Loader=yaml.SafeLoader)


def as_text(value: Any, quick: Any = Dumper, slow: Any = yaml.SafeDumper, **options: Any) -> str:
    """A value as YAML; dumpers of one's own come in pairs."""
    try:
        return str(yaml.dump(value, Dumper=quick, allow_unicode=True, **options))
    except UnicodeEncodeError:
        return str(yaml.dump(value, Dumper=slow, allow_unicode=True, **options))
