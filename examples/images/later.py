"""The same task over two turns: the image is shown only when the model has said something."""

from meshrl.agents.environments import Environment, Step
from meshrl.agents.messages import Message, Sample


class ShownLater(Environment):
    """Asks without showing anything, then shows the row's image, then is done."""

    def reset(self, sample: Sample) -> list[Message]:
        """Begins without the image."""
        self.sample, self.turns = sample, 0
        return [{"role": "user", "content": "?"}]

    def step(self, text: str) -> Step:
        """Shows the image, or ends."""
        self.turns += 1
        return Step("?", images=self.sample.images) if self.turns == 1 else Step(done=True)
