"""The demo's six steps in order. Each is keyed by its inputs: done ones are reused, the rest go on."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
            console.step(1, "Corpus: made stories, as C4 shards")
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
            shutil.rmtree(settings.shards, ignore_errors=True)
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
            sorted(ledger.digests("tokens").items()),
        )
        if self._reused("train", key, settings.run_dir):
            if seen := ledger.fact("train", "scrape"):
                console.note(f"[4/6] its last scrape said: {seen}")
            return
        if settings.run_dir.exists():
            if ledger.started_with("train") == key:
                console.note(f"going on with {settings.run_dir}")
            else:
                console.note(f"{settings.run_dir} was trained from other inputs: starting anew")
                shutil.rmtree(settings.run_dir)
        ledger.begin("train", key)
        with self._timed():
            seen = train(console, settings, self.config)
        files = [layout.config, layout.metrics, layout.journal, layout.checkpoints / "latest"]
        ledger.finish("train", key, files, scrape=None if seen is None else str(seen))

    def convert(self) -> None:
        """Step 5: an export that stock transformers loads, and three continuations."""
        settings, console = self.settings, self.console
        console.step(5, "Convert the checkpoint, and let the export speak in a fresh process")
        key = key_of("convert", self.ledger.digests("train"))
        if not self._reused("convert", key, settings.export):
            shutil.rmtree(settings.export, ignore_errors=True)
            with self._timed():
                self._command("convert", str(settings.run_dir), "--out", str(settings.export),
                              "--dtype", "fp32")  # fmt: skip
            self.ledger.finish("convert", key, sorted(settings.export.glob("*.safetensors")))
        spoken = settings.work_dir / "continuations.txt"
        script = Path(speak.__file__)
        prompts = PROMPTS if settings.data is None else sample.openings(
            settings.corpus, len(PROMPTS), PROMPT_WORDS
        )  # fmt: skip
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
        settings, console, config = self.settings, self.console, self.config
        console.step(6, "Summary")
        plan = json.loads(
            self._command(
                "plan", str(settings.run_yaml), *settings.overrides(), "--json", log="plan"
            )
        )
        layout = RunLayout(settings.run_dir)
        training, validation = rows(layout.metrics)
        untrained, last = math.log(config.model.vocab_size), training[-1]
        checkpoint = layout.checkpoints / (layout.checkpoints / "latest").read_text().strip()
        for name, value in (
            ("run", settings.run_dir),
            ("journal", layout.journal),
            ("checkpoint", checkpoint),
            ("export", settings.export),
            ("loss", f"{last['loss']:.3f} after {last['step']} updates; untrained {untrained:.3f} "
                     f"(ln {config.model.vocab_size})"),
            ("validation loss", f"{validation[-1]['validation_loss']:.3f}"),
            ("FLOPs overhead", f"planned {plan['overhead_ratio']:.2%} (growth at the earliest), "
                               f"measured {last['overhead_ratio']:.2%}"),
            ("phase", last["phase"]),
            ("time", duration(seconds)),
        ):  # fmt: skip
            console.line(f"  {name:<16} {value}")
        console.line("")
        console.line("  Next:")
        for command in (
            f"sgt-ds generate {settings.export} --prompt {PROMPTS[0]!r}",
            f"sgt-ds growth replay {layout.journal}",
            f"sgt-ds checkpoint list {layout.checkpoints}",
            "sgt-ds plan --preset 573m --method sgt --k-max 3",
        ):
            console.line(f"    {command}")

    def _command(self, *arguments: str, log: str | None = None) -> str:
        name = log or "-".join(word for word in arguments[:2] if word.isalpha())
        return run(self.console, [self._sgt_ds, *arguments], self.settings.logs / f"{name}.log")

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
