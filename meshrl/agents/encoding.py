"""Encoding of tool and user turns as tokens that continue the model's sampled tokens, by the chat template.

The model's own tokens are kept as sampled, never decoded and encoded again. To find the text that follows them, a
conversation is rendered with a mark in place of the model's turn. All text after the mark is new.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.agents.messages import Message, tool_message
from meshrl.config.keys import count
from meshrl.data.images import Images
from meshrl.data.prompt_images import PromptImages

logger = logging.getLogger(__name__)
MARK = "MESHRL0TURN0MARK"
OPENING: tuple[Message, ...] = ({"role": "user", "content": "12 and 34?"},)
WORDS = ("It is 5.", "Then 67", "8 or 9")
SHOWN = 12


class TurnEncoder:
    """An encoder of tool and user turns. `stop_token_ids` are the tokens that end a turn of the model.

    `tools` are the schemas shown to the model. `template_kwargs` are variables of the chat template, equal to those
    used to render the prompts. With a `sight`, tool and user turns may have images.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_token_ids: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        sight: PromptImages | None = None,
    ):
        if tokenizer.chat_template is None:
            raise ValueError(
                "multi-turn rollouts need a tokenizer with a chat template, which says how turns of tools and users "
                "are written: set tokenizer.chat_template in the model's folder"
            )
        self.tokenizer, self.stop_token_ids = tokenizer, frozenset(stop_token_ids)
        self.tools: list[Any] | None = list(tools) or None
        self.template_kwargs = dict(template_kwargs or {})
        self.sight, self.image_token = sight, None if sight is None else sight.image_token
        special = list(tokenizer.all_special_tokens)
        if sight is not None:
            special += tokenizer.convert_ids_to_tokens([sight.image_token])
        special.sort(key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def prompt(self, messages: Sequence[Message], images: Images = ()) -> list[int]:
        """Return the tokens of a conversation up to the model's next turn, including the schemas of the tools."""
        return self._with_images(self._tokens(self.render(messages)), images)

    def answer_text(self, token_ids: Sequence[int]) -> str:
        """Decode a turn of the model, including special tokens but not the stop token that ended the turn."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return str(self.tokenizer.decode(list(token_ids[:-1] if ended else token_ids), skip_special_tokens=False))

    def following(self, messages: Sequence[Message], last_token: int, images: Images = ()) -> list[int]:
        """Return the tokens of tool or user turns up to the model's next turn.

        `last_token` is the token that ended the model's turn before. Special tokens in the text of tools and users are
        removed, so that the text cannot end its own turn.
        """
        plain = [message | {"content": self._plain(message["content"])} for message in messages]
        rendered = self.render([*OPENING, {"role": "assistant", "content": MARK}, *plain])
        _, mark, behind = rendered.rpartition(MARK)
        if not mark:
            raise ValueError("the chat template leaves out what the assistant said before a tool's or user's turn")
        ids = self._with_images(self._tokens(behind), images)
        # The template's token for the end of the model's turn is dropped if the model has sampled a stop token itself.
        ended = last_token in self.stop_token_ids
        return ids[1:] if ended and ids[0] in self.stop_token_ids else ids

    def _plain(self, content: Any) -> Any:
        if not isinstance(content, list):
            return self._without_special(str(content))
        return [part | {"text": self._without_special(part["text"])} if "text" in part else part for part in content]

    def _with_images(self, ids: list[int], images: Images) -> list[int]:
        """Expand each image token to the number of tokens that the model uses for the image."""
        if self.sight is None:
            return ids
        places = ids.count(self.sight.image_token)
        if places != len(images):
            raise ValueError(
                f"{count(places, 'place')} for images, but {count(len(images), 'image')}: use a chat template that "
                "writes those in turns of this role, and no image token in a text"
            )
        return self.sight.expanded(np.array(ids), images, 0).tolist() if images else ids

    def _without_special(self, text: str) -> str:
        # Repeated, because removing one special token may form another one.
        while (plain := self._special.sub("", text)) != text:
            text = plain
        return text

    def render(self, messages: Sequence[Message]) -> str:
        """Render a conversation as text up to the model's next turn; raise ValueError if the template fails."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=self.tools, add_generation_prompt=True, tokenize=False, **self.template_kwargs
            )
        except (TemplateError, TypeError) as error:  # TypeError: content parts in a template that expects text
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(f"the chat template cannot render turns of {roles}: {error}") from error
        return str(text)

    def _tokens(self, text: str) -> list[int]:
        # JSON and file names may contain unpaired surrogates, which a tokenizer does not accept.
        whole = text.encode("utf-8", "replace").decode()
        return list(self.tokenizer(whole, add_special_tokens=False)["input_ids"])

    def check(self, turns: Sequence[Sequence[str]], mode: str = "strict") -> None:
        """Raise ValueError unless encoding turn by turn equals the template's render of the whole conversation.

        `turns` has the roles that may respond to the model, such as `[["tool"], ["tool", "tool"], ["user"]]`. The mode
        `ignore_strippable` ignores white space, `disable` skips the check.
        """
        if mode == "disable":
            return
        conversation = [*OPENING]
        grown = self.prompt(conversation)
        for number, roles in enumerate(turns):
            said = WORDS[number % len(WORDS)]
            ids = self._tokens(said)
            end = self._end_of_turn(roles[0])
            others = [self._words_of(role, number) for role in roles]
            self._check_written(others)
            grown += [*ids, end, *self.following(others, end)]
            conversation += [{"role": "assistant", "content": said}, *others]
            self._compare(grown, self.prompt(conversation), roles, mode)
        self._warn_of_dropped_thoughts(turns)
        self._warn_of_images(turns)

    def _warn_of_images(self, turns: Sequence[Sequence[str]]) -> None:
        """Warn if the template does not write exactly one place per image, the same in every turn of a role.

        This is only a warning, because many runs show no images in these turns.
        """
        if self.sight is None:
            return
        for role in sorted({role for roles in turns for role in roles}):
            words = self._words_of(role, 0)
            shown = words | {"content": [{"type": "image"}, {"type": "text", "text": words["content"]}]}
            said = {"role": "assistant", "content": MARK}
            try:
                first, second = (self.render([*OPENING, *[said, shown] * n]).rpartition(MARK)[2] for n in (1, 2))
            except ValueError as error:
                logger.warning("no images can be shown in a turn of %s: %s", role, error)
                continue
            places = self._tokens(first).count(self.sight.image_token)
            if places != 1:
                logger.warning("the chat template writes %d places for an image in a turn of %s", places, role)
            elif first != second:
                logger.warning(
                    "the chat template writes a second image in a turn of %s otherwise than the first: %r and %r",
                    role, first, second,
                )  # fmt: skip

    def _end_of_turn(self, role: str) -> int:
        """Return the token with which the template ends the model's turn.

        Raises ValueError if the token is not a stop token.
        """
        first = self.following([self._words_of(role, 0)], -1)[0]
        if first not in self.stop_token_ids:
            shown = self.tokenizer.decode([first])
            stops = self.tokenizer.batch_decode([[token] for token in sorted(self.stop_token_ids)])
            raise ValueError(
                f"the chat template ends the assistant's turn with {shown!r}, which does not end generation (the stop "
                f"tokens are {stops}): add it to eos_token_id in the model's generation_config.json"
            )
        return first

    def _check_written(self, others: Sequence[Message]) -> None:
        """Raise ValueError if the template does not write these turns, as it may silently skip unknown roles."""
        words = str(others[0]["content"])
        _, _, behind = self.render([*OPENING, {"role": "assistant", "content": MARK}, *others]).rpartition(MARK)
        if behind.count(words) < len(others):
            roles = " and ".join(str(message["role"]) for message in others)
            raise ValueError(
                f"the chat template does not write what a turn of {roles} says, so the model would never see it: use a "
                "template that knows this role"
            )

    @staticmethod
    def _words_of(role: str, number: int) -> Message:
        words = f"{number}34 5"
        return tool_message("tool", words) if role == "tool" else {"role": role, "content": words}

    def _compare(self, grown: list[int], whole: list[int], roles: Sequence[str], mode: str) -> None:
        left, right = (self._without_space(grown), self._without_space(whole)) if mode != "strict" else (grown, whole)
        if left == right:
            return
        at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
        around = slice(max(0, at - SHOWN), at + SHOWN)
        raise ValueError(
            f"the chat template cannot be used turn by turn: behind a turn of {' and '.join(roles)} the whole "
            f"conversation renders differently from its parts, first at token {at}: "
            f"{self.tokenizer.decode(right[around])!r} as a whole, {self.tokenizer.decode(left[around])!r} by parts. "
            "Use a template that writes each turn the same whatever follows, or set "
            "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode to ignore_strippable or disable"
        )

    def _without_space(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if str(self.tokenizer.decode([token])).strip()]

    def _warn_of_dropped_thoughts(self, turns: Sequence[Sequence[str]]) -> None:
        """Warn if the template removes earlier thoughts of a thinking model, which the model in training still sees."""
        if "<think>" not in str(self.tokenizer.chat_template):
            return
        for roles in turns:
            others = [self._words_of(role, 0) for role in roles]
            thought = {"role": "assistant", "content": f"<think>\n{MARK}\n</think>\n\n{WORDS[0]}"}
            if MARK not in self.render([*OPENING, thought, *others]):
                logger.warning(
                    "the chat template drops the model's thoughts behind a turn of %s: in training they stay in view",
                    " and ".join(roles),
                )
