"""The recipe of a run: one pydantic model, one typed field per key.

A key is declared once, with its limits and choices, and its help below it. The loader (recipe_file.py), the error
messages and the table in docs/recipe.md are made from that declaration. The keys of techniques are declared in
tigon.techniques.keys: the sections `lora` and `sharding`, and those that `ModelConfig` and `TrainConfig` inherit. The
section of an objective is declared here as data, because this package is below the objectives. Its rules are in
objectives/recipe_checks.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.dataclasses import dataclass

from tigon.data.source.formats import FORMATS
from tigon.data.source.sources import Source
from tigon.techniques.keys.lora import LoraConfig
from tigon.techniques.keys.model import KERNELS, ModelKeys
from tigon.techniques.keys.section import CONFIG, MAX_COUNT, Section, key
from tigon.techniques.keys.settings import KEYS, Settings
from tigon.techniques.keys.sharding import ShardingConfig
from tigon.techniques.keys.train import TrainKeys

NAME_CHARACTERS = 80
# Folder names that Windows reserves, with any extension.
RESERVED_NAMES = r"(?i:con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?"
TRACKERS = ("wandb", "mlflow", "trackio")
"""Values of `train.report_to` that need a package of the same name."""
MIN_SEQUENCE = 8
"""The smallest `data.sequence_length`."""


@dataclass(frozen=True, config=CONFIG)
class ModelConfig(ModelKeys):
    """The model to train."""

    name: str = key("tigon-demo")
    """A preset (random weights), a local model folder, or a hub id `owner/model`."""
    config: Mapping[str, Any] | None = key(None)
    """Changes to a preset's shape, by the keys of its transformers config, e.g. `{num_hidden_layers: 2}`."""
    self_test: str = key("fallback", choices=("fallback", "strict", "off"))
    """On a GPU, test every op on small inputs first. If an op gives wrong results: `fallback`: warn and use the model's
    own code for that op; `strict`: stop. `off`: do not test."""
    revision: str | None = key(None)
    """Commit, tag or branch of a hub model."""
    trust_remote_code: bool = key(False)
    """Run Python code that comes with a checkpoint. Only for authors you trust."""


@dataclass(frozen=True, config=CONFIG)
class DataConfig(Section):
    """The training data, and how text becomes samples of tokens."""

    source: tuple[str | Mapping[str, Any], ...] = key(("python-docs",))
    """Files or folders (`.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.txt`, `.md`, `.py`, `.rst`), ids of data sets
    on the hub, or `python-docs`: the language reference and the standard library's sources of the running Python; for
    post-training also `toy-answers`: 800 generated questions, each with a polite and a blunt answer. An entry may be a
    mapping, such as `{source: a.jsonl, weight: 2}`."""
    format: str = key("auto", choices=("auto", *FORMATS))
    """Format of the rows. `auto` recognises it by the columns of each file's first row."""
    columns: Mapping[str, Any] | None = key(None)
    """The names that a format's columns have in your data, e.g. `{prompt: question, completion: answer}`."""
    subset: str | None = key(None)
    """Subset (configuration) of a data set on the hub."""
    split: str | None = key(None)
    """Split of a data set on the hub, e.g. `train[:1000]`; null: `train`."""
    revision: str | None = key(None)
    """Commit, tag or branch of a data set on the hub."""
    streaming: bool = key(False)
    """Read data sets of the hub without storing them first, up to `max_text_mib`. For large ones."""
    template: str = key("auto")
    """How rows become text. `auto`: Alpaca's rows and messages use the tokenizer's chat template, or plain headers if
    it has none; `chat`: rows of `prompt-completion` use it too; `plain`: only plain headers; or a `.jinja` file, used
    as with `chat` and saved with the model."""
    learn: str = key("answers", choices=("answers", "all"))
    """Tokens that count in the loss: those of the answers, or `all`. Text is always learned as a whole."""
    show: int = key(0, minimum=0, maximum=1000)
    """Print this many rows as tokens before the training, with the learned ones in colour."""
    max_text_mib: float | None = key(None, above=0)
    """Stop reading after this much text (MiB of UTF-8)."""
    eval_source: tuple[str | Mapping[str, Any], ...] = key(())
    """Data for evaluation, as in `source`; empty: take whole documents of `source`."""
    eval_fraction: float = key(0.02, minimum=0, maximum=0.5)
    """Fraction of documents for evaluation if `eval_source` is empty; 0: none."""
    tokenizer: str = key("auto")
    """A tokenizer folder or hub id. `auto`: the checkpoint's tokenizer; for a preset, a byte-level BPE trained on the
    data."""
    vocab_size: int = key(8192, minimum=300, maximum=262144)
    """Vocabulary size of the BPE that `auto` trains."""
    cache: bool = key(True)
    """Keep rows and tokens in `~/.cache/tigon/tokens` (or under `$XDG_CACHE_HOME`), so that the next run with the same
    data, tokenizer, template and options does not tokenise it again."""
    sequence_length: int = key(1024, minimum=MIN_SEQUENCE, maximum=MAX_COUNT)
    """Tokens per sample."""
    packing: bool | None = key(None)
    """Pack several documents into each sample; false: each sample holds one document, or a piece of one, and is padded
    to the longest sample of its micro-batch. null: pack, except rows that `train.epochs` would then train on in fewer
    than 100 steps, or that are too few for one step."""
    cross_document_attention: bool = key(False)
    """Let tokens attend to earlier documents in a packed sample. sdpa then needs no block mask."""
    too_long: str = key("error", choices=("error", "truncate", "drop"))
    """If a prompt and its answer together are longer than `sequence_length`: stop, cut off the end, or leave both out.
    `truncate` also leaves both out if nothing of the answer is left. The report counts these cases. Longer text is cut
    into several samples."""
    images: int = key(0, minimum=0, maximum=1000)
    """Most images of a row; 0: rows are text. Needs a vision-language model with its processor. Samples are then
    padded, not packed."""
    image_size: int | None = key(None, minimum=16, maximum=16384)
    """Scale down images whose longer side has more pixels; null: the model's processor alone decides."""
    bad_rows: str = key("error", choices=("error", "skip"))
    """If a JSONL row or a text file cannot be used (invalid JSON or UTF-8, unknown columns, an empty answer, refused by
    the chat template): stop and name it, or leave it out (the report counts it)."""

    def sources(self) -> tuple[Source, ...]:
        """The entries of `source`. Raises DataError for an entry that is wrong."""
        return self._listed(self.source, "data.source")

    def eval_sources(self) -> tuple[Source, ...]:
        """The entries of `eval_source`. Raises DataError for an entry that is wrong."""
        return self._listed(self.eval_source, "data.eval_source")

    @property
    def packs(self) -> bool:
        """Whether samples may hold several documents. A run replaces null by its choice (guards/auto_packing.py)."""
        return self.packing is not False

    @property
    def has_eval(self) -> bool:
        """Whether the run evaluates, so that its plan includes the memory of an evaluation."""
        return self.eval_fraction > 0 or bool(self.eval_source)

    @property
    def source_names(self) -> str:
        """The names of the sources, for messages."""
        return ", ".join(source.name for source in self.sources())

    def _listed(self, entries: Sequence[str | Mapping[str, Any]], key: str) -> tuple[Source, ...]:
        defaults = Source(
            "",
            format=self.format,
            columns=self.columns or {},
            subset=self.subset,
            split=self.split,
            revision=self.revision,
            streaming=self.streaming,
        )
        return tuple(Source.of_entry(entry, defaults, key) for entry in entries)


@dataclass(frozen=True, config=CONFIG)
class TrainConfig(TrainKeys):
    """The training loop: batch, optimizer, precision and memory techniques."""

    steps: int | None = key(None, minimum=1, maximum=MAX_COUNT)
    """Optimizer steps; give this or `epochs`."""
    epochs: float | None = key(None, above=0, maximum=1_000_000)
    """Passes over the samples; give this or `steps`."""
    objective: str = key("auto")
    """The loss to minimise: `causal_lm`, `medusa`, `dpo`, `kto`, `orpo`, `grpo`, `distill`, `reward`, `classify`,
    `classify_tokens`, or the name of your file in `tigon/objectives`. `auto`: `medusa` with `heads.stage`,
    `vision_language` with `data.images`, else `causal_lm`."""
    batch_size: int = key(8, minimum=1, maximum=MAX_COUNT)
    """Samples per micro-batch, in each process."""
    learning_rate: float = key(3e-4, above=0)
    """Peak learning rate."""
    schedule: str = key("cosine", choices=("cosine", "linear", "constant", "warmup_stable_decay"))
    """Learning rate schedule after the warm-up. `warmup_stable_decay`: constant, then linear in the last
    `train.decay_steps`."""
    decay_steps: int | None = key(None, minimum=1, maximum=MAX_COUNT)
    """Steps in which `warmup_stable_decay` lowers the learning rate."""
    min_lr_rate: float = key(0.0, minimum=0, maximum=1)
    """Share of the learning rate at which `cosine` and `warmup_stable_decay` end. The warm-up of `warmup_stable_decay`
    begins at this share too, and that of `cosine` at 0."""
    warmup_steps: int = key(0, minimum=0, maximum=MAX_COUNT)
    """Steps of linear warm-up."""
    weight_decay: float = key(0.1, minimum=0)
    """Decoupled weight decay."""
    adam_beta1: float = key(0.9, minimum=0, maximum=0.9999)
    """AdamW's decay of the first moment."""
    adam_beta2: float = key(0.95, minimum=0, maximum=0.99999)
    """AdamW's decay of the second moment."""
    max_grad_norm: float = key(1.0, minimum=0)
    """Clip the gradient's norm to this; 0: no clipping."""
    seed: int = key(1, minimum=0, maximum=2**32 - 1)
    """Random seed for weights, the order of samples, and dropout."""
    device: str = key("auto", choices=("auto", "cpu", "cuda"))
    """`auto`: the GPU if there is one."""
    workers: int = key(0, minimum=0, maximum=64)
    """DataLoader worker processes; 0: load in the training process."""
    log_steps: int = key(10, minimum=1, maximum=MAX_COUNT)
    """Steps between records in metrics.jsonl."""
    eval_steps: int | None = key(None, minimum=1, maximum=MAX_COUNT)
    """Steps between evaluations; null: only at the end."""
    save_steps: int | None = key(None, minimum=1, maximum=MAX_COUNT)
    """Steps between checkpoints; null: only the final model."""
    save_async: bool = key(False)
    """Write checkpoints in the background, in PyTorch's distributed format, while training continues. Each process
    needs host memory for its part of the weights and optimizer states. Needs `save_steps`."""
    keep_checkpoints: int = key(2, minimum=1, maximum=MAX_COUNT)
    """How many of the newest checkpoints to keep. With `load_best` the best one is kept too."""
    load_best: bool = key(False)
    """At the end, load the checkpoint with the lowest eval loss, and save that model. A new lowest eval loss is always
    saved as a checkpoint. Needs `eval_steps`."""
    early_stopping_patience: int | None = key(None, minimum=1, maximum=MAX_COUNT)
    """End training if the eval loss has not fallen in this many evaluations in a row; null: train to the end. Needs
    `eval_steps`."""
    report_to: tuple[str, ...] = key(("tensorboard",), choices=("tensorboard", *TRACKERS, "none"))
    """Trackers of the run. `tensorboard` writes files; `wandb`, `mlflow` and `trackio` need their package, and stay on
    this machine unless their own variables say otherwise; `none` for none."""
    max_skipped_steps: int = key(3, minimum=0, maximum=MAX_COUNT)
    """Consecutive steps whose loss or gradient may be infinite or NaN. Each is skipped and counted; one more stops the
    run."""

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step in each process."""
        return self.batch_size * self.gradient_accumulation

    def shortened(self, steps: int) -> TrainConfig:
        """The same for another number of steps: warm-up and decay fit into them, and nothing is evaluated or saved."""
        warmup_steps = min(self.warmup_steps, steps // 2)
        return dataclasses.replace(
            self,
            steps=steps,
            epochs=None,
            warmup_steps=warmup_steps,
            decay_steps=None if self.decay_steps is None else min(self.decay_steps, steps - warmup_steps),
            eval_steps=None,
            save_steps=None,
        )


@dataclass(frozen=True, config=CONFIG)
class EvalConfig(Section):
    """Evaluations besides the eval loss: texts that the model writes, and tasks of lm-evaluation-harness."""

    generate: tuple[str, ...] = key((), prose=True)
    """Prompts that the model continues before training, after each evaluation and at the end, always with the likeliest
    token. Chats get the chat template around a prompt."""
    generate_tokens: int = key(64, minimum=1, maximum=2048)
    """Most tokens of each of these texts."""
    lm_eval: tuple[str, ...] = key(())
    """Tasks of lm-evaluation-harness to run on the trained model: their names, or `.yaml` files."""
    lm_eval_limit: int | None = key(None, minimum=1, maximum=MAX_COUNT)
    """Rows of each task; null: all of them."""


@dataclass(frozen=True, config=CONFIG)
class HeadsConfig(Section):
    """Heads that predict several tokens ahead, for speculative decoding: `tigon medusa`; see docs/medusa.md."""

    stage: int | None = key(None, minimum=1, maximum=2)
    """1: train only the heads, on a frozen model; 2: train model and heads together; null: no heads."""
    kind: str | None = key(None, choices=("medusa", "mtp"))
    """`medusa`: independent heads of residual blocks; `mtp`: DeepSeek-V3's sequential modules of one transformer layer
    each; null: the kind in `start`, or `medusa`."""
    count: int | None = key(None, minimum=1, maximum=16)
    """Number of heads; head k predicts the token k + 1 ahead; null: as many as in `start`, or 3."""
    layers: int | None = key(None, minimum=0, maximum=8)
    """Residual blocks per medusa head; null: the number in `start`, or 1."""
    output: str = key("auto", choices=("auto", "shared", "separate"))
    """Output layer of a medusa head. `shared`: the model's `lm_head`; `separate`: a weight that starts as a copy of
    `lm_head`; `auto`: shared if the heads would otherwise be larger than the model."""
    start: str | None = key(None)
    """Folder of heads to start from: `heads/` of another run, or published heads. Their kind, count, layers and output
    are then used."""
    decay: float = key(0.8, above=0, maximum=1)
    """Head k's loss is weighted by decay^k."""
    coefficient: float = key(0.2, above=0)
    """Weight of the heads' summed losses relative to the model's loss."""
    schedule: str = key("constant", choices=("constant", "linear", "sine"))
    """Schedule of `coefficient`: constant, or rising from 0 linearly or as a quarter of a sine."""
    ramp: float = key(1.0, above=0, maximum=1)
    """Fraction of the steps over which `coefficient` rises."""
    learning_rate_multiplier: float = key(4.0, above=0)
    """In stage 2, the heads' learning rate divided by the model's."""
    base_steps: int = key(0, minimum=0, maximum=MAX_COUNT)
    """For a preset, whose weights are random: steps of ordinary training before the heads are added."""


@dataclass(frozen=True, config=CONFIG)
class PostTrainingConfig(Section):
    """`train.objective: dpo`, `kto`, `orpo`, `grpo`, `distill` and `reward`, which TRL's trainers carry out."""

    beta: float | None = key(None, minimum=0)
    """dpo, kto: how strongly the model is held to its reference; orpo: weight of the odds ratio; grpo: weight of the KL
    to the reference; distill: 0 is the forward KL, 1 the reverse KL, between them the generalized Jensen-Shannon
    divergence; null: TRL's default (0.1, grpo 0, distill 1)."""
    loss_type: str | None = key(None)
    """Variant of the loss of dpo, kto or grpo, by TRL's name; null: TRL's default."""
    label_smoothing: float = key(0.0, minimum=0, maximum=0.5)
    """dpo: the probability that a pair is labelled the wrong way round. TRL uses it for `loss_type: robust`,
    `exo_pair`, `aot` and `aot_unpaired`."""
    desirable_weight: float = key(1.0, above=0)
    """kto: weight of the answers with `label` true."""
    undesirable_weight: float = key(1.0, above=0)
    """kto: weight of the answers with `label` false."""
    rewards: tuple[str | Mapping[str, Any], ...] = key(())
    """grpo: reward functions as `module:function`, or mappings such as `{function: tigon.rewards:length, weight: 0.5,
    arguments: {most: 200}, name: short}`."""
    tools: tuple[str, ...] = key(())
    """grpo: functions as `module:function` that the model may call."""
    environment: str | None = key(None)
    """grpo: a class as `module:Class`, for TRL's `environment_factory`."""
    max_tool_calling_iterations: int | None = key(None, minimum=1, maximum=1000)
    """grpo: most rounds of tool calls in a completion."""
    generations: int = key(8, minimum=2, maximum=MAX_COUNT)
    """grpo: completions per prompt, which are compared with each other."""
    completion_length: int = key(64, minimum=1, maximum=MAX_COUNT)
    """grpo, distill: most tokens of a completion that the model writes."""
    temperature: float = key(1.0, above=0)
    """grpo, distill: temperature of the model's completions."""
    log_completions: int = key(2, minimum=0, maximum=100)
    """grpo: completions that each record shows with their rewards; 0: none."""
    stop_reward_drop: float | None = key(None, above=0)
    """grpo: end training when the reward stays this much below its best record."""
    stop_clipped_share: float | None = key(None, above=0, maximum=1)
    """grpo: end training when at least this share of the completions stays cut off."""
    stop_patience: int = key(3, minimum=1, maximum=MAX_COUNT)
    """grpo: records in a row that `stop_reward_drop` and `stop_clipped_share` wait for."""
    generator: str = key("auto", choices=("auto", "tigon", "transformers"))
    """grpo, distill: what writes the completions. `tigon`: the trained model in CUDA graphs, with each prompt computed
    once; `transformers`: its `generate`, or what `generation` chooses; `auto`: tigon on a GPU with
    `model.kernels: tigon` and without ZeRO, FSDP2 and `lora.base_offload`, if it can decode the model; otherwise
    transformers, and a line says why."""
    generation: Mapping[str, Any] | None = key(None)
    """grpo, distill: how completions are written, by TRL's names, e.g. `{top_p: 0.9}`, `{use_vllm: true, vllm_mode:
    server}`, or for grpo `{use_transformers_continuous_batching: true}`."""
    teacher: str | None = key(None)
    """distill: model folder or hub id of the teacher, with the model's vocabulary."""
    shared_prefix: bool = key(False)
    """dpo, kto, orpo, grpo, reward: sequences of a micro-batch that begin alike go through the model with one copy of
    the beginning, such as a group's or a pair's prompt."""
    base_steps: int = key(0, minimum=0, maximum=MAX_COUNT)
    """For a preset, whose weights are random: steps of ordinary training on the rows' answers before the objective's
    own. distill: these steps train the teacher, and the student starts from random weights."""


@dataclass(frozen=True, config=CONFIG)
class ComparisonConfig(Section):
    """Short repeats of the run after training, three turns per kernel choice: same seed, weights and samples."""

    steps: int = key(0, minimum=0, maximum=1000)
    """Steps of each repeat; 0: no comparison. Memory is measured in the last step."""
    batch_size: int | None = key(None, minimum=1, maximum=MAX_COUNT)
    """Samples per micro-batch; null: `train.batch_size`."""
    kernels: tuple[str, ...] = key(("none", "no-flce", "tigon"), choices=KERNELS)
    """Kernel choices to compare; the values of `model.kernels`."""


@dataclass(frozen=True, config=CONFIG)
class OutputConfig(Section):
    """The run folder and its files."""

    folder: str = key("runs")
    """Folder that holds run folders."""
    name: str = key("run")
    """Name of this run's folder: letters, digits, `.`, `_` and `-`."""
    if_exists: str = key("error", choices=("error", "number"))
    """If that folder exists: `error` stops (and offers --resume), `number` uses name-2, name-3, ..."""
    save_model: bool = key(True)
    """Write the final weights (safetensors) and tokenizer to `model/`; with `lora.rank` write the adapters and
    tokenizer to `adapters/`."""
    merge: bool = key(False)
    """With `lora.rank`: also merge the adapters into the model's weights, and write `model/`. Runs with `heads.stage`
    always do."""
    dtype: str = key("auto", choices=("auto", "fp32", "bf16", "fp16"))
    """Dtype of the weights in `model/`. `auto`: each weight has the dtype that it has in the checkpoint; a preset's
    weights keep the dtype of training."""
    max_shard_size: str | None = key(
        None, pattern=r"[1-9][0-9]{0,5}[KMGT]B", choices=("a number with KB, MB, GB or TB (such as 5GB)",)
    )
    """Size above which the weights in `model/` are split into several files, e.g. `5GB`; null: transformers'
    default."""
    sample_prompt: str | None = key(None, prose=True)
    """Prompt of the text sample; null: an eval row up to its answer, or the start of an eval text."""
    sample_tokens: int = key(64, minimum=0, maximum=2048)
    """Length of the text sample before and after training; 0: no sample."""


@dataclass(frozen=True, config=CONFIG)
class Recipe(Settings):
    """A whole run. `on_gpu` in a recipe file holds the same sections and overrides them when the run is on a GPU."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    lora: LoraConfig = LoraConfig()
    sharding: ShardingConfig = ShardingConfig()
    heads: HeadsConfig = HeadsConfig()
    post_training: PostTrainingConfig = PostTrainingConfig()
    comparison: ComparisonConfig = ComparisonConfig()
    output: OutputConfig = OutputConfig()

    @classmethod
    def around(cls, settings: Settings, more: Mapping[str, Any]) -> Recipe:
        """A recipe with these settings, these recipe keys and defaults, for rules that a plan checks too."""
        return cls().having({**{name: settings.value(name) for name in KEYS}, **more})

    def knows(self, key: str) -> bool:
        return True

    def settings(self, *, precision: str | None = None) -> Settings:
        """The techniques' keys alone, with values in place of `auto`. precision: the precision of this run."""
        resolved = self.resolved(precision=precision)
        return Settings.of({name: resolved.value(name) for name in KEYS})

    def as_mapping(self) -> dict[str, Any]:
        """Plain mappings and lists for YAML; `load` of that YAML returns an equal recipe."""

        def plain(value: object) -> object:
            if isinstance(value, Mapping):
                return {name: plain(item) for name, item in value.items()}
            return [plain(item) for item in value] if isinstance(value, tuple) else value

        return {
            name: {f.name: plain(getattr(getattr(self, name), f.name)) for f in fields_of(section)}
            for name, section in SECTIONS.items()
        }


def fields_of(section: type[Section]) -> list[dataclasses.Field[Any]]:
    """The fields of a section, its own before those of techniques that it inherits."""
    own = section.__annotations__
    return sorted(dataclasses.fields(section), key=lambda f: f.name not in own)


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "lora": LoraConfig,
    "sharding": ShardingConfig,
    "heads": HeadsConfig,
    "post_training": PostTrainingConfig,
    "comparison": ComparisonConfig,
    "output": OutputConfig,
}
OBJECTIVE_SECTIONS = ("heads", "post_training")
"""The sections that set a training objective."""
