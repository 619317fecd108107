"""The demo's six steps in order, each keyed by its inputs: done ones are reused, the rest go on."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgt_ds.checkpoints import LATEST_NAME, read_latest
from sgt_ds.config import RunLayout
from sgt_ds.demo import sample, speak, stories
from sgt_ds.demo.console import Console
from sgt_ds.demo.ledger import Ledger, key_of
from sgt_ds.demo.processes import program, run
from sgt_ds.demo.settings import SAMPLE_BYTES, STORIES_BYTES, STORIES_SEED, Settings
from sgt_ds.demo.training import rows, train
from sgt_ds.files import sha256_of, write_text_atomically
from sgt_ds.progress import duration

PROMPTS = [
    "In Larkwood everyone knew Sara, a girl who was",
    "This is the story of Tom, a brave boy from Whitesand. His best friend was",
    "One year, in the village of Foxley, there lived a curious girl called Nina.",
]
PROMPT_WORDS = 10


class Demo:
    """The main job, small: corpus, tokenizer and shards, training, scrapes, export, summary."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings, self.console = settings, console
        settings.work_dir.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(settings.work_dir)
        self.config = settings.config()
        self._sgt_ds = program("sgt-ds")

    def run(self) -> None:
        """All steps. Raises: CommandFailed with the status of the command that failed."""
        started = time.monotonic()
        self.write_corpus()
        self.prepare_tokens()
        self.train()
        self.convert()
        self.summarise(time.monotonic() - started)

    def write_corpus(self) -> None:
        """Step 1: stories, or a sample of the user's documents, as C4 shards."""
        settings, console = self.settings, self.console
        if settings.data is None:
            console.step(1, "Corpus: synthetic stories, as C4 shards")
            key = key_of("stories", STORIES_SEED, STORIES_BYTES, _sources())
        else:
            console.step(1, f"Corpus: the first {SAMPLE_BYTES / 1e6:.0f} MB of {settings.data}")
            key = key_of("sample", SAMPLE_BYTES, sample.fingerprint(settings.data))
        if self._reused("corpus", key, settings.corpus):
            return
        shutil.rmtree(settings.corpus, ignore_errors=True)
        with self._timed():
            if settings.data is None:
                files = stories.write_corpus(settings.corpus, STORIES_SEED, STORIES_BYTES)
            else:
                files = sample.write_sample(settings.corpus, settings.data, SAMPLE_BYTES, console)
            self.ledger.finish("corpus", key, files)
        size = sum(path.stat().st_size for path in files)
        console.note(f"{len(files)} shards, {size / 1e6:.1f} MB compressed, in {settings.corpus}")

    def prepare_tokens(self) -> None:
        """Step 2: a tokenizer trained on the corpus, and token shards."""
        settings, console = self.settings, self.console
        console.step(2, "Tokenizer and token shards")
        inputs = str(settings.corpus / "train.*")
        vocabulary = self.config.model.vocab_size
        key = key_of("tokenizer", vocabulary, sorted(self.ledger.digests("corpus").items()))
        if not self._reused("tokenizer", key, settings.tokenizer):
            settings.tokenizer.unlink(missing_ok=True)
            with self._timed():
                self._command("tokenizer", "train", inputs, "--out", str(settings.tokenizer),
                              "--vocab-size", str(vocabulary))  # fmt: skip
            self.ledger.finish("tokenizer", key, [settings.tokenizer])
        key = key_of("tokens", self.ledger.digests("tokenizer"), key)
        if not self._reused("tokens", key, settings.shards):
            if self.ledger.started_with("tokens") != key:  # else `prepare` goes on
                shutil.rmtree(settings.shards, ignore_errors=True)
            self.ledger.begin("tokens", key)
            with self._timed():
                for name in ("train", "validation"):
                    self._command("data", "prepare", str(settings.corpus / f"{name}.*"),
                                  "--tokenizer", str(settings.tokenizer),
                                  "--out", str(settings.shards / name))  # fmt: skip
            self.ledger.finish("tokens", key, sorted(settings.shards.glob("*/manifest.json")))

    def train(self) -> None:
        """Steps 3 and 4: two ranks under the launcher, scraped while they train."""
        settings, console, ledger = self.settings, self.console, self.ledger
        console.step(3, "Train on two CPU ranks (and step 4: scrape their exporters meanwhile)")
        layout = RunLayout(settings.run_dir)
        key = key_of(
            "train",
            self.config.model_dump(mode="json", exclude={"telemetry"}),
            sha256_of(self.config.deepspeed),
            sorted(ledger.digests("tokens").items()),
        )
        if self._reused("train", key, settings.run_dir):
            if seen := ledger.fact("train", "scrape"):
                console.note(f"[4/6] its last scrape: {seen}")
            return
        if settings.run_dir.exists():
            if ledger.started_with("train") == key:
                console.note(f"continuing {settings.run_dir}")
            else:
                console.note(
                    f"{settings.run_dir} was trained from different inputs: starting from scratch"
                )
                shutil.rmtree(settings.run_dir)
        ledger.begin("train", key)
        with self._timed():
            seen = train(console, settings, self.config)
        files = [layout.config, layout.metrics, layout.journal, layout.checkpoints / LATEST_NAME]
        ledger.finish("train", key, files, scrape=None if seen is None else str(seen))

    def convert(self) -> None:
        """Step 5: an export that stock transformers loads, and three continuations."""
        settings, console = self.settings, self.console
        console.step(5, "Convert the checkpoint, and generate from the export in a fresh process")
        key = key_of("convert", self.ledger.digests("train"))
        if not self._reused("convert", key, settings.export):
            shutil.rmtree(settings.export, ignore_errors=True)
            with self._timed():
                self._command("convert", str(settings.run_dir), "--out", str(settings.export),
                              "--dtype", "fp32")  # fmt: skip
            self.ledger.finish("convert", key, sorted(settings.export.glob("*.safetensors")))
        spoken = settings.work_dir / "continuations.txt"
        script = Path(speak.__file__)
        prompts = self._prompts()
        key = key_of("speak", self.ledger.digests("convert"), sha256_of(script), prompts)
        if not self._reused("speak", key, spoken):
            with self._timed():
                text = run(
                    console,
                    [sys.executable, "-I", str(_shown(script)), str(settings.export), *prompts],
                    settings.logs / "speak.log",
                    {
                        "HF_HUB_OFFLINE": "1",
                        "HF_MODULES_CACHE": str(settings.work_dir / "hf_modules"),
                    },
                )
            write_text_atomically(spoken, text + "\n")
            self.ledger.finish("speak", key, [spoken])
        for line in spoken.read_text(encoding="utf-8").splitlines():
            console.line(f"    > {line}")

    def summarise(self, seconds: float) -> None:
        """Step 6: where everything lies, what was learnt, what it cost, what to type next."""
        settings, console, vocabulary = self.settings, self.console, self.config.model.vocab_size
        console.step(6, "Summary")
        planned = self._planned_overhead()
        replayed = self._planned_overhead("--journal", str(settings.run_dir))
        layout = RunLayout(settings.run_dir)
        training, validation = rows(layout.metrics)
        last = training[-1]
        checkpoint = layout.checkpoints / (read_latest(layout.checkpoints) or "")
        prompt = shlex.quote(self._prompts()[0])
        console.table(
            ("run", settings.run_dir),
            ("journal", layout.journal),
            ("checkpoint", checkpoint),
            ("export", settings.export),
            (
                "loss",
                f"{last['loss']:.3f} after {last['step']} updates, phase {last['phase']}; "
                f"untrained {math.log(vocabulary):.3f} (ln {vocabulary})",
            ),
            ("validation loss", f"{validation[-1]['validation_loss']:.3f}"),
            (
                "FLOPs overhead",
                f"measured {last['overhead_ratio']:.2%}; planned {planned:.2%} with growth at the "
                f"earliest, {replayed:.2%} with this run's growth",
            ),
            ("time", duration(seconds)),
        )
        console.line("  Next:")
        if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in os.environ:
            console.line(f"  . {Path(sys.prefix) / 'bin' / 'activate'}")
        console.table(
            ("more text", f"sgt-ds generate {settings.export} --prompt {prompt}"),
            ("why it grew", f"sgt-ds growth show {settings.run_dir}"),
            ("checkpoints", f"sgt-ds checkpoint list {layout.checkpoints}"),
            ("your own data", "make demo DATA='path/*.json.gz'"),
            ("a real run", "sgt-ds plan --preset 573m --method sgt --k-max 3"),
        )

    def _planned_overhead(self, *flags: str) -> float:
        settings = self.settings
        overrides = settings.overrides()
        plan = self._command(
            "plan", str(settings.run_yaml), *overrides, *flags, "--json", quiet=True
        )
        return float(json.loads(plan)["overhead_ratio"])

    def _prompts(self) -> list[str]:
        if self.settings.data is None:
            return PROMPTS
        return sample.openings(self.settings.corpus, len(PROMPTS), PROMPT_WORDS)

    def _command(self, *arguments: str, quiet: bool = False) -> str:
        name = "-".join(word for word in arguments[:2] if word.isalpha())
        argv = [self._sgt_ds, *arguments]
        output = run(self.console, argv, self.settings.logs / f"{name}.log")
        for line in [] if quiet else output.splitlines():
            self.console.note(line)
        return output

    def _reused(self, step: str, key: str, what: Path) -> bool:
        held = self.ledger.holds(step, key)
        if held:
            self.console.note(f"reused: {what}")
        return held

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.console.note(f"took {duration(time.monotonic() - started)}")


def _sources() -> list[str]:
    """Digests of the generator's own files: another generator makes another corpus."""
    folder = Path(stories.__file__).parent
    names = ("phrases", "plots_people", "plots_things", "scenes", "stories", "words", "world")
    return [sha256_of(folder / f"{name}.py") for name in names]


def _shown(path: Path) -> Path:
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
