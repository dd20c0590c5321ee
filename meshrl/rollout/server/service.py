"""What all routes share: the rollout, its limits and counters, and the calls that change it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from meshrl.models.loading import load_model_config
from meshrl.rollout.opened import Opened, tied_names
from meshrl.rollout.server.errors import ApiError
from meshrl.rollout.server.limits import Slots
from meshrl.rollout.server.metrics import Metrics
from meshrl.rollout.server.settings import Settings
from meshrl.rollout.weight_stream import checked, expected_shapes

T = TypeVar("T")
# How long the metrics wait for an engine that is busy with a weight update.
STATS_SECONDS = 2.0


class Service:
    """A rollout being served."""

    def __init__(self, opened: Opened, settings: Settings):
        self.opened, self.settings = opened, settings
        self.rollout, self.tokenizer = opened.rollout, opened.tokenizer
        self.slots = Slots(settings.max_concurrency, settings.max_queue)
        self.metrics = Metrics()
        self.failure: str | None = None  # of the last request, if the rollout failed at it
        config = load_model_config(opened.path, trust_remote_code=opened.trust_remote_code)
        self.shapes, self.tied = expected_shapes(config), tied_names(config)
        # One at a time: tokenizers change their settings while they work. The first call settles them.
        self._encoder = ThreadPoolExecutor(1, "encode")
        self.tokenizer("0")
        self._changing = asyncio.Lock()
        self._stats: asyncio.Task[dict[str, float]] | None = None

    async def encode(self, work: Callable[[], T]) -> T:
        """Runs a call that uses the tokenizer beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def upload_limit(self) -> int:
        """The most bytes of an upload: by default those of the weights as float64, and their names."""
        if self.settings.max_upload_bytes is not None:
            return self.settings.max_upload_bytes
        total = 0
        for shape in self.shapes.values():
            size = 8
            for length in shape:
                size *= length
            total += size + 512
        return total + (1 << 20)

    async def stats(self) -> dict[str, float]:
        """The rollout's stats, or nothing if it does not answer soon."""
        if self._stats is None or self._stats.done():
            self._stats = asyncio.create_task(asyncio.to_thread(self.rollout.stats))
        await asyncio.wait({self._stats}, timeout=STATS_SECONDS)
        return self._stats.result() if self._stats.done() else {}

    async def pause(self, mode: str) -> None:
        """Holds new requests back, then pauses the rollout."""
        self.slots.shut(True)
        await asyncio.to_thread(self.rollout.pause, mode)
        if not self.slots.is_shut:  # somebody resumed while the last answers were waited for
            await asyncio.to_thread(self.rollout.resume)

    async def resume(self) -> None:
        """Lets the rollout and those that wait go on."""
        self.slots.shut(False)  # first: a pause that ends now looks at it
        await asyncio.to_thread(self.rollout.resume)

    async def update(self, read: Callable[[], Mapping[str, Tensor]], version: int | None) -> int:
        """Brings weights in under a version (by default the next); wrong ones are refused before any is copied."""
        if self._changing.locked():
            raise ApiError(409, "another weight update is under way: try again later", retry_after=1)
        async with self._changing:
            weights = await asyncio.to_thread(read)
            if version is None:
                version = self.rollout.version + 1
            try:
                for _ in checked(weights.items(), self.shapes):
                    pass
            except ValueError as error:
                raise ApiError(400, str(error)) from error
            try:
                await asyncio.to_thread(self.rollout.update_weights, weights.items(), version)
            except Exception as error:
                # Some weights may be new and some old: nothing may be generated with them.
                await self.pause("keep")
                raise ApiError(
                    500, f"the update failed and the server is paused; send the weights again, then resume: {error}"
                ) from error
            self.metrics.updates += 1
            return version

    def close(self) -> None:
        """Ends the rollout."""
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self.rollout.close()
