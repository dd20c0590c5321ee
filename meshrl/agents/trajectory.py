"""What a loop leaves: the tokens of all turns behind the prompt, who wrote them, and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshrl.agents.messages import Message, Sample
from meshrl.data.seen import Images
from meshrl.rollout.requests import Completion

NO_VERSION = -1
# Why a sample ended: the model was done; the tokens or the turns were used up; the environment said so or broke; the
# rollout was stopped; the model wrote a token that stands for an image, which nobody could tell from images to come.
ENDINGS = ("stop", "length", "turns", "environment", "environment_error", "abort", "image_token")


@dataclass
class Trajectory:
    """One sample's conversation. The four lists over tokens are parallel; `mask` is 1 where the model sampled."""

    sample: Sample
    prompt_ids: list[int]
    messages: list[Message]
    prompt_images: Images = ()
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    assistant_turns: int = 0
    user_turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    malformed_calls: int = 0
    tool_responses_cut: int = 0
    ending: str = ""
    # Images that others showed later, and how many tokens were behind the prompt before them.
    shown: list[tuple[int, bytes]] = field(default_factory=list)
    routes: np.ndarray | None = None  # where the tokens of prompt and conversation went, as far as computed

    @property
    def images(self) -> Images:
        """All that the model sees, in the order of their places."""
        return (*self.prompt_images, *(image for _, image in self.shown))

    def add_sampled(self, answer: Completion) -> None:
        """Appends a turn of the model."""
        self.token_ids += answer.token_ids
        self.log_probs += answer.log_probs
        self.versions += answer.versions
        self.mask += [1] * len(answer.token_ids)
        if answer.routes is not None:
            self.routes = answer.routes if self.routes is None else _continued(self.routes, answer.routes)

    def add_given(self, token_ids: Sequence[int], images: Images = ()) -> None:
        """Appends what others said and showed."""
        self.shown += [(len(self.token_ids), image) for image in images]
        self.token_ids += token_ids
        self.log_probs += [0.0] * len(token_ids)
        self.versions += [NO_VERSION] * len(token_ids)
        self.mask += [0] * len(token_ids)

    def drop_unanswered(self) -> None:
        """Takes off what others said last: the reward belongs on a token of the model."""
        kept = len(self.mask)
        while kept and not self.mask[kept - 1]:
            kept -= 1
        for tokens in (self.token_ids, self.mask, self.log_probs, self.versions):
            del tokens[kept:]
        self.shown = [(before, image) for before, image in self.shown if before < kept]


def _continued(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Routes of a longer conversation: what was known stays, for its tokens were sampled by way of it."""
    return np.concatenate([before, now[len(before) :]])
