"""Draws the pictures of docs/concepts.md: `python docs/images/pictures.py [RUN_DIR]`.

With the folder of a run it also draws where the seconds of its steps went. `seeing DATA_DIR RUN_DIR CONTROL_DIR` draws
docs/seeing.md's from the example's data, a run on it, and one on grey images.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
BLUE, GREEN, ORANGE, VIOLET, GREY = "#c9d8f5", "#cdeacb", "#fbdfb5", "#e2d2f2", "#e6e6e6"
PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "sync", "other")
plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "meshrl", "font.family": "sans-serif", "font.size": 9}


def canvas(width: float, height: float) -> Axes:
    """An empty picture, a unit an inch."""
    _, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")
    return axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """A box with words in its middle."""
    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.06", fc=color, ec="#555", lw=0.8
    )
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", linespacing=1.35)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", bend: float = 0.0) -> None:
    """An arrow with words beside its middle."""
    style = f"arc3,rad={bend}"
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, lw=0.9, connectionstyle=style))
    if text:
        axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.1, text, ha="center", va="bottom", fontsize=8)


def save(name: str) -> None:
    """Write the picture without a date, so that drawing it again changes nothing."""
    plt.savefig(HERE / f"{name}.svg", bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
    plt.close()


def draw_step() -> None:
    """The controller's loop over the calls of one step."""
    axes = canvas(8.2, 3.2)
    box(axes, 0.1, 2.2, 8.0, 0.85, "", BLUE)
    axes.text(0.25, 2.9, "controller: one process, a plain loop", va="center", fontsize=8)
    calls = ["generate", "reward", "log-probs", "advantages", "update", "sync"]
    for at, name in enumerate(calls):
        box(axes, 0.25 + at * 1.32, 2.3, 1.12, 0.42, name, "white")
        if at:
            arrow(axes, (0.05 + at * 1.32, 2.51), (0.25 + at * 1.32, 2.51))
    box(axes, 0.1, 0.15, 5.0, 1.3, "", GREEN)
    axes.text(0.25, 1.3, "actor_rollout_ref: one worker a device", va="center", fontsize=8)
    box(axes, 0.3, 0.3, 1.9, 0.75, "training engine\nfsdp2 · megatron", "white")
    box(axes, 3.0, 0.3, 1.9, 0.75, "rollout\nembedded · vllm · ...", "white")
    arrow(axes, (2.2, 0.67), (3.0, 0.67), "version n")
    box(axes, 5.4, 0.15, 1.25, 1.3, "critic\n(PPO)", ORANGE)
    box(axes, 6.85, 0.15, 1.25, 1.3, "reward\nmodel", ORANGE)
    for x in (2.6, 6.0, 7.5):
        arrow(axes, (x, 2.2), (x, 1.45))
    axes.text(2.75, 1.83, "DataProto in, DataProto out", va="center", fontsize=8)
    save("step")


def draw_batches() -> None:
    """Prompts, samples, mini-batches, micro-batches."""
    axes = canvas(8.2, 2.9)
    box(axes, 0.1, 2.1, 8.0, 0.6, "step: data.train_batch_size prompts × rollout.n answers = samples", BLUE)
    for at in range(2):
        box(axes, 0.1 + at * 4.05, 1.2, 3.95, 0.6, "mini-batch: ppo_mini_batch_size prompts\none optimizer step", GREEN)
    for rank in range(2):
        box(axes, 0.1 + rank * 2.02, 0.62, 1.93, 0.34, f"rank {rank}'s part", GREY)
    widths = [(0.55, 0.8, 0.5), (0.9, 0.97)]
    for rank, row in enumerate(widths):
        x = 0.1 + rank * 2.02
        for width in row:
            box(axes, x, 0.12, width, 0.34, "", ORANGE)
            x += width + 0.03
    axes.text(4.3, 0.29, "micro-batches: cut by tokens, any number, the same gradient", va="center", fontsize=8)
    axes.text(4.3, 0.79, "balanced by tokens; the same samples on every layout", va="center", fontsize=8)
    save("batches")


def draw_layout() -> None:
    """Eight ranks as dp 4 * sp 2 and as ddp 2 * fsdp 4, as docs/fsdp.md prints them."""
    axes = canvas(8.2, 2.35)
    colors = (BLUE, GREEN, ORANGE, VIOLET)
    for rank in range(8):
        ddp, fsdp = divmod(rank, 4)
        x = 0.3 + ddp * 4.1 + fsdp // 2 * 1.95 + fsdp % 2 * 0.9
        box(axes, x, 0.9, 0.8, 0.75, f"rank {rank}\nshard {fsdp}", colors[fsdp])
    for pair in range(4):
        x = 0.25 + pair // 2 * 4.1 + pair % 2 * 1.95
        axes.annotate("", (x, 0.75), (x + 1.8, 0.75), arrowprops={"arrowstyle": "-", "lw": 1.2})
        axes.text(x + 0.9, 0.55, "sp: one sequence", ha="center", va="center", fontsize=8)
    for copy in range(2):
        x = 0.25 + copy * 4.1
        axes.annotate("", (x, 1.85), (x + 3.75, 1.85), arrowprops={"arrowstyle": "-", "lw": 1.2})
        axes.text(x + 1.9, 2.05, "fsdp: one copy of the weights", ha="center", va="center", fontsize=8)
    axes.text(4.1, 0.2, "ddp: the two halves hold the same shards", ha="center", va="center", fontsize=8)
    save("layout")


def draw_versions() -> None:
    """Who has which version of the weights when, synchronous and one step off."""
    axes = canvas(8.2, 2.6)
    for row, (title, begin) in enumerate([("together", (1.3, 2.35)), ("max_staleness\n= 1", (1.3, 1.2))]):
        y = 1.45 - row * 1.3
        axes.text(0.1, y + 0.55, title, va="center")
        lag = begin[1]
        for step in range(3):
            width = 1.0
            x = begin[0] + step * (2.25 if row == 0 else 1.15)
            box(axes, x, y + 0.58, width, 0.42, f"generate {step + 1}", GREEN)
            late = x + 1.1 if row == 0 else x + lag
            box(axes, late, y + 0.08, width, 0.42, f"train {step + 1}", ORANGE)
            version = step if row == 0 else max(0, step - 1)
            axes.text(x + width / 2, y + 1.1, f"v{version}", ha="center", fontsize=8)
    save("versions")


def draw_seconds(run: Path) -> None:
    """Where the time of a run's steps went, from its metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line][:30]
    _, axes = plt.subplots(figsize=(8.2, 2.6))
    floor = [0.0] * len(steps)
    for phase in PHASES:
        seconds = [100 * line.get(f"timing_s/{phase}", 0.0) / line["timing_s/step"] for line in steps]
        if sum(seconds) < len(steps):
            continue
        axes.bar([line["step"] for line in steps], seconds, bottom=floor, label=phase)
        floor = [below + own for below, own in zip(floor, seconds, strict=True)]
    axes.set(xlabel="step", ylabel="% of the step", ylim=(0, 118))
    axes.legend(ncols=4, fontsize=8, frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    save("seconds")


def draw_seeing(data: Path, run: Path, control: Path) -> None:
    """Some images of the example, and what was learnt from them and from grey ones."""
    import pandas

    from meshrl.data.images import open_image

    rows = pandas.read_parquet(data / "test.parquet").drop_duplicates("ground_truth").sort_values("ground_truth")
    layout = [[f"image{at}" for at in range(len(rows))], ["curves"] * len(rows)]
    _, places = plt.subplot_mosaic(layout, figsize=(6.4, 3.4), height_ratios=[1, 3], layout="constrained")
    for at, row in enumerate(rows.itertuples()):
        axes = places[f"image{at}"]
        axes.imshow(open_image(row.images[0]["bytes"]), interpolation="nearest")
        axes.set(xticks=[], yticks=[], xlabel=f"\u201c{row.ground_truth}\u201d")
    axes = places["curves"]
    for folder, name, color in ((run, "coloured images", "#2b6cb0"), (control, "all images grey", "#999999")):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for key, style, what in (
            ("val-core/colours/acc/mean@1", "o-", "held-out accuracy"),
            ("critic/score/mean", "--", "reward"),
        ):
            points = [(line["step"], line[key]) for line in lines if key in line]
            axes.plot(*zip(*points, strict=True), style, color=color, label=f"{name}: {what}", ms=3, lw=1.2)
    axes.set(xlabel="step", ylim=(-0.03, 1.05))
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save("seeing")


if __name__ == "__main__":
    if sys.argv[1:2] == ["seeing"]:
        draw_seeing(*map(Path, sys.argv[2:]))
        sys.exit()
    for draw in (draw_step, draw_batches, draw_layout, draw_versions):
        draw()
    if len(sys.argv) > 1:
        draw_seconds(Path(sys.argv[1]))
