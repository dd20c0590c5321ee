"""The demo on Megatron-Core without a GPU: GRPO on TP2 x PP2, four processes, to the end.

python tests/special_e2e/megatron_demo.py [--steps 200] [--out FOLDER]
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import test_megatron_run

import meshrl.trainer.launch
from meshrl.trainer.demo import main


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="outputs/demo-megatron")
    args = parser.parse_args()
    meshrl.trainer.launch.ActorRolloutRefWorker = test_megatron_run.WorkerOnCpu
    steps = f"trainer.total_training_steps={args.steps}"
    main(args.out, overrides=[*test_megatron_run.MEGATRON, steps, "trainer.test_freq=20"])


if __name__ == "__main__":
    run()
