"""Several roles in one process per rank, sharing its devices and its process group."""

from collections.abc import Mapping

from meshrl.controller.worker import ClassWithInitArgs, Worker, at_role, close_worker


class ColocatedWorker(Worker):
    """Holds one worker of each role; the group's `spawn` gives each role its own view."""

    def __init__(self, specs: dict[str, ClassWithInitArgs]) -> None:
        self.workers = {role: spec.build(at_role(self.info, role)) for role, spec in specs.items()}

    def close(self) -> None:
        """Close the roles' workers."""
        for worker in self.workers.values():
            close_worker(worker)

    @staticmethod
    def role_classes(spec: ClassWithInitArgs) -> dict[str, type]:
        """The class of each role."""
        return {role: role_spec.cls for role, role_spec in spec.args[0].items()}


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ClassWithInitArgs:
    """One worker class that holds a worker of each role; make a group of it, then `group.spawn(roles)`."""
    if not class_dict:
        raise ValueError("create_colocated_worker_cls needs at least one role")
    for role in class_dict:
        if "/" in role:
            raise ValueError(f"a role's name must not contain '/', got {role!r}")
    return ClassWithInitArgs(ColocatedWorker, {str(role): spec for role, spec in class_dict.items()})
