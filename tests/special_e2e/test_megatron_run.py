"""A whole GRPO run with strategy=megatron gives the numbers of one FSDP process."""

import sys
from pathlib import Path

import pytest
from test_layouts import UNEVEN, WITH_REFERENCE, compare

from meshrl.controller import Dispatch, register
from meshrl.trainer.verify import verify
from meshrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from meshrl.workers.verification import Outcome, VerificationWorker

sys.path.append(str(Path(__file__).parents[1] / "special_distributed"))

MEGATRON = (
    "actor_rollout_ref.actor.strategy=megatron",
    # The recipe's float32 is the other engine's key, and keys without effect are refused: back to its default.
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
    "actor_rollout_ref.actor.megatron.dtype=fp32",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "trainer.n_gpus_per_node=4",
)


class WorkerOnCpu(ActorRolloutRefWorker):
    """The worker itself, in a process in which Megatron-Core runs on the CPU."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        import megatron_cpu

        megatron_cpu.install()
        super().init_model()


class VerificationOnCpu(VerificationWorker):
    """The same for `meshrl verify`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def run(self) -> Outcome:
        import megatron_cpu

        megatron_cpu.install()
        return super().run()


@pytest.fixture
def on_cpu(monkeypatch):
    pytest.importorskip("megatron.core")
    monkeypatch.setattr("meshrl.trainer.run.ActorRolloutRefWorker", WorkerOnCpu)
    monkeypatch.setattr("meshrl.trainer.verify.VerificationWorker", VerificationOnCpu)


def test_tensor_and_pipeline_parallel_run_equals_one_process(task, on_cpu, tmp_path):
    # With a reference that becomes the policy after the second step: the third step's KL begins at 0 again.
    options = (*UNEVEN, *WITH_REFERENCE, "actor_rollout_ref.ref.update_every=2")
    plain = task.train(tmp_path / "plain", *options)
    split = task.train(tmp_path / "split", *options, *MEGATRON)
    compare(plain, split, 1e-5)
    kls = [row["actor/kl_loss"] for row in split.metrics if "actor/kl_loss" in row]
    assert kls[2] < kls[1]


def test_verify_says_the_same_on_interleaved_stages(on_cpu, capsys):
    layout = ["megatron.pipeline_model_parallel_size=2", "megatron.virtual_pipeline_model_parallel_size=2"]
    assert verify(2, ["strategy=megatron", *layout])
    assert capsys.readouterr().out.count("same") == 4


def test_without_cuda_the_engine_says_what_it_needs(capsys):
    pytest.importorskip("megatron.core")
    with pytest.raises(Exception, match="strategy=megatron needs CUDA devices"):
        verify(2, ["strategy=megatron", "megatron.tensor_model_parallel_size=2"])
