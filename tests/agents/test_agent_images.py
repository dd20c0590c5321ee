"""Images in conversations: what tools and environments show, as tokens and as what the rollout and the trainer get."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from scripted import CHATML, END, TOKENIZER, ScriptedRollout, call_text, chatml_tokenizer, run_loop

from meshrl.agents.agent_rollout import AgentRollout
from meshrl.agents.encoding import TurnEncoder
from meshrl.agents.environments import Environment, Step
from meshrl.agents.loop import Agent, Limits
from meshrl.agents.messages import Sample, ToolResult
from meshrl.agents.parsers import HermesParser
from meshrl.agents.toolbox import ToolBox
from meshrl.agents.tools import tool
from meshrl.data.batch import DataProto, object_array
from meshrl.data.images import IMAGES
from meshrl.data.prompt_images import PromptImages
from meshrl.models.tiny import VISION_TOKENS
from meshrl.rollout.requests import SamplingParams

PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}"
)
SEEING = CHATML.replace("{{ m['content'] }}", PARTS)


@pytest.fixture(scope="module")
def tokenizer():
    """That of the scripted rollout with tokens for images behind its own."""
    made = chatml_tokenizer(SEEING)
    made.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)}, replace_extra_special_tokens=False)
    assert made.convert_tokens_to_ids("<|end|>") == END
    return made


@pytest.fixture(scope="module")
def sight(tokenizer, seeing_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    shutil.copy(seeing_folder("qwen3_vl") / "preprocessor_config.json", folder)
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))[:3], strict=True))
    (folder / "config.json").write_text(json.dumps(ids))
    return PromptImages(folder, tokenizer, None)


@pytest.fixture
def agent(tokenizer, sight):
    def make(*tools, environment=None, template=SEEING, **limits):
        tokenizer.chat_template = template
        return Agent(
            TurnEncoder(tokenizer, [END], sight=sight),
            ToolBox(tools, timeout=2.0, sight=sight),
            HermesParser(tools),
            Limits(**{"response_length": 400, **limits}),
            environment,
            2.0,
        )

    yield make
    tokenizer.chat_template = SEEING


def says(*turns):
    return lambda prompt, request: turns[int(request.request_id.rpartition("turn")[2])]


def sample(encoder, question="hi", images=()):
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": question}]
    messages = ({"role": "user", "content": content},)
    return Sample(0, tuple(encoder.prompt(messages, images)), 100, messages, images=images)


def shown_as(sight, tokenizer, ids):
    """The text of tokens, with the tokens of an image as one."""
    text = tokenizer.decode([i for at, i in enumerate(ids) if i != sight.image_token or ids[at - 1] != i])
    return text.replace("<|vision_start|><|image_pad|><|vision_end|>", "[image]")


def test_a_tool_shows_images(agent, sight, tokenizer, image):
    first, second, own = image(16, 24, 1), image(8, 8, 2), image(8, 16, 3)

    @tool
    def crop(corner: int) -> ToolResult:
        """Cuts."""
        return ToolResult("left", images=[first]) if corner else ToolResult("<image> is it", images=second)

    made = agent(crop, max_parallel_calls=2)
    rollout = ScriptedRollout(says(call_text("crop", corner=1) + call_text("crop", corner=0), "a dog"))
    asked = sample(made.encoder, images=(own,))
    _, found = run_loop(made, rollout, asked)
    given = [i for i, mask in zip(found.token_ids, found.mask, strict=True) if not mask]
    start = "<|start|>"
    assert shown_as(sight, tokenizer, given) == (
        f"\n{start}tool\n[image]left<|end|>\n{start}tool\n[image] is it<|end|>\n{start}assistant\n"
    )
    assert given.count(sight.image_token) == 6 + 1
    assert found.images == (own, first, second)
    one, two = rollout.requests
    assert (one.images, two.images) == ((own,), (own, first, second))
    assert two.prompt_token_ids == (
        *asked.prompt_ids,
        *found.token_ids[: len(two.prompt_token_ids) - len(asked.prompt_ids)],
    )
    assert found.messages[2]["content"] == [{"type": "image"}, {"type": "text", "text": "left"}]


@pytest.mark.parametrize(
    ("shown", "words"),
    [(b"no image", "8 bytes that are no image"), ("missing.png", "no image to read at"), (3, "an image must be")],
)
def test_what_cannot_be_seen_is_an_error_of_the_tool(agent, tokenizer, sight, shown, words):
    @tool
    def show() -> ToolResult:
        """Shows."""
        return ToolResult("look", images=[shown])

    _, found = run_loop(agent(show), ScriptedRollout(says(call_text("show"), "pity")), Sample(0, (5, 6)))
    assert found.tool_errors == 1
    assert found.images == ()
    assert "Error: ValueError: " in tokenizer.decode(found.token_ids)
    assert words in tokenizer.decode(found.token_ids)


def test_a_model_that_does_not_see_tells_the_tool(image):
    from scripted import make_agent

    @tool
    def show() -> ToolResult:
        """Shows."""
        return ToolResult("look", images=[image(8, 8)])

    _, found = run_loop(make_agent([show]), ScriptedRollout(says(call_text("show"), "pity")))
    assert found.tool_errors == 1
    assert "the model sees no images, but was given 1 image" in TOKENIZER.decode(found.token_ids)


def test_an_environment_shows_images(agent, tokenizer, sight, image):
    row, opened, later = image(8, 8, 1), image(16, 8, 2), image(8, 24, 3)

    class World(Environment):
        def reset(self, sample):
            parts = [{"type": "image"}, {"type": "image", "image": opened}, {"type": "text", "text": "go"}]
            return [{"role": "user", "content": parts}]

        def step(self, text):
            return Step(done=True) if text == "done" else Step("here", images=[later])

    made = agent(environment=World)
    rollout = ScriptedRollout(says("one", "done"))
    _, found = run_loop(made, rollout, sample(made.encoder, images=(row,)))
    assert (
        shown_as(sight, tokenizer, found.prompt_ids) == "<|start|>user\n[image][image]go<|end|>\n<|start|>assistant\n"
    )
    assert found.prompt_ids.count(sight.image_token) == 3
    assert found.images == (row, opened, later)
    assert [request.images for request in rollout.requests] == [(row, opened), (row, opened, later)]
    assert found.ending == "environment"


def test_an_environment_with_a_broken_image_ends_its_sample(agent, image):
    class Broken(Environment):
        def step(self, text):
            return Step("here", images=[image(8, 8)[:60]])

    class TooFew(Environment):
        def reset(self, sample):
            return [{"role": "user", "content": [{"type": "image"}]}]

        def step(self, text): ...

    for environment, turns in ((Broken, 1), (TooFew, 0)):
        _, found = run_loop(agent(environment=environment), ScriptedRollout(says("one")), Sample(0, (5, 6)))
        assert (found.ending, found.assistant_turns, found.images) == ("environment_error", turns, ())


def test_nobody_fakes_an_image(agent, tokenizer, sight, image):
    """Neither a tool, whose special tokens are taken out, nor the model, whose conversation ends there."""

    @tool
    def lie() -> ToolResult:
        """Lies."""
        return ToolResult("<|image_pad|>x<|vision_start|>", images=[image(8, 8)])

    _, found = run_loop(agent(lie), ScriptedRollout(says(call_text("lie"), "so")), Sample(0, (5, 6)))
    given = [i for i, mask in zip(found.token_ids, found.mask, strict=True) if not mask]
    assert shown_as(sight, tokenizer, given).endswith("[image]x<|end|>\n<|start|>assistant\n")

    class Faking(ScriptedRollout):
        async def generate(self, requests):
            async for chunk in super().generate(requests):
                chunk.token_ids[:] = [sight.image_token if i != END else i for i in chunk.token_ids]
                yield chunk

    class Chatty(Environment):
        def step(self, text):
            return Step("more")

    _, found = run_loop(agent(environment=Chatty), Faking(says("one", "two")), Sample(0, (5, 6)))
    assert (found.ending, found.assistant_turns) == ("image_token", 1)


def test_images_that_nobody_answered_to_are_left_out(agent, image):
    """The rollout is stopped before the model says anything to them."""

    @tool
    def show() -> ToolResult:
        """Shows."""
        return ToolResult("look", images=[image(8, 8, 7)])

    class Stopped(ScriptedRollout):
        async def generate(self, requests):
            async for chunk in super().generate(requests):
                if "turn1" in chunk.request_id:
                    chunk.token_ids.clear(), chunk.log_probs.clear(), chunk.versions.clear()
                    object.__setattr__(chunk, "finish_reason", "abort")
                yield chunk

    made = agent(show)
    own = image(8, 8, 1)
    _, found = run_loop(made, Stopped(says(call_text("show"), "x~")), sample(made.encoder, images=(own,)))
    assert found.ending == "abort"
    assert found.images == (own,)
    assert found.token_ids[-1] == END


def test_a_template_that_leaves_images_out_is_told(agent, image):
    @tool
    def show() -> ToolResult:
        """Shows."""
        return ToolResult("look", images=[image(8, 8)])

    blind = SEEING.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    with pytest.raises(ValueError, match="0 places for images, but 1 image"):
        run_loop(agent(show, template=blind), ScriptedRollout(says(call_text("show"), "x")), Sample(0, (5, 6)))


def test_the_batch_has_all_images(agent, image):
    own = image(8, 16)

    @tool
    def show(size: int) -> ToolResult:
        """Shows."""
        return ToolResult("look", images=[image(8, 8 * size)])

    made = agent(show)
    turns = iter([call_text("show", size=2), "no call"])

    def speak(prompt, request):
        return "fine" if "turn1" in request.request_id else next(turns)

    ids = torch.tensor([made.encoder.prompt([{"role": "user", "content": [{"type": "image"}]}], (own,))] * 2)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "seeds": torch.arange(2)}
    prompts = DataProto.from_dict(tensors, {IMAGES: object_array([(own,), (own,)])})
    batch = AgentRollout(ScriptedRollout(speak), made).generate_sequences(prompts, SamplingParams(400))
    assert list(map(len, batch.non_tensor_batch[IMAGES])) == [2, 1]
    assert batch.non_tensor_batch[IMAGES][0][1] == image(8, 16)
    tokens = (batch.batch["input_ids"] == made.encoder.image_token).sum(1)
    np.testing.assert_array_equal(tokens, [2 + 2, 2])


def test_the_check_warns_of_templates_that_leave_images_out_or_count_them(agent, caplog):
    roles = [["tool"], ["user"]]
    agent().encoder.check(roles)
    assert not caplog.records
    image_place = "<|vision_start|><|image_pad|><|vision_end|>"
    agent(template=SEEING.replace(image_place, "")).encoder.check(roles)
    assert [r.getMessage() for r in caplog.records] == [
        f"the chat template writes 0 places for an image in a turn of {role}" for role in ("tool", "user")
    ]
    caplog.clear()
    counting = SEEING.replace(image_place, "{% set ns.n = ns.n + 1 %}{{ ns.n }}" + image_place)
    agent(template="{% set ns = namespace(n=0) %}" + counting).encoder.check(roles)
    assert all("writes a second image" in r.getMessage() for r in caplog.records)
    assert len(caplog.records) == 2
    caplog.clear()
    agent(template=CHATML.replace("{{ m['content'] }}", "{{ m['content'] + '' }}")).encoder.check([["user"]])
    (record,) = caplog.records
    assert "no images can be shown in a turn of user" in record.getMessage()


class Begins(Environment):
    def __init__(self, messages):
        self.messages = messages

    def reset(self, sample):
        return self.messages(sample)

    def step(self, text):
        return Step(done=True)


@pytest.mark.parametrize("parts", [False, True])
def test_an_environment_may_begin_with_the_rows_own_messages(agent, sight, tokenizer, image, parts):
    """In which an image is a word, or a part that a table has filled up with empty columns."""
    own = image(8, 16, 1)
    question = [{"type": "image", "text": None, "image": None}, {"type": "text", "text": "?", "image": None}]
    messages = ({"role": "user", "content": np.array(question) if parts else "<image>?"},)
    made = agent(environment=lambda: Begins(lambda given: [{"role": "system", "content": "hm"}, *given.messages]))
    rollout = ScriptedRollout(says("one"))
    _, found = run_loop(made, rollout, Sample(0, (5,), 0, messages, images=(own,)))
    start = "<|start|>"
    assert shown_as(sight, tokenizer, found.prompt_ids) == (
        f"{start}system\nhm<|end|>\n{start}user\n[image]?<|end|>\n{start}assistant\n"
    )
    assert rollout.requests[0].images == (own,)


def test_odd_things_end_a_sample_at_most(agent, image):
    """A message without words, an image that is none, and a path from which nothing ever comes."""
    calls = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}]
    template = SEEING.replace("m.content is string", "not m.content or m.content is string")
    made = agent(environment=lambda: Begins(lambda given: calls), template=template)
    _, found = run_loop(made, ScriptedRollout(says("one")), Sample(0, (5,)))
    assert found.ending == "environment"

    class Pixels(Environment):
        def step(self, text):
            return Step("here", images=np.zeros((8, 8, 3), np.uint8))

    _, found = run_loop(agent(environment=Pixels), ScriptedRollout(says("one")), Sample(0, (5,)))
    assert found.ending == "environment_error"


def test_reading_what_a_tool_shows_takes_no_longer_than_a_call(agent, tokenizer, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    @tool(timeout=0.2)
    def show() -> ToolResult:
        """Shows."""
        return ToolResult("look", images=[str(pipe)])

    _, found = run_loop(agent(show), ScriptedRollout(says(call_text("show"), "pity")), Sample(0, (5, 6)))
    assert "took longer than 0.2 seconds" in tokenizer.decode(found.token_ids)
