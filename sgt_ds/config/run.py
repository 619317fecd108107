"""The run configuration: one typed value for RUN.yaml and its overrides. Knows no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)

from sgt_ds.config.evaluation import EvaluationConfig
from sgt_ds.config.float8 import float8_faults
from sgt_ds.config.growth import GrowthConfig, growth_faults
from sgt_ds.config.model import PRESETS, SHAPE, Decay, ModelConfig, Section

Ratio = Annotated[float, Field(ge=0, le=1)]
# Far beyond any run, and small enough for every sum that is made of it.
Count = Annotated[int, Field(ge=1, le=10**9)]
Url = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9+.-]*://")]
# A Path would swallow one of a URL's slashes.
Location = Annotated[Url | Path, Field(union_mode="left_to_right")]


class DataSource(Section):
    """One prepared set of token shards."""

    path: Location
    """Directory written by `sgt-ds data prepare`, or its URL (s3, gs, hf, https, file)."""
    weight: PositiveFloat = 1.0
    """Share of the training sequences, relative to the other sources."""


class DataConfig(Section):
    """What the model reads."""

    train: list[DataSource] = Field(min_length=1)
    """Prepared sets to train from."""
    validation: Location | None = None
    """Prepared set for the validation loss; a directory or a URL."""
    sequence_length: Count = 4096
    """Sequence length (N) in positions; a sample holds one more token."""
    document_mask: bool = False
    """Keep attention within a document; positions count from its start."""
    exhausted: Literal["repeat", "stop"] = "repeat"
    """When a set has been read once: read it again in another order, or save and stop the run."""
    cache_dir: Path | None = None
    """Where shards of remote sets are kept; null is sgt-ds under the user's cache directory."""
    cache_bytes: PositiveInt | None = None
    """Maximum bytes of all remote sets kept there: sets not in use are evicted at start, least recently
    used first; null: nothing is removed."""
    accept_changed: bool = False
    """Continue from a checkpoint even if the data sets, their weights or the sequence length changed."""


class TrainingConfig(Section):
    """How long, how much at once, and how often something is written."""

    steps: Count = 5035
    """Applied optimizer updates in the whole run."""
    global_batch_size: Count = 1024
    """Sequences per update, over all ranks."""
    micro_batch_size: PositiveInt = 8
    """Sequences per forward pass on one rank."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the data order."""
    validate_every: PositiveInt = 250
    """Updates between validations; the last update is validated too, but not that of a stop."""
    validation_sequences: PositiveInt = 256
    """Maximum number of sequences read from the validation set."""
    log_every: PositiveInt = 10
    """Updates between rows of log and metrics."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    fp8: bool = False
    """Compute the blocks' matrix products in float8: faster, with operands rounded to 2 or 3 bits of
    mantissa; needs an NVIDIA GPU of compute capability 8.9 or higher, and bf16 in the DeepSpeed file."""
    compile: bool = True
    """Compile each block with torch.compile."""
    compile_ahead: bool | None = None
    """Compile the kinds of block that growth will need in a process beside each rank, while it trains.
    Takes memory of each GPU where enough is free, and a core of the host for each rank; null: on GPUs
    only."""
    compile_cache: Path | None = None
    """Folder that keeps compiled code for later starts on another machine or in a new container; all
    hosts read it. It holds executable code: restrict write access to users you trust to run training.
    """
    max_skipped_steps: PositiveInt = 20
    """Consecutive skipped updates (non-finite gradients) after which the run stops."""
    compare_ranks_every: PositiveInt | None = 100
    """Updates between checks that all ranks hold bitwise identical weights; null: never."""
    collective_timeout_seconds: Annotated[float, Field(gt=0, le=10**6)] = 600.0
    """How long a collective waits for a late rank, and how long a start, a first update with new
    loops (which may compile), a validation or a checkpoint may take, before the run fails."""
    hang_seconds: Annotated[float, Field(ge=3, le=10**6)] = 50.0
    """How long any other phase of an update may take before the run fails and names the late rank.
    Forward, backward and optimizer may take ten times their longest time so far if that is more,
    up to collective_timeout_seconds."""

    def compiles_ahead(self, *, on_gpu: bool) -> bool:
        """Whether kinds of block to come are compiled beside ranks."""
        return self.compile and (on_gpu if self.compile_ahead is None else self.compile_ahead)

    @model_validator(mode="after")
    def _ahead_of_something(self) -> TrainingConfig:
        if self.compile_ahead and not self.compile:
            raise ValueError(
                "compile_ahead: is true, and compile is false; set compile to true, or remove it"
            )
        return self


class OptimizerConfig(Section):
    """AdamW with a cosine schedule."""

    lr: PositiveFloat = 6.0e-4
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the moments."""
    eps: PositiveFloat = 1.0e-8
    """Term added to the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices only."""
    clip: PositiveFloat = 1.0
    """Gradient clipping norm; set here, not in the DeepSpeed file."""
    warmup_steps: NonNegativeInt = 250
    """Updates over which the learning rate rises from 0."""
    final_lr_ratio: Ratio = 0.1
    """What the learning rate falls to after the last update, as a share of the peak."""


class CheckpointConfig(Section):
    """When the run is saved and what is kept."""

    every: PositiveInt = 500
    """Updates between checkpoints; the last update is saved too."""
    keep_last: PositiveInt = 3
    """How many of the newest checkpoints are kept."""
    keep_every: PositiveInt | None = None
    """Checkpoints whose update count is a multiple of this are kept forever."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss; every checkpoint except that of a stop is
    then validated."""
    background: bool = True
    """Write while training continues; each rank holds a copy of its share in host memory, page-locked
    with CUDA."""


class WandbConfig(Section):
    """Where Weights & Biases keeps a run; its key comes from WANDB_API_KEY or `wandb login`."""

    project: str
    """Name of the project."""
    entity: str | None = None
    """User or team; null uses the account's default."""
    mode: Literal["online", "offline"] = "online"
    """offline: write to run_dir/wandb only; `wandb sync` sends it later."""


class TelemetryConfig(Section):
    """Where the exporters listen."""

    enabled: bool = True
    """Serve metrics from every rank."""
    host: str = "127.0.0.1"
    """Address the exporters bind to."""
    port: Annotated[int, Field(ge=1, le=65535)] = 9400
    """Port of local rank 0; local rank r listens on port + r."""
    port_in_use: Literal["error", "next"] = "error"
    """When a port is taken: refuse to start, or take the next free one (targets.json lists it)."""
    certificate: Path | None = None
    """PEM certificate; enables TLS on the exporters."""
    private_key: Path | None = None
    """PEM private key of the certificate."""
    client_ca: Path | None = None
    """PEM certificate authority; if set, only clients with a certificate signed by it may scrape."""
    username: str | None = None
    """User name that scrapers must give (HTTP basic authentication)."""
    password: SecretStr | None = None
    """Password of that user; run.yaml and checkpoints show asterisks. Prefer password_file."""
    password_file: Path | None = None
    """File whose first line is the password; read again when it changes."""
    targets_dir: Path | None = None
    """Prometheus file_sd folder, made if missing; each start writes the addresses of the ranks to
    RUN.json in it."""
    tensorboard: bool = False
    """Write TensorBoard events to run_dir/tensorboard (pip install 'sgt-ds[tensorboard]')."""
    wandb: WandbConfig | None = None
    """Send metrics to Weights & Biases (pip install 'sgt-ds[wandb]'); null disables it."""

    @model_validator(mode="after")
    def _certificate_needs_key(self) -> TelemetryConfig:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key go together; give both or neither")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca needs certificate and private_key")
        return self

    @model_validator(mode="after")
    def _one_password(self) -> TelemetryConfig:
        given = [value for value in (self.password, self.password_file) if value is not None]
        if len(given) != (self.username is not None):
            raise ValueError("username goes together with one of password and password_file")
        return self


class RunConfig(Section):
    """Everything that RUN.yaml says, with the preset filled in."""

    preset: str | None = None
    """Name of a model shape; `model` may override single values. If they change the shape (widths,
    layers or heads), the preset becomes null."""
    model: ModelConfig
    """Shape of the model."""
    method: str = "sgt"
    """Growth policy, by its name in the registry."""
    growth: GrowthConfig = GrowthConfig()
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    deepspeed: Path
    """DeepSpeed JSON: ZeRO stage, precision, communication."""
    run_dir: Path
    """Directory the run writes to."""
    resume: Literal["auto", "never"] | Path = "auto"
    """auto: continue from the newest good checkpoint of run_dir; never; or a path to a checkpoint of this
    run, possibly a copy: once run_dir has checkpoints of its own, the run continues from those."""
    fork: Path | None = None
    """Checkpoint of another run whose weights and optimizer start this one."""
    init: Path | None = None
    """Folder written by `sgt-ds import`, whose weights start this run instead of random ones."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        name = values.get("preset")
        if isinstance(name, str) and name in PRESETS:
            given = values.get("model") or {}
            if isinstance(given, ModelConfig):
                return values
            if isinstance(given, dict):
                shape = PRESETS[name].model_dump()
                other = any(given.get(key, shape[key]) != shape[key] for key in SHAPE)
                return {**values, "preset": None if other else name, "model": {**shape, **given}}
        return values

    @field_validator("run_dir")
    @classmethod
    def _run_dir_is_a_folder_of_its_own(cls, run_dir: Path) -> Path:
        if os.path.realpath(run_dir) == str(Path.cwd()):  # takes links that lead nowhere, too
            raise ValueError("is the current directory; give a separate folder, e.g. runs/first")
        return run_dir

    @model_validator(mode="after")
    def _one_start(self) -> RunConfig:
        if self.init is not None and self.fork is not None:
            raise ValueError(
                "init: cannot be combined with fork, which supplies its own weights; set only one"
            )
        return self

    @model_validator(mode="after")
    def _best_needs_a_validation_set(self) -> RunConfig:
        if self.checkpoint.keep_best and self.data.validation is None:
            raise ValueError("checkpoint.keep_best: needs data.validation; name a prepared set")
        return self

    @model_validator(mode="after")
    def _float8_fits_shapes(self) -> RunConfig:
        if self.training.fp8:
            for key, fault in float8_faults(self.model, self.data.sequence_length):
                raise ValueError(f"{key}: {fault}, or training.fp8=false")
        return self

    @model_validator(mode="after")
    def _method_fits_model(self) -> RunConfig:
        for key, fault in growth_faults(self.method, self.growth, self.model):
            raise ValueError(f"growth.{key}: {fault}")
        return self
