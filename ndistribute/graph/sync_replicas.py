"""`SyncReplicasOptimizer`: workers with separate sessions that make each step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.graph.graph import Graph, Operation
from ndistribute.graph.hooks import SessionRunHook
from ndistribute.graph.operations import group
from ndistribute.graph.optimizers import GlobalStep, GraphOptimizer, Pairs, in_graph
from ndistribute.graph.variables import GraphVariable
from ndistribute.mistakes import accepting


class SyncReplicasOptimizer(GraphOptimizer):
    """An optimizer that waits for the gradients of several workers and applies their mean.

    The task of each variable collects the gradients of a step. When it has `replicas_to_aggregate`
    gradients, it makes the update, for which all workers of the step wait. It drops later
    gradients. So if there are more workers than that, the slowest workers do not delay a step; the
    additional ones are backup workers (Chen et al., "Revisiting Distributed Synchronous SGD",
    2016).

    Args:
        opt: the optimizer that makes the update; its clipping applies to each worker's gradients.
        replicas_to_aggregate: the number of gradients of a step.
        total_num_replicas: the number of workers; None: `replicas_to_aggregate`. If it is lower,
            each worker contributes several gradients to a step, and waits after the last of them.

    Raises:
        ValueError: a number is below 1, or there are fewer workers than gradients to aggregate and
            these cannot be divided among them.
    """

    @accepting("name", "use_locking")
    def __init__(
        self, opt: Any, replicas_to_aggregate: int, total_num_replicas: int | None = None
    ) -> None:
        total = replicas_to_aggregate if total_num_replicas is None else total_num_replicas
        turns, rest = divmod(replicas_to_aggregate, total) if total > 0 else (0, 1)
        if replicas_to_aggregate < 1 or (rest and replicas_to_aggregate > total):
            raise ValueError(
                f"replicas_to_aggregate is {replicas_to_aggregate} and total_num_replicas {total}: "
                "both must be at least 1, and the first must be at most the second or a multiple "
                "of it, because all workers contribute equally often."
            )
        self._turns = max(1, turns)
        within = in_graph(opt)
        vars(self).update(vars(within))  # The rule, the rate and the slots are those of `opt`.
        self._opt, self._replicas, self._scope = within, replicas_to_aggregate, "sync_replicas"
        # Operations that programs run, or pass to a Supervisor, before the first step.
        self.chief_init_op: Operation
        self.local_step_init_op: Operation
        self.ready_for_local_init_op: Any = None

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, GraphVariable]]:
        """Return pairs of a gradient and a variable; see `GraphOptimizer`."""
        return self._opt.compute_gradients(*args, **kwargs)

    def add_updates(self, graph: Graph, pairs: Pairs, global_step: GlobalStep) -> Operation:
        """Return the operation that contributes gradients and waits for the update.

        Raises:
            ValueError: there is no `global_step`.
        """
        if global_step is None:
            raise ValueError(
                "SyncReplicasOptimizer needs global_step, with which it recognises late gradients: "
                "pass get_or_create_global_step()."
            )

        def at(var: GraphVariable, kind: str, inputs: Sequence[Any], outputs: int = 1) -> Operation:
            """Return a new operation of a variable, on its device."""
            attributes, device = {"variable": var.op.name}, var.device
            return graph.add(kind, inputs, outputs=outputs, attributes=attributes, device=device)

        self.local_step_init_op = group(name="init")
        turns = {"turns": self._turns}
        local = graph.add("local_step", [global_step.value()], outputs=2, attributes=turns)
        rate, made, restarted = self.rate_at(global_step), [], []
        for gradient, variable in pairs:
            made += self.add_update(
                *("aggregate", [gradient, *local.outputs], rate, variable),
                outputs=1,
                replicas=self._replicas,
            ).outputs
            restarted.append(at(variable, "restart_aggregate", [global_step], outputs=0))
        self.chief_init_op = group(*restarted, name="chief_init")
        # The variable furthest behind tells the step; a late worker may see others ahead of it.
        steps: Any = np.stack(made)
        reached, furthest = np.min(steps), np.max(steps)
        kept = graph.add("keep_local_step", [reached], attributes={"of": local.name})
        return at(global_step, "count_step", [*kept.outputs, furthest])

    def make_session_run_hook(self, is_chief: bool, num_tokens: int = -1) -> SessionRunHook:
        """Return a hook with which the chief lets all workers continue from the restored step."""
        return _Restart(self, is_chief)

    def get_init_tokens_op(self, num_tokens: int = -1) -> Operation:
        """Return the operation that the chief runs once its session is ready."""
        return self.chief_init_op

    def get_chief_queue_runner(self) -> None:
        """Return None: the tasks of the variables make the updates, without a thread of the chief.

        `Coordinator` and `Supervisor.start_queue_runners` accept it.
        """


class _Restart(SessionRunHook):
    """Makes the tasks of the variables collect gradients for the step of a new session."""

    def __init__(self, optimizer: SyncReplicasOptimizer, is_chief: bool) -> None:
        self._optimizer, self._is_chief = optimizer, is_chief

    def after_create_session(self, session: Any, coord: Any) -> None:
        if self._is_chief:
            session.run(self._optimizer.chief_init_op)
