"""Workers in whose processes Megatron-Core runs on the CPU."""

from meshrl.controller import Dispatch, register


class OnCpu:
    """Before a worker's own class among the bases: its model may be Megatron-Core's.

    Not where a run has one process: that is the one of the tests, which must stay as it is.
    """

    preload = ("megatron_cpu_imports",)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        if self.world_size > 1:
            import megatron_cpu

            megatron_cpu.install()
        super().init_model()
