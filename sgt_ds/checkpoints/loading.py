"""Load a verified checkpoint into a DeepSpeed engine, on all ranks together.

Rank 0 verifies every file before any rank loads one; bad input ends the load on all ranks with the
same error, before DeepSpeed's collectives begin. Knows no trainer.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sgt_ds.checkpoints import store
from sgt_ds.checkpoints.agreement import agree_on_input, from_first, rank_and_size
from sgt_ds.checkpoints.contents import parameter_shapes
from sgt_ds.checkpoints.payload import SafePayload, safe_payload
from sgt_ds.checkpoints.reading import being_read
from sgt_ds.checkpoints.repartition import RepartitionedPayload
from sgt_ds.checkpoints.rng import load_rng
from sgt_ds.checkpoints.store import CheckpointInfo
from sgt_ds.errors import ALLOW_ACCESS, UserError

log = logging.getLogger(__name__)

# What names of ZeRO's files begin with where the model is bf16. DeepSpeed 0.19, `engine.py`.
_BF16 = "bf16_zero_"

# What contents of another form than expected raise, here or inside DeepSpeed.
_MISSHAPEN = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError),
    *(AssertionError, RuntimeError, OverflowError),
)


def newest_good_for_all(directory: Path, group: Any = None) -> CheckpointInfo | None:
    """`newest_good` by rank 0, told to every rank: all continue from the same checkpoint.

    Raises: UserError where there are checkpoints and none is good: a run that has been saved never
    silently starts from scratch.
    """

    def found() -> CheckpointInfo | None:
        _tidy(directory)
        info = store.newest_good(directory)
        if info is None and directory.is_dir() and store.list_checkpoints(directory):
            raise UserError(
                directory,
                None,
                "holds checkpoints, but none is complete; `sgt-ds checkpoint verify` says what is "
                "wrong, and `resume=never` with another run_dir starts from scratch",
            )
        return info

    return from_first(found, group)


def _tidy(directory: Path) -> None:
    """What a run that died while saving left goes; what it had just set aside comes back."""
    try:
        if directory.is_dir():
            store.remove_leftovers(directory)
    except OSError as error:
        log.warning("%s: leftovers could not be removed (%s)", directory, error.strerror)


def load(engine: Any, path: Path, *, group: Any = None, verified: bool = False) -> dict[str, Any]:
    """Restore weights, optimizer and random state from `path`; every rank calls this.

    Returns state.json: what the run gave to `save`, and what `save` added (`step`, …).
    `verified`: whether `newest_good_for_all` has just found it, and read all of it.
    Another number of ranks than saved it is fine; ranks beyond those keep their own random state.
    Raises: UserError on all ranks where the checkpoint is damaged, holds pickled code, is of
    another architecture or ZeRO stage.
    """
    state = _checked_state(engine, path, group, verified=verified)
    _restore(engine, path, state["world_size"], group, scheduler=True)
    rank, error = rank_and_size(group)[0], None
    if rank < state["world_size"]:
        try:
            load_rng(path / store.rng_name(rank))
        except UserError as fault:
            error = fault
    agree_on_input(error, group)
    return state


def load_weights_only(engine: Any, path: Path, *, group: Any = None) -> dict[str, Any]:
    """Restore weights and optimizer from another run's checkpoint, and nothing else: a fork.

    DeepSpeed's step counters start at 0; random state, schedule, clipping and the optimizer's
    settings (weight decay, betas, …) stay the engine's.
    Returns state.json of the other run. Raises: as `load`.
    """
    with being_read(path):
        state = _checked_state(engine, path, group)
        clip = getattr(engine.optimizer, "clip_grad", None)
        settings = _optimizer_settings(engine)
        _restore(engine, path, state["world_size"], group, scheduler=False)
    if clip is not None:
        engine.optimizer.clip_grad = clip
    for parameters, own in zip(engine.optimizer.param_groups, settings, strict=True):
        parameters.update(own)
    engine.global_steps = engine.global_samples = engine.skipped_steps = 0
    return state


def _optimizer_settings(engine: Any) -> list[dict[str, Any]]:
    """Of each parameter group: everything but the parameters."""
    return [
        {name: value for name, value in parameters.items() if name != "params"}
        for parameters in engine.optimizer.param_groups
    ]


def _checked_state(
    engine: Any, path: Path, group: Any, *, verified: bool = False
) -> dict[str, Any]:
    """state.json of a checkpoint that verifies and fits the engine."""
    rank, _ = rank_and_size(group)
    error: UserError | None = None
    state: dict[str, Any] = {}
    try:
        if rank == 0 and not verified and (faults := store.verify(path)):
            remedy = "" if faults[0].endswith(ALLOW_ACCESS) else "; use another checkpoint"
            raise UserError(path, None, f"{faults[0]}{remedy}")
        state = store.read_state(path)
        _check_shape(path, state, parameter_shapes(engine))
        stage = int(engine.zero_optimization_stage())
        if state.get("zero_stage") != stage:
            raise UserError(
                path,
                "zero_stage",
                f"was saved under ZeRO-{state.get('zero_stage')} and this run has {stage}; "
                "use the same stage in the DeepSpeed file",
            )
        if stage:
            _check_precision(engine, path)
    except UserError as fault:
        error = fault
    agree_on_input(error, group)
    return state


def _check_precision(engine: Any, path: Path) -> None:
    """Raises: UserError where ZeRO's files, which bear it in their names, are of another one."""
    saved, own = any(path.glob(f"{_BF16}*")), bool(engine.bfloat16_enabled())
    if saved is not own:
        names = {True: "bf16", False: "fp32"}
        raise UserError(
            path,
            "precision",
            f"was saved in {names[saved]} and this run trains in {names[own]}; use a DeepSpeed "
            "file with the same precision",
        )


def _check_shape(path: Path, state: dict[str, Any], wanted: dict[str, list[int]]) -> None:
    saved = state.get("parameters")
    if not isinstance(saved, dict):
        raise UserError(path, "state.json", "lists no parameters; use another checkpoint")
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            raise UserError(
                path,
                "parameters",
                f"has a different architecture: {name} is {saved.get(name, 'absent')} there and "
                f"{wanted.get(name, 'absent')} in this run's model; use its own configuration",
            )


def _restore(
    engine: Any, path: Path, saved_world_size: int, group: Any, *, scheduler: bool
) -> None:
    """Weights and optimizer, through DeepSpeed."""
    error, payload, world_size = None, None, rank_and_size(group)[1]
    if saved_world_size != world_size:
        log.info("%s: saved by %d ranks, repartitioned for %d", path, saved_world_size, world_size)
        # Without ZeRO there are no partitions to cut.
        masters = getattr(engine.optimizer, "single_partition_of_fp32_groups", [])
        payload = RepartitionedPayload(
            saved_world_size, world_size, [master.numel() for master in masters]
        )
    payload = payload or SafePayload()
    try:
        _look_ahead(engine, path, payload)
    except UserError as fault:
        error = fault
    # Before DeepSpeed's collectives begin: a rank that fails between them keeps the others waiting.
    agree_on_input(error, group)
    try:
        with safe_payload(engine, payload):
            loaded, _ = engine.load_checkpoint(
                str(path.parent), tag=path.name, load_lr_scheduler_states=scheduler
            )
        if loaded is None:
            error = UserError(path, None, "holds nothing that DeepSpeed can load")
    except UserError as fault:
        error = fault
    except _MISSHAPEN as fault:
        error = _unfit(path, fault)
    agree_on_input(error, group)


def _look_ahead(engine: Any, path: Path, payload: SafePayload) -> None:
    """Read what DeepSpeed will ask for on this rank. Raises: UserError where that is misshapen."""
    place = str(path.parent), path.name
    try:
        module = payload.look_ahead(engine._get_ckpt_name(*place))["module"]
        wanted = parameter_shapes(engine)
        found = {name: list(value.shape) for name, value in module.items() if name in wanted}
        if found != wanted:
            raise ValueError("the module's tensors are not those of state.json")
        partitions = getattr(engine.optimizer, "single_partition_of_fp32_groups", None)
        if partitions is None:  # no ZeRO, or DeepSpeed's own bf16 optimizer of stage 1
            return
        zero = payload.look_ahead(engine._get_zero_ckpt_name(*place))["optimizer_state_dict"]
        groups = zero["base_optimizer_state"]["param_groups"]
        masters, paddings = zero["single_partition_of_fp32_groups"], zero["group_paddings"]
        sizes = [master.numel() + int(pad) for master, pad in zip(masters, paddings, strict=True)]
        if sizes != [partition.numel() for partition in partitions] or len(groups) != len(sizes):
            raise ValueError("the optimizer partitions have different sizes")
    except _MISSHAPEN as fault:
        raise _unfit(path, fault) from None


def _unfit(path: Path, fault: Exception) -> UserError:
    reason = " ".join(str(fault).split())[:200]
    return UserError(
        path,
        None,
        f"does not hold what DeepSpeed needs ({type(fault).__name__}: {reason}); "
        "use another checkpoint",
    )
